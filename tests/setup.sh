#!/bin/sh
# Installs what the demo and the tests need, on Debian 12 as root.
#
#   tests/setup.sh demo     containerd, runc and a C compiler
#   tests/setup.sh tests    also crun, busybox, protoc, and newer containerds below target/engines, beside the system's
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
engines=${CARGO_TARGET_DIR:-$here/../target}/engines
mkdir -p "$engines"
engines=$(CDPATH='' cd -- "$engines" && pwd)

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# Installs the packages that are missing.
install() {
    missing=
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    [ "$(id -u)" = 0 ] || fail "$missing must be installed first; run this as root"
    say "installing$missing"
    export DEBIAN_FRONTEND=noninteractive
    # Services that a package brings must not start: what runs here runs in folders of its own.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        trap 'rm -f "$policy"' EXIT
    fi
    apt-get -qq update
    # shellcheck disable=SC2086
    apt-get -qq install -y --no-install-recommends $missing >/dev/null
    rm -f "$policy"
    trap - EXIT
}

# Debian's own archive, as this machine is set up to reach it, for another suite.
sources_of() {
    for file in /etc/apt/sources.list.d/*.sources; do
        [ -e "$file" ] || continue
        awk -v suite="$1" -v RS= -v ORS='\n\n' '/(^|\n)Suites:[^\n]*bookworm( |\n)/ && !done {
            gsub(/(^|\n)Suites:[^\n]*/, "\nSuites: " suite)
            gsub(/(^|\n)Components:[^\n]*/, "\nComponents: main non-free")
            sub(/^\n/, "")
            print
            done = 1
        }' "$file"
    done
    [ -e /etc/apt/sources.list ] || return 0
    sed -n 's/^\(deb .*\) bookworm main.*/\1 '"$1"' main/p' /etc/apt/sources.list | head -n 1 |
        sed 's/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\) .*/Types: deb\nURIs: \2\nSuites: '"$1"'\nComponents: main non-free\nSigned-By: \/usr\/share\/keyrings\/debian-archive-keyring.gpg\n/'
}

# Unpacks packages of another suite below target/engines/NAME, without installing them.
unpack() {
    suite=$1 name=$2
    shift 2
    [ -e "$engines/$name/.complete" ] && return 0
    say "fetching $* of $suite"
    work=$(mktemp -d)
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/parts"
    sources_of "$suite" >"$work/parts/suite.sources"
    [ -s "$work/parts/suite.sources" ] || fail "no Debian archive is set up in /etc/apt to derive $suite from"
    options="-o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=$work/parts -o Dir::State::Lists=$work/lists
        -o Dir::Cache=$work/cache -o APT::Sandbox::User=root -o APT::Get::List-Cleanup=0"
    # shellcheck disable=SC2086
    (cd "$work" && apt-get -qq $options update && apt-get -qq $options download "$@") >/dev/null
    rm -rf "${engines:?}/$name"
    mkdir -p "$engines/$name"
    for package in "$work"/*.deb; do
        dpkg -x "$package" "$engines/$name"
    done
    rm -rf "$work"
    touch "$engines/$name/.complete"
}

case ${1-} in
demo)
    install containerd runc gcc libc6-dev make
    ;;
tests)
    install containerd runc crun gcc libc6-dev make busybox-static protobuf-compiler man-db python3 strace musl-tools patchelf curl openssl docker.io podman
    unpack trixie containerd-1.7 containerd
    unpack sid containerd-2 containerd
    unpack trixie docker-26 docker.io docker-cli
    unpack sid docker-28 docker.io docker-cli
    # A newer runc, with the C library that it was built on.
    unpack sid runc-new runc libc6 libseccomp2
    runc=$engines/runc-new/usr/sbin/runc
    [ -e "$runc" ] || runc=$engines/runc-new/usr/bin/runc
    libraries=$engines/runc-new/usr/lib/x86_64-linux-gnu
    ln -sfn "$runc" "$engines/runc-new/runc"
    patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" --set-rpath "$libraries" "$runc"
    # NVIDIA's own user-mode libraries, to be staged and loaded as they are.
    unpack bookworm nvidia-535 libcuda1 libnvidia-ml1 libnvidia-ptxjitcompiler1 libnvidia-cfg1 nvidia-smi
    unpack trixie nvidia-550 libcuda1 libnvidia-ml1 libnvidia-ptxjitcompiler1 libnvidia-cfg1 nvidia-smi
    # A small Debian: its C library with the loader's cache and ldconfig.
    unpack bookworm debian libc6 libc-bin libgcc-s1 dash
    for name in containerd-1.7 containerd-2; do
        say "$name: $("$engines/$name/usr/bin/containerd" --version | cut -d ' ' -f 3)"
    done
    say "runc-new: $("$engines/runc-new/runc" --version | head -n 1)"
    ;;
*)
    fail 'say "demo" or "tests"'
    ;;
esac
