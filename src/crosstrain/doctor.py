"""`crosstrain doctor`: what this machine has, in which state it is, and what it can do at most (the ceilings)."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import uuid
from importlib import metadata
from typing import Any

from rich.table import Table

from crosstrain import __version__, ceilings, devices, environments, leases, paths, progress, workers
from crosstrain.errors import ConfigError, OutcomeError
from crosstrain.progress import number
from crosstrain.system_samples import throttle_words

#: what measures the ceilings
FRAMEWORK = "torch"
LIMIT_S = 300.0
LIBRARIES = ("mlflow", "hydra-core", "numpy", "nvidia-ml-py")


def add_command(commands: Any) -> None:
    """Register `doctor`; its `function` takes the parsed arguments and returns the exit code."""
    about = "what this machine has and what it can do at most; runs then tell how much of it they use (utilization_pct)"
    parser = commands.add_parser("doctor", help=about, description=about)
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    devices_help = "what is measured (default: GPUs where there are any)"
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help=devices_help)
    parser.add_argument("--python", help="an interpreter of your own with PyTorch, instead of the environment torch")
    parser.add_argument("--no-measure", action="store_true", help="only look; ceilings that were measured before are shown")
    parser.set_defaults(function=_run)


def _run(arguments: argparse.Namespace) -> int:
    begin = time.monotonic()
    gpus = [] if arguments.device == "cpu" else devices.visible_gpus()
    if arguments.device == "gpu" and not gpus:
        raise ConfigError("--device gpu: this machine has no GPU that can be seen; --device cpu measures the CPU")
    kind = "gpu" if gpus else "cpu"
    name = gpus[0].name if gpus else devices.cpu_name()
    if len({gpu.name for gpu in gpus}) > 1:
        progress.say("GPUs of different models: the first is measured; CUDA_VISIBLE_DEVICES chooses another")
    problem = ""
    if not arguments.no_measure:
        try:
            found, missing = _measure(kind, gpus, arguments.python, quiet=arguments.json)
            ceilings.save(kind, name, found)
            problem = missing
        except OutcomeError as error:
            problem = f"{error.outcome}: {error.message}" + (f" ({error.hint})" if error.hint else "")
    facts = _facts(kind, name, gpus)
    facts["problem"] = problem
    facts["seconds"] = round(time.monotonic() - begin, 1)
    if arguments.json:
        print(json.dumps(facts, indent=1))
    else:
        _show(facts)
    return 1 if problem else 0


# -- looking -------------------------------------------------------------------------------------------------------------
def _facts(kind: str, name: str, gpus: list[devices.Gpu]) -> dict[str, Any]:
    """Everything but the measuring, plain JSON."""
    cache = paths.cache_dir()
    disk = shutil.disk_usage(cache)
    return {
        "machine": devices.describe_machine(),
        "gpus_now": [_now(gpu) for gpu in gpus],
        "cache": {"folder": str(cache), "free_gb": round(disk.free / 1e9, 1), "total_gb": round(disk.total / 1e9, 1)},
        "versions": {"crosstrain": __version__, **{library: _version(library) for library in LIBRARIES}},
        "environments": [
            {"name": one.key, "state": one.state, "framework": one.facts.get("main", ""), "gb": round(one.size / 1e9, 2)}
            for one in environments.list_environments()
        ],
        "ceilings": {"kind": kind, **(ceilings.load(kind, name) or {"device": name})},
    }


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


def _now(gpu: devices.Gpu) -> dict[str, Any]:
    """The state a GPU is in; what NVML does not tell is left out. MHz, W, degrees Celsius, MB (1e6 bytes)."""
    nvml, _ = devices.open_nvml()

    def ask(function: str, *more: Any) -> Any:
        try:
            return getattr(nvml, function)(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid), *more)
        except nvml.NVMLError:
            return None

    memory, others = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetComputeRunningProcesses")
    power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    known = {
        "gpu": gpu.label,
        "name": gpu.name,
        "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        "power_w": None if power is None else round(power / 1000),
        "power_limit_w": None if limit is None else round(limit / 1000),
        "temperature_c": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "memory_used_mb": None if memory is None else round(memory.used / 1e6),
        "memory_mb": gpu.memory_mb,
        "throttled": None if reasons is None else throttle_words(reasons),
        "compute_processes": None if others is None else len(others),
    }
    return {key: value for key, value in known.items() if value is not None}


# -- measuring -----------------------------------------------------------------------------------------------------------
def _measure(kind: str, gpus: list[devices.Gpu], python: str | None, quiet: bool) -> tuple[dict[str, Any], str]:
    """(the ceilings, what could not be measured). Raises OutcomeError where nothing can."""

    def say(text: str) -> None:
        if not quiet:
            progress.say(text)

    home = _home(kind, python, say)
    say(f"measuring with {home.python}")
    if kind == "cpu":
        threads = devices.physical_cores()
        counts = sorted({1, threads})
        with leases.lease_cpus(len(devices.logical_cpus()), say) as cpus:
            found = _worker(home, {"device": kind, "cpus": cpus, "threads": threads, "ceilings": {"thread_counts": counts}})
        return found, ""
    missing = ""
    with leases.lease_gpus(gpus, len(gpus), say) as leased:
        uuids = [gpu.uuid for gpu in leased]
        found = _worker(home, {"device": kind, "gpus": uuids[:1]})
        if len(uuids) > 1 and not leased[0].mig:  # NCCL does not join parts of one GPU
            # Its failure costs this one number only.
            try:
                together = _worker(home, {"device": kind, "gpus": uuids, "replicas": len(uuids), "world_size": len(uuids)})
                found |= {"all_reduce_gpus": len(uuids), "all_reduce_gb_s": together["all_reduce_gb_s"]}
            except OutcomeError as error:
                missing = f"the all-reduce was not measured: {error.message}"
    return found, missing


def _home(kind: str, python: str | None, say: Any) -> environments.Environment:
    """The environment that measures: one that exists."""
    if python:
        return environments.find_or_make(FRAMEWORK, kind, python, None, say)
    ready = [one.key for one in environments.list_environments() if one.state == "ready"]
    for accelerator in dict.fromkeys((kind, "gpu")):  # a build for GPUs measures the CPU as well
        if environments.environment_key(FRAMEWORK, accelerator, None) in ready:
            return environments.make(FRAMEWORK, accelerator, None, say)
    key = environments.environment_key(FRAMEWORK, kind, None)
    raise OutcomeError(
        "env_missing",
        f"the ceilings are measured with PyTorch, and there is no environment {key}",
        f"crosstrain env make {FRAMEWORK}.{kind}, or --python with PyTorch of your own",
    )


def _worker(home: environments.Environment, given: dict[str, Any]) -> dict[str, Any]:
    """What a worker in the mode `ceilings` found; of several ranks the slowest."""
    usual = {"schema": 1, "mode": "ceilings", "run_id": uuid.uuid4().hex, "framework": {"name": FRAMEWORK}, "parallelism": "native",
             "gpus": [], "cpus": None, "threads": max(1, devices.physical_cores()), "replicas": 1, "world_size": 1}  # fmt: skip
    with tempfile.TemporaryDirectory(dir=paths.cache_dir("ceilings")) as folder:
        results = workers.work({**usual, **given, "folder": folder}, home, {}, LIMIT_S, "the measuring of ceilings")
    versions = {key: value for key, value in results[0]["versions"].items() if value}
    found = [result["ceilings"] for result in results]
    if "all_reduce_gb_s" in found[0]:
        return {"all_reduce_gb_s": min(one["all_reduce_gb_s"] for one in found)}
    return {**found[0], "measured_with": {"framework": FRAMEWORK, "versions": versions}}


# -- showing -------------------------------------------------------------------------------------------------------------
COPIES = {
    "host": "copy, host memory", "device": "copy, device memory", "host_to_device": "copy, host to device",
    "device_to_host": "copy, device to host",
}  # fmt: skip


def _show(facts: dict[str, Any]) -> None:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(facts):
        table.add_row(name, value)
    progress.console.print(table)
    if facts["problem"]:
        progress.say(f"problem: {facts['problem']}")
    progress.say(f"{facts['seconds']:g} s; utilization_pct of later runs refers to these ceilings")


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    machine, cache = facts["machine"], facts["cache"]
    cores = f"{machine['cpu_cores']} cores, {machine['cpu_logical']} logical"
    rows = [
        ("host", f"{machine.get('host', '')}, {machine.get('os', '')}, kernel {machine.get('kernel', '')}"),
        ("CPU", f"{machine.get('cpu', '')}, {cores}" + (f", governor {machine['cpu_governor']}" if "cpu_governor" in machine else "")),
        ("memory", f"{machine['memory_mb'] / 1000:.0f} GB"),
        ("NVIDIA driver", f"{machine['nvidia_driver']}, CUDA {machine.get('cuda', '')}" if "nvidia_driver" in machine else "none"),
    ]
    rows += [(f"GPU {now['gpu']}", _gpu_words(now)) for now in facts["gpus_now"]]
    rows += [
        ("cache", f"{cache['folder']}, {cache['free_gb']:g} GB free of {cache['total_gb']:g}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)),
        ("environments", ", ".join(f"{one['name']}" + ("" if one["state"] == "ready" else f" ({one['state']})")
                                   for one in facts["environments"]) or "none"),
    ]  # fmt: skip
    return rows + _ceiling_rows(facts["ceilings"])


def _gpu_words(now: dict[str, Any]) -> str:
    words = [now["name"], f"{now['memory_mb'] / 1000:.0f} GB"]
    for key, text in (
        ("sm_clock_mhz", "SM clock {} of {sm_clock_max_mhz} MHz"), ("power_w", "{} of {power_limit_w} W"), ("temperature_c", "{} °C"),
        ("memory_used_mb", "{} MB in use"), ("compute_processes", "{} processes"),
    ):  # fmt: skip
        if key in now:
            words.append(text.format(now[key], **{"sm_clock_max_mhz": "?", "power_limit_w": "?", **now}))
    if "throttled" in now:
        words.append("throttled: " + ", ".join(now["throttled"]) if now["throttled"] else "not throttled")
    return ", ".join(words)


def _ceiling_rows(known: dict[str, Any]) -> list[tuple[str, str]]:
    if "matrix_tflops" not in known:
        return [(f"ceilings of {known['device']}", "not measured")]
    rows = [("ceilings of", f"{known['device']}, measured {known['measured']}")]
    for precision, rates in known["matrix_tflops"].items():
        for units, rate in rates.items():
            threads = f", {units} thread{'s' if units != '1' else ''}" if known["kind"] == "cpu" else ""
            rows.append((f"matrix, {precision}{threads}", f"{number(rate)} TFLOP/s"))
    rows += [(COPIES.get(name, name), f"{number(rate)} GB/s") for name, rate in known.get("copy_gb_s", {}).items()]
    if "all_reduce_gb_s" in known:
        rows.append((f"all-reduce, {known['all_reduce_gpus']} GPUs", f"{number(known['all_reduce_gb_s'])} GB/s (bus)"))
    return rows
