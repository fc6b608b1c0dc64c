"""System samples of one run: what its processes, the machine and its GPUs did, and whether others disturbed the measurement.

Taken from the driver at 1 to 2 Hz, never from a worker (docs: METHOD). NVML is asked about the leased GPUs only.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import psutil

from crosstrain.devices import Gpu, open_nvml
from crosstrain.processes import Stat, all_pids, read_stat

Series = dict[str, tuple[list[int], list[float]]]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h

# NVML's clock event reasons that hold the SM clock below what the load would get (nvml.h, nvmlClocksEventReasons).
# Not among them: idle, clocks the user set, sync boost, a display's clock.
_THROTTLED = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}


def throttle_words(reasons: int) -> list[str]:
    """What holds the SM clock down, in words, from NVML's clock event reasons; [] when nothing does."""
    return [name for bit, name in _THROTTLED.items() if reasons & bit]


OTHERS_CPU_LIMIT = 0.05  # of the leased CPUs' time: above it the run is contaminated
_MIN_WINDOW_S = 1.0  # below, the kernel's 10 ms ticks are too coarse for the 5 %
_MIN_ENERGY_WINDOW_S = 10.0
_GPUS_A_SAMPLE = 4
_LEAST_S = 0.09  # between samples: below, one tick of a process is 10 % and more


class ProcessTree:
    """CPU time and memory of some processes and all their descendants; cheap, because a process once seen to be a stranger is not
    looked at again.

    CPU time never falls: a process that ends passes its time to the parent that waits for it, in the tree or this driver; where
    nobody got it, the last value seen is kept.
    """

    def __init__(self) -> None:
        self._members: dict[int, Stat] = {}
        self._roots: set[int] = set()
        self._strangers: set[int] = set()
        self._lost_ticks = 0
        self._driver_waited = 0
        self.ever: set[int] = set()  # pids of all members so far, also of those that ended

    def watch(self, pids: Iterable[int]) -> None:
        """Add processes; to be called while they live (a pid may be reused later)."""
        for pid in pids:
            stat = read_stat(pid)
            if stat is not None:
                self._roots.add(pid)
                self._members[pid] = stat
                self.ever.add(pid)
        self._strangers = set()

    def update(self) -> None:
        """Look at the processes again: O(members + processes new since the last look)."""
        present = set(all_pids())
        self._strangers &= present
        joined = self._join({pid: stat for pid in present - self._strangers - self._members.keys() if (stat := read_stat(pid))})
        now = joined | {pid: stat for pid in self._members if (stat := self._same(pid))}
        self._keep_time_of_the_ended(now)
        self._members = now
        self.ever |= now.keys()

    def _join(self, new: dict[int, Stat]) -> dict[int, Stat]:
        """Those of the new processes that belong to the tree, by their parent or, where that has ended, their session."""
        sessions = {stat.session for stat in self._members.values()} & self._roots
        ours: dict[int, Stat] = {}
        grew = True
        while grew:
            more = {
                pid: stat
                for pid, stat in new.items()
                if pid not in ours and (stat.parent in self._members or stat.parent in ours or stat.session in sessions)
            }
            ours |= more
            grew = bool(more)
        self._strangers |= new.keys() - ours.keys()
        return ours

    def _same(self, pid: int) -> Stat | None:
        stat = read_stat(pid)
        return stat if stat is not None and stat.start == self._members[pid].start else None

    def _keep_time_of_the_ended(self, now: dict[int, Stat]) -> None:
        driver = read_stat(os.getpid())
        before, self._driver_waited = self._driver_waited, driver.waited if driver else 0
        expected: dict[int, int] = {}  # nearest living ancestor in the tree, else the last parent -> ticks it should have got
        for pid in self._members.keys() - now.keys():
            heir = self._members[pid].parent
            while heir in self._members and heir not in now:
                heir = self._members[heir].parent
            expected[heir] = expected.get(heir, 0) + self._members[pid].ticks
        for heir, ticks in expected.items():
            if heir == os.getpid():  # waited for here: then the exact time is known, up to the very end
                self._lost_ticks += max(ticks, self._driver_waited - before)
            else:
                got = now[heir].waited - self._members[heir].waited if heir in self._members else 0
                self._lost_ticks += max(0, ticks - got)

    def cpu_s(self) -> float:
        """User + system time so far, of the dead, too."""
        return (self._lost_ticks + sum(stat.ticks for stat in self._members.values())) / _TICKS_PER_S

    def memory_mb(self) -> float:
        """Resident memory (shared pages counted in each process)."""
        return sum(stat.rss_pages for stat in self._members.values()) * _PAGE_MB


