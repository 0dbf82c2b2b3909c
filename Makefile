# `make help` lists everything there is to run.

SHELL := /bin/sh
CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
PREFIX ?= /usr/local
# The limiter's libraries, where programs below target/ look for them.
LIMITER := $(TARGET)/lib/gpufence
# Where the demo's simulated machine is; it goes when the demo ends.
SIMULATED := /run/gpufence-simulated

export RUST_BACKTRACE ?= 0

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: cargo
cargo:
	@command -v $(CARGO) >/dev/null || { echo 'No cargo: install Rust 1.90 or later with rustup, then try again.' >&2; exit 1; }

.PHONY: demo
demo: cargo ## Install what is missing, build, and show what five containers see (as root)
	@tests/setup.sh demo
	$(CARGO) build --package gpufence-cli --package gpufence-shim --package gpufence-hook --package gpufence-tests --bins
	limiter/build.sh $(LIMITER)
	@if [ -e /proc/driver/nvidia/version ]; then \
		exec $(TARGET)/debug/gpufence demo; \
	fi; \
	trap 'rm -rf $(SIMULATED)' EXIT; trap : INT TERM; \
	rm -rf $(SIMULATED) && \
	echo 'No NVIDIA driver here: simulating a machine with two GPUs.' && \
	$(TARGET)/debug/gpufence-simulate $(SIMULATED) gpus=2 && \
	$(TARGET)/debug/gpufence demo --driver-root $(SIMULATED)

.PHONY: test
test: cargo ## Install what is missing, and run every check and test (as root)
	tests/setup.sh tests
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- --deny warnings
	$(CARGO) build --workspace --bins
	limiter/build.sh $(LIMITER)
	$(CARGO) test --workspace

.PHONY: bench
bench: cargo release ## Measure what it costs, beside what it replaces, as ratios (as root)
	@tests/setup.sh tests
	GPUFENCE_PROGRAMS=$(abspath $(TARGET)/release) $(CARGO) bench --quiet --profile dev --package gpufence-tests --benches

.PHONY: release
release: cargo ## Build the programs and the limiter for use
	limiter/build.sh $(LIMITER)
	$(CARGO) build --release --package gpufence-cli --package gpufence-node --package gpufence-extender
	# Static, docs/decisions/0005: less memory for each Pod, a quicker start for each container.
	$(CARGO) rustc --release --package gpufence-shim --bin containerd-shim-gpufence-v1 -- --codegen target-feature=+crt-static
	$(CARGO) rustc --release --package gpufence-shim --bin gpufence-runtime -- --codegen target-feature=+crt-static
	$(CARGO) rustc --release --package gpufence-hook --bin gpufence-hook -- --codegen target-feature=+crt-static

.PHONY: install
install: ## Install the programs, the limiter, manual pages and completions below PREFIX (run `make release` first)
	install -D -m 755 -t $(DESTDIR)$(PREFIX)/bin $(addprefix $(TARGET)/release/,gpufence containerd-shim-gpufence-v1 gpufence-runtime gpufence-hook gpufence-node gpufence-extender)
	install -D -m 644 -t $(DESTDIR)$(PREFIX)/lib/gpufence $(LIMITER)/libcuda.so.1 $(LIMITER)/libnvidia-ml.so.1
	install -D -m 644 -t $(DESTDIR)$(PREFIX)/lib/gpufence/compute $(LIMITER)/compute/libcuda.so.1
	$(TARGET)/release/gpufence man $(DESTDIR)$(PREFIX)/share/man/man1
	install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/man/man8 packaging/man/containerd-shim-gpufence-v1.8 packaging/man/gpufence-runtime.8 packaging/man/gpufence-hook.8 packaging/man/gpufence-node.8 packaging/man/gpufence-extender.8
	install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/man/man5 packaging/man/gpufence-config.5
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	sed 's|/usr/local|$(PREFIX)|' packaging/systemd/gpufence-node.service >$(DESTDIR)$(PREFIX)/lib/systemd/system/gpufence-node.service
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions $(DESTDIR)$(PREFIX)/share/zsh/site-functions $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
	$(TARGET)/release/gpufence completions bash >$(DESTDIR)$(PREFIX)/share/bash-completion/completions/gpufence
	$(TARGET)/release/gpufence completions zsh >$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_gpufence
	$(TARGET)/release/gpufence completions fish >$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/gpufence.fish

.PHONY: audit
audit: cargo ## Check dependencies (needs cargo-deny and cargo-machete)
	$(CARGO) deny check bans licenses sources
	$(CARGO) machete

.PHONY: clean
clean: ## Remove what was built
	$(CARGO) clean
