"""Whole runs on a GPU as NVML shows it (answers recorded on an H200), with the fake framework: what the run says of its surroundings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Train

#: stands for pynvml in the driver: a machine with H200s, of which the first is as busy as the recorded one was
PYNVML = """
import os

NVMLError = Exception

def nvmlInit():
    pass

from test_devices import DISCOVERY, SAMPLING, Replay  # which looks for GPUs itself

reasons, stranger = int(os.environ["REASONS"]), int(os.environ["STRANGER"])
of_one_gpu = {key: answers for key, answers in SAMPLING["answers"].items() if '{"handle": 0}' in key}
processes = [{"struct": {"pid": stranger, "usedGpuMemory": 1}}] if stranger else []
of_one_gpu['["nvmlDeviceGetCurrentClocksThrottleReasons", {"handle": 0}]'] = [reasons]
of_one_gpu['["nvmlDeviceGetComputeRunningProcesses", {"handle": 0}]'] = [processes]
DISCOVERY["constants"].update(SAMPLING["constants"])
replay, NVMLError = Replay(DISCOVERY, of_one_gpu, {stranger: stranger}), Replay.NVMLError

def __getattr__(name):
    return getattr(replay, name)
"""
RUN = ("framework=fake", "network=lenet", "data=synthetic", "gpus=1", "epochs=0")


@pytest.fixture
def h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvml"
    folder.mkdir()
    (folder / "pynvml.py").write_text(PYNVML)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("REASONS", "0")
    monkeypatch.setenv("STRANGER", "0")


@pytest.fixture
def stranger() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.parametrize("reasons", [0, pytest.param(0x4, marks=pytest.mark.long), 0x44])
def test_a_clock_that_is_held_down_is_said(h200: None, reasons: int, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REASONS", str(reasons))
    # long enough for several samples of the GPU, which come once a second
    result = train(*RUN, "framework.step_ms=20", "measure.min_s=4", "measure.max_s=4", "measure.steady_required=false")
    (run,) = result.runs
    named = {0: "", 0x4: "(power cap)", 0x44: "(power cap, hardware thermal)"}[reasons]
    says = f"the GPU's clock was held down 100 % of the time {named}" if reasons else ""
    reason = run.data.tags.get("outcome_reason", "")
    mean = re.search(r", ([0-9]+) MHz on average$", reason)
    assert bool(mean) == bool(reasons) and reason.removesuffix(mean[0] if mean else "").endswith(says)
    assert mean is None or int(mean[1]) == round(run.data.metrics["sm_clock_mhz"])
    assert ("held down" in reason) == bool(reasons)
    assert run.data.metrics["throttled_pct"] == (100 if reasons else 0)


@pytest.mark.parametrize("there", [True, False])
def test_a_stranger_is_seen_in_the_shortest_run(
    h200: None, there: bool, stranger: int, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRANGER", str(stranger if there else 0))
    # a few milliseconds are measured: between two samples
    result = train(*RUN, "framework.step_ms=1", "measure=smoke", "measure.block_s=0.01")
    (run,) = result.runs
    assert run.data.tags["outcome"] == ("contaminated" if there else "ok")
    assert (f"(pid {stranger}, python" in run.data.tags.get("outcome_reason", "")) == there
