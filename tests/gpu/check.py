#!/usr/bin/env python3
"""Checks the limiter and the node agent on a machine with an NVIDIA GPU, as root, in under five minutes.

    make release && python3 tests/gpu/check.py

It needs the built files, PyTorch, nvcc and a C compiler. There is no container: the files that a container would be given are
put where it would have them, below /usr/lib/gpufence, and taken away again. Each check prints a line, with what was measured.

Exit status: 0 all passed, 1 one failed or couldn't be run here, 2 wrong usage. What couldn't be run is let pass with
--allow-missing, as on the stand-ins.
"""

import argparse
import ctypes
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
VIEW = Path("/usr/lib/gpufence")
MIB = 1 << 20
TORCH = """
import sys, torch
share = int(sys.argv[1])
free, total = torch.cuda.mem_get_info(0)
print("total", total, torch.cuda.get_device_properties(0).total_memory)
a = torch.randn(512, 512, device="cuda")
print("product", bool(torch.allclose(a @ torch.eye(512, device="cuda"), a, atol=1e-2)))
try:
    torch.empty(share, dtype=torch.uint8, device="cuda")
    print("over no error")
except torch.cuda.OutOfMemoryError:
    print("over OutOfMemoryError")
half = torch.empty(share // 2, dtype=torch.uint8, device="cuda")
print("half", half.numel(), torch.cuda.memory_reserved(0) <= share)
del half
torch.cuda.empty_cache()
print("again", torch.empty(share // 2, dtype=torch.uint8, device="cuda").numel())
"""


class NotHere(Exception):
    """A check that this machine can't run, and why."""


class Failed(Exception):
    """A check that didn't hold."""


def expect(holds, what):
    if not holds:
        raise Failed(what)