def read_cpu_times() -> dict[str, tuple[float, float]]:
    """/proc/stat: `cpu` (all) and `cpu<id>` -> (idle, total) seconds since boot; idle includes waiting for I/O, total the time
    stolen by the hypervisor. (psutil gives the CPUs in a list without their ids, which shifts when one is offline.)
    """
    times = {}
    with open("/proc/stat", encoding="ascii") as file:
        for line in file:
            if not line.startswith("cpu"):
                break
            name, *fields = line.split()
            ticks = [int(field) for field in fields[:8]]  # the guests' time after these is part of user
            times[name] = ((ticks[3] + ticks[4]) / _TICKS_PER_S, sum(ticks) / _TICKS_PER_S)
    return times


class SystemSampler:
    """Samples of one run. `sample()` is to be called at 1 to 2 Hz; all windows are unix times in seconds.

    root_pids: the workers (or mpirun); more with `watch`. cpus: the leased logical CPUs, None if the run has none of its own.
    gpus: the leased GPUs. Best made before the workers start: what the devices hold then is what the others hold.
    """

    def __init__(self, root_pids: list[int], cpus: list[int] | None, gpus: list[Gpu], nvml: Any = None) -> None:
        self._nvml = nvml if nvml is not None or not gpus else open_nvml()[0]
        self._cpus = cpus
        self._gpus = [_GpuSampler(gpu, self._nvml) for gpu in gpus] if self._nvml is not None else []
        self._tree = ProcessTree()
        self._times: list[float] = []
        self._values: dict[str, list[float]] = {}  # NaN where unknown; all as long as _times
        self._intruders: list[tuple[float, str]] = []
        self._before: tuple[float, dict[str, tuple[float, float]], float] | None = None
        self.watch(root_pids)
        self.sample()

    def watch(self, pids: Iterable[int]) -> None:
        """More processes of the run (their descendants come with them)."""
        self._tree.watch(pids)

    def sample(self) -> None:
        """Take one sample."""
        self._tree.update()
        now, cpu_times, own_s = time.time(), read_cpu_times(), self._tree.cpu_s()
        memory = psutil.virtual_memory()
        row = {
            "system/worker_memory_megabytes": self._tree.memory_mb() or math.nan,  # none before the start and after the end
            "system/system_memory_usage_megabytes": memory.used / 1e6,
            "system/system_memory_usage_percentage": memory.used / memory.total * 100,
            "_own_s": own_s + time.process_time(),
            "_idle_s": sum(cpu_times.get(f"cpu{cpu}", (math.nan, 0.0))[0] for cpu in self._cpus or []),
            "_total_s": sum(cpu_times.get(f"cpu{cpu}", (0.0, math.nan))[1] for cpu in self._cpus or []),
        }
        if self._before is not None:
            then, times_then, own_then = self._before
            (idle, total), (idle_then, total_then) = cpu_times["cpu"], times_then["cpu"]
            if total > total_then:
                # the kernel's counters of idle time may go back, and do not tick together with the others
                row["system/cpu_utilization_percentage"] = min(100.0, max(0.0, (1 - (idle - idle_then) / (total - total_then)) * 100))
            if now - then > _LEAST_S:
                row["system/worker_cpu_percentage"] = max(0.0, own_s - own_then) / (now - then) * 100
        self._before = now, cpu_times, own_s
        for gpu in self._gpus_in_turn():
            row |= gpu.sample()
            self._intruders += [(now, intruder) for intruder in gpu.intruders(self._tree)]
        for key in self._values.keys() | row.keys():
            self._values.setdefault(key, [math.nan] * len(self._times)).append(row.get(key, math.nan))
        self._times.append(now)

    def _gpus_in_turn(self) -> list[_GpuSampler]:
        """All GPUs at first, then at most four a time: a sample with one took about 6 ms of CPU time (on an H200 in a VM)."""
        if not self._times:
            return self._gpus
        turns = math.ceil(len(self._gpus) / _GPUS_A_SAMPLE)
        return [gpu for number, gpu in enumerate(self._gpus) if number % turns == len(self._times) % turns]

    def series(self) -> Series:
        """Key -> (unix times in ms, values), under MLflow's own `system/` keys where it has one; unknown values are left out.

        `system/worker_cpu_percentage`: of the run's processes, 100 = one logical CPU busy. `system/gpu_<i>_…`: i is NVML's index.
        """
        result: Series = {}
        for key in self._values:
            times, values = self._known(key)
            if values and not key.startswith("_"):
                result[key] = [round(at * 1000) for at in times], values
        return result

    def contamination(self, start: float, end: float) -> str | None:
        """Who else used the leased devices in the window, in words; None = nobody, as far as can be seen.

        GPUs: a compute process that is not of this run. CPUs: more than 5 % of the leased CPUs' time in the window was neither idle
        (nor waiting for I/O) nor spent by this run's processes and the driver; time that the hypervisor took counts as others'.
        """
        seen: dict[str, list[float]] = {}
        for at, text in self._intruders:
            seen.setdefault(text, []).append(at)
        # Short windows lie between two samples: who was there before and after one was there in it.
        intruders = [text for text, times in seen.items() if min(times) <= end and max(times) >= start]
        found = [f"others used {text}" for text in intruders]
        others = self.others_cpu_fraction(start, end)
        if others is not None and others > OTHERS_CPU_LIMIT:
            found.append(f"others used {others * 100:.0f} % of the leased CPUs")
        return "; ".join(found) or None

    def others_cpu_fraction(self, start: float, end: float) -> float | None:
        """The part of the leased CPUs' time that others used in the window (as far as it was sampled), 0 to 1; None if unknown: no
        CPUs of its own, less than 1 s sampled, or a kernel that does not count (some sandboxes).
        """
        start, end = max(start, self._times[0]), min(end, self._times[-1])
        window = end - start
        if not self._cpus or window < _MIN_WINDOW_S:
            return None
        own, idle, total = (self._growth(key, start, end) for key in ("_own_s", "_idle_s", "_total_s"))
        available = window * len(self._cpus)
        if own is None or idle is None or total is None or not 0.5 < total / available < 1.5:
            return None
        # Wall time less idle time, not the sum of the busy fields: these count whole ticks, idle time is exact (NO_HZ kernels).
        return min(1.0, max(0.0, (available - idle - own) / available))

    def throttled_pct(self, start: float = -math.inf, end: float = math.inf) -> float | None:
        """Percent of the samples in the window in which the SM clock of any leased GPU was held down; None if unknown."""
        return self._share(0, start, end)

    def sm_clock_mhz(self, start: float, end: float) -> float | None:
        """Mean of the samples in the window of all leased GPUs' SM clocks, in MHz; None if unknown."""
        clocks = [self._known(gpu.clock_key) for gpu in self._gpus]
        values = [value for times, known in clocks for at, value in zip(times, known, strict=True) if start <= at <= end]
        return sum(values) / len(values) if values else None

    def throttle_reasons(self, start: float = -math.inf, end: float = math.inf) -> dict[str, float]:
        """Reason -> percent of the samples in the window, the reasons that occurred only."""
        shares = {name: self._share(bit, start, end) for bit, name in _THROTTLED.items()}
        return {name: share for name, share in shares.items() if share}

    def _share(self, bit: int, start: float, end: float) -> float | None:
        """Percent of the samples in which any leased GPU shows this throttle reason (0: any of them)."""
        mask = bit or sum(_THROTTLED)
        reasons = [self._values[gpu.reasons_key] for gpu in self._gpus if gpu.reasons_key in self._values]
        samples = []
        for at, *values in zip(self._times, *reasons, strict=True):
            known = [int(value) for value in values if not math.isnan(value)]
            if start <= at <= end and known:
                samples.append(any(value & mask for value in known))
        return 100 * sum(samples) / len(samples) if samples else None

    def energy_j(self, start: float, end: float) -> float | None:
        """Energy of all leased GPUs in the window, in joules, from NVML's counter; None if unknown, the window is under 10 s
        or a sample after its end is missing."""
        if end - start < _MIN_ENERGY_WINDOW_S or not self._gpus:
            return None
        grown = [self._growth(gpu.energy_key, start, end) for gpu in self._gpus]
        return None if None in grown else sum(value for value in grown if value is not None)

    @property
    def peak_memory_mb(self) -> float | None:
        """The most resident host memory the run's processes had together in a sample, in MB (1e6 bytes)."""
        known = [value for value in self._values["system/worker_memory_megabytes"] if not math.isnan(value)]
        return max(known, default=None)

    @property
    def device_memory_delta_mb(self) -> float | None:
        """The most that the memory in use on one leased GPU rose above the first sample, in MB; None if unknown."""
        used = [self._known(gpu.memory_key)[1] for gpu in self._gpus]
        return max((max(values) - values[0] for values in used if values), default=None)

    def _known(self, key: str) -> tuple[list[float], list[float]]:
        """(times, values) of the samples in which a value is known."""
        pairs = [(at, value) for at, value in zip(self._times, self._values.get(key, []), strict=False) if not math.isnan(value)]
        return [at for at, _ in pairs], [value for _, value in pairs]

    def _growth(self, key: str, start: float, end: float) -> float | None:
        """How much a counter grew in the window, linear between samples; None if it is not known at both ends."""
        times, values = self._known(key)
        if not times or start < times[0] or end > times[-1]:
            return None
        return float(np.interp(end, times, values) - np.interp(start, times, values))


