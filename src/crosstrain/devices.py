"""What this machine has: the GPUs that CUDA_VISIBLE_DEVICES leaves, the CPUs this process may use, a description of it all.

GPUs are read through NVML, never through a framework or the CUDA runtime: the driver holds no context on a device it measures.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from crosstrain.errors import OutcomeError


@dataclass(frozen=True)
class Gpu:
    """One CUDA device: a whole GPU, or one MIG device of it."""

    index: int  # NVML's index (PCI bus order); of the parent for a MIG device
    uuid: str  # GPU-… or MIG-…: what CUDA_VISIBLE_DEVICES takes
    name: str
    memory_mb: int  # 1e6 bytes
    compute_capability: tuple[int, int]
    mig_index: int | None = None

    @property
    def mig(self) -> bool:
        return self.mig_index is not None

    @property
    def label(self) -> str:
        """Short and unique on one machine: `0`, or `0_mig_1` for a MIG device."""
        return f"{self.index}_mig_{self.mig_index}" if self.mig else str(self.index)


# ---------------------------------------------------------------------------------------------------------------- GPUs


def open_nvml() -> tuple[Any, str]:
    """The initialised `pynvml` module and "", or None and one line that says why there is none (library, driver)."""
    try:
        import pynvml
    except ImportError as error:
        return None, f"nvidia-ml-py is not installed ({error})"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    return pynvml, ""


def visible_gpus(environ: Mapping[str, str] = os.environ, nvml: Any = None) -> list[Gpu]:
    """The GPUs that CUDA would show, in CUDA's order; [] without an NVIDIA driver.

    CUDA_VISIBLE_DEVICES holds indices (PCI bus order), `GPU-<uuid>`, `MIG-<uuid>` or a unique prefix of one. As in CUDA the list
    ends at an empty entry, a negative index or `NoDevFiles`. A GPU in MIG mode stands for its MIG devices: all of them when the
    variable is unset, the first one when the GPU itself is named. (One process can use only one MIG device.)

    Raises OutcomeError (unsupported) where CUDA would silently show fewer devices: an entry that is not on this machine, that
    is ambiguous, or that comes twice; indices mixed with UUIDs. And for indices among GPUs of different models without
    CUDA_DEVICE_ORDER=PCI_BUS_ID, where CUDA counts the fastest first.
    """
    if nvml is None:
        nvml, _ = open_nvml()
        if nvml is None:
            return []
    cards = _cards(nvml)
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return [gpu for card in cards for gpu in card.devices]
    order = environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    entries = list(itertools.takewhile(_shows_a_device, (part.strip() for part in value.split(","))))
    if len({entry.isdigit() for entry in entries}) > 1:
        raise OutcomeError("unsupported", f"CUDA_VISIBLE_DEVICES={value} mixes indices and UUIDs", "give all in one form")
    chosen: list[Gpu] = []
    for entry in entries:
        gpu = _named(entry, value, cards, order)
        if gpu in chosen:
            raise OutcomeError(
                "unsupported",
                f"CUDA_VISIBLE_DEVICES={value} names GPU {gpu.label} ({gpu.uuid}) twice",
                "name every GPU once: CUDA shows none otherwise",
            )
        chosen.append(gpu)
    return chosen


def _shows_a_device(entry: str) -> bool:
    return not (entry in ("", "NoDevFiles") or (entry.startswith("-") and entry[1:].isdigit()))


@dataclass(frozen=True)
class _Card:
    """A GPU as NVML lists it, and the CUDA devices it stands for: itself, or in MIG mode its MIG devices (perhaps none yet)."""

    gpu: Gpu
    devices: list[Gpu]


def _cards(nvml: Any) -> list[_Card]:
    """Every GPU in NVML's order. One that fell off the bus is left out."""
    cards = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = _gpu(nvml, handle, index, tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)), None)
        except nvml.NVMLError:
            continue
        cards.append(_Card(gpu, _mig_devices(nvml, handle, gpu) if _in_mig_mode(nvml, handle) else [gpu]))
    return cards


def _in_mig_mode(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # a GPU that can not do MIG
        return False


def _mig_devices(nvml: Any, handle: Any, parent: Gpu) -> list[Gpu]:
    found = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:  # the numbers have holes
            continue
        found.append(_gpu(nvml, device, parent.index, parent.compute_capability, number))
    return found


def _gpu(nvml: Any, handle: Any, index: int, capability: tuple[int, int], mig_index: int | None) -> Gpu:
    return Gpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_mb=round(nvml.nvmlDeviceGetMemoryInfo(handle).total / 1e6),
        compute_capability=capability,
        mig_index=mig_index,
    )


