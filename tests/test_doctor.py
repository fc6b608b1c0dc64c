"""`crosstrain doctor` through the front door, and what runs make of the ceilings that it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import QUICK, Train
from crosstrain import ceilings, devices
from crosstrain.environments import Environment
from crosstrain.prepare import Place

H200 = devices.Gpu(0, "GPU-1", "NVIDIA H200", 150_000, (9, 0))


def doctor(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "crosstrain.cli", "doctor", *arguments]
    environment = {**os.environ, "CROSSTRAIN_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, framework_python: Callable[[str], Path]) -> Path:
    """A cache in which the doctor has been."""
    cache = tmp_path_factory.mktemp("cache")
    done = doctor(cache, "--json", "--device", "cpu", "--python", str(framework_python("torch")))
    assert done.returncode == 0, done
    (cache / "answer.json").write_text(done.stdout)
    return cache


def stored(cache: Path) -> Path:
    (path,) = cache.glob("ceilings/*.json")
    return path


def test_the_ceilings_of_this_cpu(measured: Path):
    facts = json.loads((measured / "answer.json").read_text())
    known = facts["ceilings"]
    assert facts["problem"] == "" and known["kind"] == "cpu" and known["device"] == devices.cpu_name()
    rates = known["matrix_tflops"]
    assert set(rates) == {"fp32"} and set(rates["fp32"]) == {"1", str(devices.physical_cores())}
    # one core of anything that runs this: from 1 GFLOP/s to 1 TFLOP/s; memory from 0.1 to 1000 GB/s
    assert 1e-3 < rates["fp32"]["1"] < 1 and 0.1 < known["copy_gb_s"]["host"] < 1000 and set(known["copy_gb_s"]) == {"host"}
    assert known["measured_with"]["versions"]["framework"].startswith("2.")
    assert facts["cache"]["folder"] == str(measured) and facts["cache"]["free_gb"] > 0
    assert facts["versions"]["mlflow"].startswith("3.") and facts["environments"] == [] and facts["gpus_now"] == []
    assert [path.name for path in (measured / "ceilings").iterdir()] == [stored(measured).name]  # no folder of the worker's is left


def test_the_table_shows_what_was_measured_before(measured: Path):
    done = doctor(measured, "--no-measure")
    assert done.returncode == 0, done
    lines = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in done.stdout.splitlines() if line.startswith("│")}
    rate = json.loads(stored(measured).read_text())["matrix_tflops"]["fp32"]["1"]
    assert lines["matrix, fp32, 1 thread"] == f"{rate:.4g} TFLOP/s"
    assert lines["environments"] == "none" and str(measured) in lines["cache"] and "not measured" not in done.stdout


def test_runs_tell_how_much_of_the_ceiling_they_use(train: Train, measured: Path):
    cell = ["framework=fake", "framework.step_ms=2", "network=lenet", "data=synthetic", "device=cpu", "threads=1", "epochs=0", *QUICK]
    three = 3 if devices.physical_cores() != 3 else 4  # threads in all, with which nothing was measured
    env = {"CROSSTRAIN_CACHE": str(measured)}
    result = train("-m", *cell, "batch_size=12", f"replicas=1,{three}", "device.oversubscribe=true", env=env)
    assert result.code == 0, result
    one, several = result.runs
    peak = json.loads(stored(measured).read_text())["matrix_tflops"]["fp32"]["1"]
    assert one.data.metrics["utilization_pct"] == pytest.approx(100 * one.data.metrics["tflops"] / peak, rel=2e-3)
    assert "tflops" in several.data.metrics and "utilization_pct" not in several.data.metrics
    bf16 = train(*cell, "precision=bf16", env=env)
    assert bf16.code == 0 and "utilization_pct" not in bf16.runs[-1].data.metrics


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "env_missing: the ceilings are measured with PyTorch, and there is no environment torch-cpu-"),
        (["--python", sys.executable], "env_missing: "),
    ],
)
def test_without_pytorch_the_rest_is_told(tmp_path: Path, arguments: list[str], problem: str):
    done = doctor(tmp_path, "--json", *arguments)
    assert done.returncode == 1 and done.stderr == ""
    facts = json.loads(done.stdout)
    assert facts["problem"].startswith(problem) and facts["machine"]["cpu_cores"] == devices.physical_cores()
    assert "matrix_tflops" not in facts["ceilings"]
    done = doctor(tmp_path, *arguments)
    assert done.returncode == 1 and f"problem: {problem}" in done.stdout and "not measured" in done.stdout


def test_a_gpu_that_is_not_there(tmp_path: Path):
    done = doctor(tmp_path, "--device", "gpu")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: --device gpu: this machine has no GPU")


def place(kind: str = "gpu", copies: int = 1, threads: int = 4, nodes: int = 1) -> Place:
    return Place(kind, [H200] * copies if kind == "gpu" else [], copies, threads, pinned=False, nodes=nodes)


def test_which_ceiling_a_run_refers_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(tmp_path))
    machine = {"nvidia_driver": "570.1"}
    monkeypatch.setattr(devices, "describe_machine", lambda: machine)
    assert ceilings.peak_tflops(place(), "bf16") is None
    ceilings.save("gpu", "NVIDIA H200", {"matrix_tflops": {"bf16": {"1": 783.0}}, "all_reduce_gb_s": 300.0})
    ceilings.save("cpu", devices.cpu_name(), {"matrix_tflops": {"fp32": {"1": 0.1, "8": 0.7}}})
    assert ceilings.peak_tflops(place(), "bf16") == 783.0
    assert ceilings.peak_tflops(place(copies=4), "bf16") == 4 * 783.0
    assert ceilings.peak_tflops(place(), "fp32") is None
    assert ceilings.peak_tflops(place("cpu", threads=1), "fp32") == 0.1
    assert ceilings.peak_tflops(place("cpu", copies=2, threads=4), "fp32") == 0.7
    assert ceilings.peak_tflops(place("cpu", threads=4), "fp32") is None
    assert ceilings.peak_tflops(place("cpu", copies=2, threads=4, nodes=2), "fp32") is None
    # measured again, without what takes several GPUs: that stays
    assert ceilings.save("gpu", "NVIDIA H200", {"matrix_tflops": {"bf16": {"1": 780.0}}})["all_reduce_gb_s"] == 300.0
    assert ceilings.peak_tflops(place(), "bf16") == 780.0
    machine["nvidia_driver"] = "580.2"
    assert ceilings.peak_tflops(place(), "bf16") is None
    (tmp_path / "ceilings" / "x.json").touch()
    for path in (tmp_path / "ceilings").glob("*.json"):
        path.write_text("{")
    assert ceilings.peak_tflops(place("cpu", threads=1), "fp32") is None


def test_the_environment_that_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A build of PyTorch for GPUs also measures the CPU; one for the CPU can not measure GPUs."""
    from crosstrain import doctor as command
    from crosstrain import environments
    from crosstrain.errors import OutcomeError

    there = environments.environment_key("torch", "gpu", None)
    ready = environments.Cached(there, tmp_path, "ready", 1, {})
    monkeypatch.setattr(environments, "list_environments", lambda: [ready])
    monkeypatch.setattr(environments, "make", lambda name, kind, *_: Environment(tmp_path, f"{name} {kind}", True, True))
    assert command._home("cpu", None, print).key == command._home("gpu", None, print).key == "torch gpu"
    monkeypatch.setattr(environments, "list_environments", lambda: [])
    with pytest.raises(OutcomeError, match="no environment torch-gpu"):
        command._home("gpu", None, print)