class _GpuSampler:
    """One leased GPU. What the device or its driver does not tell (a MIG device tells little) is left out."""

    def __init__(self, gpu: Gpu, nvml: Any) -> None:
        self._gpu = gpu
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        self._prefix = f"system/gpu_{gpu.label}"
        self.memory_key = f"{self._prefix}_memory_usage_megabytes"
        self.energy_key = f"_gpu_{gpu.label}_energy_j"
        self.clock_key = f"{self._prefix}_sm_clock_megahertz"
        self.reasons_key = f"_gpu_{gpu.label}_clock_reasons"
        # In a container NVML may give the host's pids: they mean something only once one of ours is among them.
        self._pids_are_known = os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE
        self._first_pids: set[int] | None = None

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None

    def sample(self) -> dict[str, float]:
        row: dict[str, float] = {}
        if (memory := self._ask("nvmlDeviceGetMemoryInfo")) is not None:
            row[self.memory_key] = memory.used / 1e6
            row[f"{self._prefix}_memory_usage_percentage"] = memory.used / memory.total * 100
        if (rates := self._ask("nvmlDeviceGetUtilizationRates")) is not None:
            row[f"{self._prefix}_utilization_percentage"] = rates.gpu
        if (milliwatts := self._ask("nvmlDeviceGetPowerUsage")) is not None:
            row[f"{self._prefix}_power_usage_watts"] = milliwatts / 1000
        if (clock := self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)) is not None:
            row[self.clock_key] = clock
        if (celsius := self._ask("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU)) is not None:
            row[f"{self._prefix}_temperature_celsius"] = celsius
        if (reasons := self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")) is not None:
            row[self.reasons_key] = reasons
            row[f"{self._prefix}_throttled"] = float(bool(reasons & sum(_THROTTLED)))
        if (millijoules := self._ask("nvmlDeviceGetTotalEnergyConsumption")) is not None:
            row[self.energy_key] = millijoules / 1000
        return row

    def intruders(self, tree: ProcessTree) -> list[str]:
        """Compute processes on the GPU that are not of this run, each as `GPU 1 (pid 123, python)`.

        Where pids mean nothing here (see __init__), those that were there at the first sample, before our workers came.
        """
        pids = {process.pid for process in self._ask("nvmlDeviceGetComputeRunningProcesses") or []}
        if pids - tree.ever:
            tree.update()  # one of ours may have started since
        strangers = pids - tree.ever
        if self._first_pids is None:
            self._first_pids = strangers
        self._pids_are_known = self._pids_are_known or bool(pids & tree.ever)
        if not self._pids_are_known:
            strangers &= self._first_pids
        return [f"GPU {self._gpu.label} (pid {pid}{_name_of(pid)})" for pid in sorted(strangers)]


def _name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return ", " + file.read().strip()
    except OSError:
        return ""