def _named(entry: str, value: str, cards: list[_Card], order: str) -> Gpu:
    """The device that one entry of CUDA_VISIBLE_DEVICES=`value` names."""

    def refuse(problem: str, hint: str) -> OutcomeError:
        return OutcomeError("unsupported", f"CUDA_VISIBLE_DEVICES={value}: {entry} {problem}", hint)

    everything = {gpu.uuid: gpu for card in cards for gpu in (card.gpu, *card.devices)}
    matches: list[Gpu] = []
    if entry.isdigit():
        matches = [card.gpu for card in cards if card.gpu.index == int(entry)]
        if matches and order != "PCI_BUS_ID" and len({card.gpu.name for card in cards}) > 1:
            raise refuse("is ambiguous: CUDA counts GPUs of different models fastest first",
                         "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPUs by UUID")  # fmt: skip
    elif entry.startswith(("GPU-", "MIG-")):
        prefix = entry[:4] + entry[4:].lower()
        matches = [gpu for uuid, gpu in everything.items() if uuid.startswith(prefix)]
    if len(matches) != 1:
        there = ", ".join(f"{gpu.label} ({gpu.uuid}, {gpu.name})" for gpu in everything.values())
        problem = "fits more than one GPU" if matches else "is not on this machine"
        raise refuse(f"{problem}; there is {there or 'no GPU'}", "name GPUs that are there (nvidia-smi -L lists them)")
    for card in cards:
        if card.gpu == matches[0]:
            if not card.devices:
                raise refuse("is in MIG mode and has no MIG device", "create one (nvidia-smi mig -cgi … -C)")
            return card.devices[0]
    return matches[0]


# ---------------------------------------------------------------------------------------------------------------- CPUs


def logical_cpus(root: Path = Path("/")) -> list[int]:
    """The logical CPUs this process may use: one per physical core first, so that the first n lie on n cores where there are n.

    From the affinity mask, cut to the cgroup's CPU quota (rounded up). `root` is the file system to read (tests).
    """
    by_core: dict[tuple[str, str], list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        by_core.setdefault(_core(cpu, root), []).append(cpu)
    threads = [(nth, cpu) for siblings in by_core.values() for nth, cpu in enumerate(siblings)]
    ordered = [cpu for _, cpu in sorted(threads)]
    quota = cpu_quota(root)
    return ordered if quota is None else ordered[: max(1, math.ceil(quota))]


def physical_cores(root: Path = Path("/")) -> int:
    """How many physical cores `logical_cpus` lie on."""
    return len({_core(cpu, root) for cpu in logical_cpus(root)})


def _core(cpu: int, root: Path) -> tuple[str, str]:
    """(package, core) of a logical CPU; a core of its own where the kernel tells nothing (some containers)."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
    return (package, core) if core else ("", f"cpu{cpu}")


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The CPU time this process may use per unit of time, in CPUs (cgroup v2 cpu.max, v1 cpu.cfs_quota_us); None = no limit.

    The smallest one from this process's cgroup up to the mount counts. Inside a container the path in /proc/self/cgroup may be
    the host's and not exist: then the mount itself is the container's cgroup.
    """
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / ("sys/fs/cgroup/cpu" if controllers else "sys/fs/cgroup")  # v1, v2
        folder = mount / path.lstrip("/")
        for group in (folder, *folder.parents):
            limits += _quota_in(group)
            if group == mount:
                break
    return min(limits, default=None)


def _quota_in(group: Path) -> list[float]:
    v2 = _read(group / "cpu.max").split()
    quota, period = v2 or (_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))
    return [int(quota) / int(period)] if quota not in ("", "max", "-1") else []


# --------------------------------------------------------------------------------------------------------- the machine


def cpu_name() -> str:
    """The CPU's model as the kernel names it, else the architecture."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def describe_machine(nvml: Any = None) -> dict[str, Any]:
    """Plain JSON for the environment artifact; what is unknown is absent. Memory in MB (1e6 bytes), clocks in MHz, power in W."""
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        system = platform.system()
    known: dict[str, Any] = {
        "host": platform.node(),
        "cpu": cpu_name(),
        "cpu_logical": len(logical_cpus()),
        "cpu_cores": physical_cores(),
        "cpu_quota": cpu_quota(),
        "cpu_governor": _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "memory_mb": round(psutil.virtual_memory().total / 1e6),
        "os": system,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    if nvml is None:
        nvml, _ = open_nvml()
    if nvml is not None:
        known |= _describe_gpus(nvml)
    return {key: value for key, value in known.items() if value not in (None, "", [])}


def _describe_gpus(nvml: Any) -> dict[str, Any]:
    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(*arguments)
        except nvml.NVMLError:
            return None

    version = ask("nvmlSystemGetCudaDriverVersion_v2")  # 12040 is CUDA 12.4
    gpus = []
    for card in _cards(nvml):
        gpu = card.gpu
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        power = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        about = {
            "index": gpu.index,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "memory_mb": gpu.memory_mb,
            "compute_capability": ".".join(map(str, gpu.compute_capability)),
            "mig": [device.uuid for device in card.devices if device.mig],
            "sm_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            "memory_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_MEM),
            "power_limit_w": None if power is None else power / 1000,
            "persistence": ask("nvmlDeviceGetPersistenceMode", handle),
        }
        gpus.append({key: value for key, value in about.items() if value not in (None, [])})
    return {
        "nvidia_driver": ask("nvmlSystemGetDriverVersion"),
        "cuda": version and f"{version // 1000}.{version % 1000 // 10}",
        "gpus": gpus,
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