def test_the_state_of_a_gpu_in_words(monkeypatch: pytest.MonkeyPatch):
    """From NVML's answers as they were recorded on an H200 under load; a question that it does not answer is left out."""
    from crosstrain import doctor as command
    from test_devices import SAMPLING, Replay

    handle = {"handle": 0}
    recording = {**SAMPLING, "constants": {**SAMPLING["constants"], "NVML_CLOCK_MEM": 2}}
    refused = {"error": 3, "text": "not supported"}
    changes = {
        json.dumps(["nvmlDeviceGetMaxClockInfo", handle, 1]): [1980],
        json.dumps(["nvmlDeviceGetClockInfo", handle, 2]): [refused],
        json.dumps(["nvmlDeviceGetEnforcedPowerLimit", handle]): [700_000],
        json.dumps(["nvmlDeviceGetCurrentClocksThrottleReasons", handle]): [0x4 | 0x40 | 0x1],
    }
    monkeypatch.setattr(devices, "open_nvml", lambda: (Replay(recording, changes), ""))
    now = command._now(devices.Gpu(1, SAMPLING["gpu"][1], "NVIDIA H200", 150_755, (9, 0)))
    assert now["throttled"] == ["power cap", "hardware thermal"] and "memory_clock_mhz" not in now
    assert now["memory_used_mb"] == 645 and now["compute_processes"] == 0
    words = command._gpu_words(now)
    assert words.startswith("NVIDIA H200, 151 GB, SM clock 345 of 1980 MHz, 79 of 700 W, 36 °C, 645 MB in use, 0 processes")
    assert words.endswith("throttled: power cap, hardware thermal")
