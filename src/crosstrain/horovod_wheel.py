"""Horovod for one environment: compiled from the unmodified source package, once, and kept in the user cache.

`wheels/horovod-<version>-<framework>-<its version>-py<X.Y>-<accelerator>-<machine>/`: the wheel's own name does not tell with which
framework it was compiled. Gloo reduces on the CPU, NCCL on GPUs; MPI is left out.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from crosstrain import devices, paths
from crosstrain.errors import OutcomeError
from crosstrain.locks import Lock
from crosstrain.pip_settings import pip_variables
from crosstrain.uv_process import Uv

#: what Horovod's build calls the frameworks
_NAMES = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW", "mxnet": "MXNET"}
_PIP = ("--no-deps", "--no-build-isolation", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar", "off")

# PyTorch's headers are C++17, Horovod's CMakeLists.txt puts -std=c++14 behind all CXXFLAGS.
_CXX17 = """\
#!/bin/sh
for argument; do
    shift
    case $argument in -std=c++11 | -std=c++14) argument=-std=c++17 ;; esac
    set -- "$@" "$argument"
done
exec {compiler} "$@"
"""
# Horovod's sources count on headers that older compilers and CUDA versions included by the way.
_HEADERS = (
    "cstdint string memory functional stdexcept sstream iostream mutex condition_variable unordered_map vector atomic thread".split()
)


def folder(lock: Lock, version: str) -> Path:
    """Where the wheel for this version of the framework (2.13.0+cpu) is kept, once it is compiled."""
    capabilities = [f"sm{capability}" for capability in _capabilities()] if lock.accelerator == "gpu" else []
    parts = ["horovod", lock.horovod, lock.modules[0], version, f"py{lock.python}", lock.accelerator, *capabilities, platform.machine()]
    return paths.cache_dir("wheels") / "-".join(str(part) for part in parts)


def check(lock: Lock, version: str) -> None:
    """Raise OutcomeError (env_missing) where there is no wheel and none can be compiled."""
    if folder(lock, version).exists():
        return
    tools = {os.environ.get("CXX", "g++"): "g++", "cmake": "cmake", "make": "make"}
    missing = [tool for tool in tools if shutil.which(tool) is None]
    what = f"Horovod {lock.horovod} is compiled on first use"
    if missing:
        install = " ".join(tools[tool] for tool in missing)
        raise OutcomeError("env_missing", f"{what}, and this system has no {' and no '.join(missing)}", f"apt-get install {install}")
    if lock.accelerator == "gpu" and not (_cuda_home() / "bin" / "nvcc").exists():
        raise OutcomeError("env_missing", f"{what}, and this system has no nvcc", "CUDA_HOME=<folder of the CUDA toolkit>")


def provide(lock: Lock, version: str, python: Path, work: Path, uv: Uv) -> Path:
    """The wheel for the framework that `python` has, compiled where there is none yet. `work`: a folder that is removed on failure.

    Raises OutcomeError (env_missing); an exception that leaves it stops the compilers.
    """
    kept = folder(lock, version)
    if not kept.exists():
        _compile(lock, version, python, work, uv).replace(kept)
    (wheel,) = kept.glob("*.whl")
    return wheel


def _compile(lock: Lock, version: str, python: Path, work: Path, uv: Uv) -> Path:
    """The folder, below `work`, that holds the wheel."""
    framework = lock.modules[0]
    pip = Uv(f"Horovod {lock.horovod} for {framework} {version}", uv.log, uv.lock_fd, uv.report)
    work.mkdir()
    pip.environment.update(pip_variables(os.environ))
    pip.environment.update(_settings(framework, work))
    if lock.accelerator == "gpu":
        pip.environment.update(_gpu_settings(python, work))
    uv.report(f"compiling Horovod {lock.horovod} for {framework} {version}: 3 to 6 minutes of CPU time, once")
    wanted = ("--no-binary", "horovod", f"horovod=={lock.horovod}", "--wheel-dir", str(work / "wheel"))
    pip.run("tool", "run", *pip.options, "--python", sys.executable, "pip", "--python", str(python), "wheel", *_PIP, *wanted)
    return work / "wheel"


def _settings(framework: str, work: Path) -> dict[str, str]:
    """Variables for the build (Horovod's docs/install.rst)."""
    settings = {
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_CPU_OPERATIONS": "GLOO",
        "LDFLAGS": "-s",
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses what Horovod's files ask for
        "TMPDIR": str(work),  # a build that is killed leaves nothing elsewhere
    }
    for name, word in _NAMES.items():
        settings[f"HOROVOD_WITH_{word}" if name == framework else f"HOROVOD_WITHOUT_{word}"] = "1"
    if framework == "torch":
        compiler = work / "c++17"
        compiler.write_text(_CXX17.format(compiler=os.environ.get("CXX", "g++")))
        compiler.chmod(0o755)
        settings["CXX"] = str(compiler)
    return settings


def _gpu_settings(python: Path, work: Path) -> dict[str, str]:
    """NCCL is the one that the framework brings as a package; it has no libnccl.so, by which the linker looks for it."""
    command = [str(python), "-c", "import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])"]
    found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if found.returncode:
        raise OutcomeError("env_missing", f"Horovod needs NCCL, and {python} has no package nvidia-nccl", "install it there")
    package, home = Path(found.stdout.strip()), work / "nccl"
    (home / "lib").mkdir(parents=True)
    (home / "include").symlink_to(package / "include")
    (home / "lib" / "libnccl.so").symlink_to(package / "lib" / "libnccl.so.2")
    settings = {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_NCCL_HOME": str(home),
        "HOROVOD_CUDA_HOME": str(_cuda_home()),
        "HOROVOD_WITHOUT_NVTX": "1",
        "CXXFLAGS": " ".join(f"-include {header}" for header in _HEADERS),
    }
    if _capabilities():
        settings["HOROVOD_BUILD_CUDA_CC_LIST"] = ",".join(_capabilities())
    return settings


def _cuda_home() -> Path:
    """The CUDA toolkit: CUDA_HOME, that of the nvcc on PATH, or the usual place."""
    nvcc = shutil.which("nvcc")
    return Path(os.environ.get("CUDA_HOME") or (Path(nvcc).resolve().parents[1] if nvcc else "/usr/local/cuda"))


def _capabilities() -> list[str]:
    """Compute capabilities of this machine's GPUs: ["90"]."""
    return sorted({"".join(map(str, gpu.compute_capability)) for gpu in devices.visible_gpus()})