class Machine:
    """The GPU, the real driver and the files of a container with one share of it."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.share = arguments.share_mib * MIB
        self.work = Path(tempfile.mkdtemp(prefix="gpufence-gpu-"))
        self.cuda = self.find("libcuda.so.1")
        self.nvml = self.find("libnvidia-ml.so.1")
        self.uuid, self.memory = self.ask_nvml()
        self.processes = []

    def find(self, name):
        """The real library's file, as the loader finds it."""
        if self.arguments.driver_libraries:
            return (self.arguments.driver_libraries / name).resolve(strict=True)
        ctypes.CDLL(name)
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(None, 5)[-1]
            if Path(path).name.startswith(name.removesuffix(".1")):
                return Path(path)
        raise SystemExit(f"{name} isn't where the loader looks: there is no NVIDIA driver here")

    def ask_nvml(self):
        nvml = ctypes.CDLL(str(self.nvml))
        device, uuid, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), (ctypes.c_ulonglong * 3)()
        version = ctypes.create_string_buffer(96)
        calls = [
            nvml.nvmlInit_v2(),
            nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)),
            nvml.nvmlDeviceGetUUID(device, uuid, 96),
            nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)),
            nvml.nvmlSystemGetDriverVersion(version, 96),
        ]
        if any(calls):
            raise SystemExit(f"NVML doesn't tell of a GPU: {calls}")
        self.driver = version.value.decode()
        return uuid.value.decode(), memory[0]

    def prepare(self):
        if VIEW.exists():
            raise SystemExit(f"{VIEW} is there already; this machine runs Gpufence, or an earlier check was killed: remove it")
        self.lay_out(compute=100)
        compiler = [shutil.which("cc") or shutil.which("gcc") or "cc", "-O1", "-pthread", "-o"]
        # What only the stand-in has is never called here.
        lazy = ["-Wl,--unresolved-symbols=ignore-all", "-Wl,-z,lazy"]
        programs = HERE.parent / "programs"
        subprocess.run([*compiler, self.work / "limited", programs / "limited.c", self.cuda, *lazy], check=True)
        subprocess.run([*compiler, self.work / "measured", programs / "measured.c", "-ldl"], check=True)

    def lay_out(self, compute):
        """The limits file, an empty usage folder, and the libraries as a container's loader finds them."""
        shutil.rmtree(VIEW, ignore_errors=True)
        (VIEW / "limiter").mkdir(parents=True)
        (VIEW / "usage").mkdir(mode=0o1777)
        (VIEW / "limits").write_text(
            "gpufence-limits 1\non-failure deny\n"
            f"gpu {self.uuid} memory-bytes {self.share} compute-percent {compute}\n"
        )
        limiter = self.arguments.limiter
        shadow = limiter / "compute/libcuda.so.1" if compute < 100 else limiter / "libcuda.so.1"
        shutil.copy(shadow, VIEW / "limiter/libcuda.so.1")
        shutil.copy(limiter / "libnvidia-ml.so.1", VIEW / "limiter/libnvidia-ml.so.1")
        (VIEW / "limiter/libcuda-driver.so.1").symlink_to(self.cuda)
        (VIEW / "limiter/libnvidia-ml-driver.so.1").symlink_to(self.nvml)

    def environment(self, limited):
        environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        folders = [str(self.cuda.parent)]
        if limited:
            folders.insert(0, str(VIEW / "limiter"))
        if before := environment.get("LD_LIBRARY_PATH"):
            folders.append(before)
        return environment | {"LD_LIBRARY_PATH": ":".join(folders)}

    def start(self, *command, limited=True, **more):
        process = subprocess.Popen(
            [str(word) for word in command],
            env=self.environment(limited),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **more,
        )
        self.processes.append(process)
        return process

    def run(self, *command, limited=True, may_fail=False):
        process = self.start(*command, limited=limited)
        output, _ = process.communicate(timeout=120)
        if process.returncode and not may_fail:
            raise Failed(f"{command} ended with {process.returncode}: {output.strip()}")
        return output

    def limited(self, words, **more):
        return self.run(self.work / "limited", *words.split(), **more)

    def tidy(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        shutil.rmtree(VIEW, ignore_errors=True)
        shutil.rmtree(self.work, ignore_errors=True)


def after(text, word):
    """What stands after a word at a line's beginning."""
    found = re.search(rf"^{re.escape(word)} (.*)$", text, re.MULTILINE)
    if not found:
        raise Failed(f'no "{word}" in: {text.strip()}')
    return found.group(1)


def bytes_of_the_driver_api(machine):
    output = machine.limited("init context 0 info")
    found = re.match(r"0 free (\d+) total (\d+)", after(output, "info"))
    expect(found, f"cuMemGetInfo: {output}")
    free, total = found.groups()
    expect(int(total) == machine.share, f"cuMemGetInfo tells of {total} bytes, and the share has {machine.share}")
    output = machine.limited(f"init context 0 linear {free} linear 1 free linear {int(free) + 1}")
    answers = re.findall(r"^linear (\d+)$", output, re.MULTILINE)
    expect(answers == ["0", "2", "2"], f"all of the share, a byte more, and both at once: {answers}")
    return f"a context takes {(machine.share - int(free)) // MIB} MiB"


def every_way_to_allocate(machine):
    over = machine.share - 16 * MIB
    denied = []
    for kind in ["linear", "managed", "physical", "array", "async", "pool", "graph"]:
        output = machine.limited(f"init context 0 {kind} {over} {kind} 32M")
        answers = re.findall(rf"^{kind} (\d+)$", output, re.MULTILINE)
        # 1: CUDA_ERROR_INVALID_VALUE, where the GPU has no arrays of that size.
        denied.append(f"{kind} {answers}")
        expect("0" not in answers[:1], f"{kind} of more than what a context leaves was granted: {output.strip()}")
    return ", ".join(denied)


def cuda_runtime(machine):
    if not shutil.which("nvcc"):
        raise NotHere("there is no nvcc")
    machine.run("nvcc", "-o", machine.work / "share", HERE / "share.cu", limited=False)
    output = machine.run(machine.work / "share", "bytes")
    expect(after(output, "total") == f"{machine.share} properties {machine.share}", output)
    answers = [after(output, word) for word in ["info", "all", "more", "free", "over"]]
    expect(answers == ["0", "0", "2", "0", "2"], f"cudaMalloc to the byte: {output}")
    output = machine.run(machine.work / "share", "compute", 100000)
    expect(after(output, "sum") == str(sum(range(100000))), f"a kernel's result: {output}")
    times = {limited: [] for limited in (False, True)}
    for _ in range(5):
        for limited in times:
            times[limited].append(float(after(machine.run(machine.work / "share", "launches", 20000, limited=limited), "launch")))
    direct, shadow = (statistics.median(times[limited]) for limited in (False, True))
    return f"a launch takes {direct:.0f} ns without the limiter and {shadow:.0f} ns with it, ratio {shadow / direct:.2f}"


def pytorch(machine):
    script = machine.work / "check_torch.py"
    script.write_text(TORCH)
    if machine.run(sys.executable, "-c", "import torch", limited=False, may_fail=True):
        raise NotHere("there is no PyTorch")
    output = machine.run(sys.executable, script, machine.share)
    half = machine.share // 2
    expected = {
        "total": f"{machine.share} {machine.share}",
        "product": "True",
        "over": "OutOfMemoryError",
        "half": f"{half} True",
        "again": str(half),
    }
    for word, value in expected.items():
        expect(after(output, word) == value, f"{word}: {output}")
    return "torch.cuda.OutOfMemoryError over the share, and the caching allocator sees the smaller card"


def nvidia_smi(machine):
    program = shutil.which("nvidia-smi")
    if not program or machine.arguments.driver_libraries:
        output = machine.limited("nvml")
        expect(f"{machine.uuid} total {machine.share} " in output, output)
        return "asked by NVML's calls alone: there is no nvidia-smi"
    output = machine.run(program, "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits").strip()
    expect(output == f"{machine.uuid}, {machine.share // MIB}", f"nvidia-smi shows: {output}")
    return output


def one_budget(machine):
    part = machine.share * 6 // 10
    first = machine.start(machine.work / "limited", "init", "context", "0", "linear", str(part), "sleep", "60000")
    for line in first.stdout:
        if line.startswith("linear"):
            expect(line.strip() == "linear 0", f"the first process: {line}")
            break
    output = machine.limited(f"init context 0 linear {part}")
    expect(after(output, "linear") == "2", f"a second process with as much: {output}")
    first.send_signal(signal.SIGKILL)
    first.wait()
    output = machine.limited(f"init context 0 linear {part}")
    expect(after(output, "linear") == "0", f"after kill -9 of the first: {output}")
    return "two processes share one budget, and kill -9 gives it back"


def overhead(machine):
    output = machine.run(machine.work / "measured", machine.cuda, "allocate", "500")
    samples = {"direct": [], "shadow": []}
    for way, value in re.findall(r"^allocate (\w+) ([\d.]+)$", output, re.MULTILINE):
        samples[way].append(float(value))
    direct, shadow = statistics.median(samples["direct"]), statistics.median(samples["shadow"])
    return f"cuMemAlloc takes {direct:.0f} ns direct and {shadow:.0f} ns through the limiter, ratio {shadow / direct:.2f}"


def compute(machine):
    if not (machine.work / "share").exists():
        raise NotHere("there is no nvcc")
    done = {}
    try:
        for percent in (100, 50, 25):
            machine.lay_out(compute=percent)
            done[percent] = int(after(machine.run(machine.work / "share", "busy", "6"), "done"))
    finally:
        machine.lay_out(compute=100)
    shares = {percent: done[percent] * 100 / done[100] for percent in (50, 25)}
    for percent, share in shares.items():
        expect(abs(share - percent) <= 10, f"{percent} % of compute came to {share:.0f} %")
    return ", ".join(f"{percent} % came to {share:.0f} %" for percent, share in shares.items())


class Agent:
    """gpufence-node with a policy of its own, and a container that is a cgroup and a record."""

    def __init__(self, machine):
        self.machine, self.state = machine, machine.work / "state"
        policy = machine.work / "policy.toml"
        policy.write_text(
            f'driver_root = "{machine.arguments.driver_root}"\nstate_dir = "{self.state}"\n'
            f'stage_dir = "{machine.work}/stage"\n[watchdog]\ngrace_seconds = 0\ntolerance_mib = 600\n'
        )
        self.container = f"{os.getpid():064x}"
        tree = next((path for path in map(Path, ["/sys/fs/cgroup/devices", "/sys/fs/cgroup"]) if (path / "cgroup.procs").exists()), None)
        if tree is None:
            raise NotHere("there are no cgroups at /sys/fs/cgroup")
        self.cgroup = tree / self.container
        try:
            self.cgroup.mkdir()
        except OSError as error:
            raise NotHere(f"no cgroup can be made: {error}") from error
        folder = self.state / "containers/check" / self.container
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(
            f'{{"namespace": "check", "id": "{self.container}", "name": "check", "origin": "tests/gpu",'
            f' "driverVersion": "{machine.driver}", "driverCapabilities": ["compute"], "droppedCapabilities": [],'
            f' "shares": [{{"gpu": "{machine.uuid}", "memoryMiB": {machine.share // MIB}}}]}}'
        )
        self.log = machine.work / "agent.log"
        words = ["gpufence-node", "--policy", policy, "--listen", "127.0.0.1:0", "--nvml", machine.nvml]
        self.process = subprocess.Popen(
            [machine.arguments.programs / words[0], *words[1:]], stderr=self.log.open("w"), env=os.environ | {"NO_COLOR": "1"}
        )
        machine.processes.append(self.process)
        for _ in range(100):
            if (self.state / "node.json").exists():
                return
            time.sleep(0.1)
        raise Failed(f"gpufence-node doesn't start: {self.log.read_text()}")

    def stop(self):
        self.process.terminate()
        self.process.wait()
        for _ in range(100):
            try:
                return self.cgroup.rmdir()
            except OSError:
                time.sleep(0.05)


def watchdog(machine):
    agent = Agent(machine)
    try:
        words = ["direct", str(machine.cuda), str(machine.share * 2), "sleep", "60000"]
        offender = machine.start(machine.work / "limited", *words, limited=False)
        honest = machine.start(machine.work / "limited", "init", "context", "0", "linear", "16M", "sleep", "60000")
        for process in (offender, honest):
            (agent.cgroup / "cgroup.procs").write_text(str(process.pid))
        line = ""
        for line in offender.stdout:
            if line.startswith("direct"):
                break
        expect(line.strip().endswith(" 0"), f"the real driver by its path: {line}")
        began = time.monotonic()
        try:
            offender.wait(timeout=20)
        except subprocess.TimeoutExpired:
            log = agent.log.read_text()
            raise Failed(f"the offender lives after 20 s; does NVML list its PID {offender.pid}? The agent's log: {log}")
        took = time.monotonic() - began
        expect(offender.returncode == -signal.SIGKILL, f"the offender ended with {offender.returncode}")
        expect(honest.poll() is None, "an honest process of the same container was ended")
        expect(took < 3, f"it took {took:.1f} s, more than two periods")
        state = " ".join((agent.state / "node.json").read_text().split())
        return f"one that loaded the real driver was gone after {took:.1f} s; {state}"
    finally:
        agent.stop()


CHECKS = [
    bytes_of_the_driver_api,
    every_way_to_allocate,
    cuda_runtime,
    pytorch,
    nvidia_smi,
    one_budget,
    overhead,
    compute,
    watchdog,
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = HERE.parents[1] / "target"
    parser.add_argument("--programs", type=Path, default=target / "release", help="the folder of gpufence-node")
    parser.add_argument("--limiter", type=Path, default=target / "lib/gpufence", help="the folder of the limiter's libraries")
    parser.add_argument("--driver-root", default="/", help="the driver root, for gpufence-node")
    parser.add_argument("--driver-libraries", type=Path, help="the folder of libcuda.so.1 and libnvidia-ml.so.1")
    parser.add_argument("--share-mib", type=int, default=4096, help="the memory limit (default: 4096)")
    parser.add_argument("--allow-missing", action="store_true", help="what this machine can't run is no failure")
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="run only these: " + " ".join(check.__name__ for check in CHECKS))
    arguments = parser.parse_args()
    wanted = [check for check in CHECKS if not arguments.checks or check.__name__ in arguments.checks]
    if len(wanted) < len(arguments.checks):
        parser.error("there is no such check")
    if os.geteuid() != 0:
        parser.error("run this as root: it writes below /usr/lib/gpufence")
    machine = Machine(arguments)
    print(f"driver {machine.driver}, {machine.uuid}, {machine.memory // MIB} MiB, a share of {arguments.share_mib} MiB")
    missing = failed = 0
    try:
        machine.prepare()
        for check in wanted:
            began = time.monotonic()
            try:
                result, said = "passed", check(machine)
            except NotHere as error:
                missing += 1
                result, said = "not here", str(error)
            except (Failed, OSError, subprocess.SubprocessError) as error:
                failed += 1
                result, said = "FAILED", str(error)
            print(f"{result:8} {check.__name__} ({time.monotonic() - began:.1f} s): {said}", flush=True)
    finally:
        machine.tidy()
    print(f"{len(wanted) - missing - failed} passed, {missing} could not be run here, {failed} failed")
    return 1 if failed or (missing and not arguments.allow_missing) else 0


if __name__ == "__main__":
    sys.exit(main())
