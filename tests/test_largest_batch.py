"""batch_size=max: the arithmetic of the search, and real runs of the fake framework, which runs out of memory where it is told to."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable

import numpy as np
import pytest

from conftest import PUBLISHED, QUICK, Train, wait_for, workers_of
from crosstrain import largest_batch

#: a fake device whose memory holds a batch of so many samples for each replica; synthetic data, so that they are never too few
OOM = ["framework=fake", "framework.step_ms=1", "framework.fault=device_oom", "framework.fault_phase=first_step", "data=synthetic"]
MAX = [*OOM, "batch_size=max", "network=lenet", "device=cpu", "threads=1", *QUICK]


@pytest.mark.parametrize("step", [8, 32])
@pytest.mark.parametrize("memory", [0, 7, 8, 9, 31, 32, 100, 128, 1000, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("most", [8, 32, 100, 1024, 2**20])
def test_the_largest_batch_is_found_with_few_tries(step, memory, most):
    tried: list[int] = []

    def fits(batch: int) -> bool:
        assert batch not in tried and batch % step == 0 and batch <= most
        tried.append(batch)
        return batch <= memory

    best = min(memory, most) // step * step
    assert largest_batch.search(fits, step, most) == (best or None)
    units = max(1, best // step)
    assert len(tried) <= 2 * units.bit_length() + 2
    assert tried[:1] in ([], [step])  # the smallest first: it shows whether it works at all


def test_a_run_with_the_largest_batch(train: Train):
    result = train(*MAX, "framework.fault_batch=100", "epochs=0")
    assert result.code == 0, result
    (run,) = result.runs  # the tries are none
    assert run.data.params["batch_global"] == run.data.params["batch_per_replica"] == "96"
    assert run.data.tags["outcome"] in PUBLISHED
    tries = run.data.tags["batch_search"].removeprefix("largest of ").split(", ")
    assert tries == ["8 ok", "16 ok", "32 ok", "64 ok", "128 device_oom", "96 ok", "112 device_oom", "104 device_oom"]
    metrics = run.data.metrics
    assert metrics["step_ms"] * metrics["samples_per_s"] == pytest.approx(96_000, rel=1e-2)
    folder = result.only["folder"]
    assert json.loads((result.folder / folder / "run.json").read_text())["batch_global"] == 96
    # tries take the smallest one's data, counted as often as their own would have been
    tried = json.loads((result.folder / folder / "tries" / "96" / "run.json").read_text())
    assert tried["data"]["train"]["samples"] == 4 * 96 and tried["batch_global"] == 96
    assert len(np.load(tried["data"]["train"]["inputs"])) == len(np.load(tried["data"]["train"]["targets"])) == 4 * 8
    # it is the run that the number asks for
    again = train(*MAX, "batch_size=96", "framework.fault_batch=100", "epochs=0", "skip_finished=true")
    assert again.code == 0 and "skipped" in again.out, again


@pytest.mark.parametrize(
    ("scaling", "param", "tries"),
    [
        ("strong", "48", "16 ok, 32 ok, 64 device_oom, 48 ok"),
        pytest.param("weak", "24", "8 ok, 16 ok, 32 device_oom, 24 ok", marks=pytest.mark.long),
    ],
)
def test_several_replicas_share_it_evenly(train: Train, scaling: str, param: str, tries: str):
    """Repetitions have the same batch and are not searched for again."""
    several = ["replicas=2", "device.oversubscribe=true", f"scaling={scaling}", "framework.fault_batch=27", "repeat=1,2"]
    result = train("-m", *MAX, *several, "framework.fault_rank=1")
    assert result.code == 0, result
    assert result.out.count("batch_size=max: " + param) == 2 and result.out.count("device_oom") == 1
    for run in result.runs:
        assert (run.data.params["batch_global"], run.data.params["batch_per_replica"]) == ("48", "24")
        assert run.data.tags["batch_search"] == f"largest of {tries}"


def test_the_data_end_before_the_memory(train: Train):
    result = train(*MAX, "framework.fault=none", "data=digits", "data.samples=50", "epochs=0")
    (run,) = result.runs
    assert run.data.params["batch_global"] == "48"
    assert "64 digits has 50 training samples" in run.data.tags["batch_search"] and "device_oom" not in run.data.tags["batch_search"]


@pytest.mark.parametrize(
    ("overrides", "outcome", "reason"),
    [
        (["framework.fault_batch=7"], "device_oom", "not even batch_size=8 fits"),
        (["framework.fault=raise"], "crashed", "with batch_size=8: RuntimeError: asked to raise"),
        (["framework.fault=unsupported"], "unsupported", "asked to be unsupported"),
        pytest.param(["framework.fault=hang", "framework.fault_batch=8", "timeout_s=8"], "timeout", "timeout_s=", marks=pytest.mark.long),
        (["framework=torch"], "unsupported", "batch_size=max is for GPUs"),
    ],
)
def test_where_nothing_is_found_the_run_says_why(train: Train, overrides: list[str], outcome: str, reason: str):
    given = [key for key in MAX if not (overrides == ["framework=torch"] and key.startswith("framework"))]
    result = train(*given, *overrides)
    assert (result.code, result.only["outcome"]) == (1, outcome), result
    assert reason in result.only["reason"]
    (run,) = result.runs
    assert run.data.params["batch_global"] == "max" and "step_ms" not in run.data.metrics


@pytest.mark.long
def test_a_crash_beyond_what_fits_is_told(train: Train):
    """Some frameworks have limits of their own, such as indices of 32 bits."""
    result = train(*MAX, "framework.fault=raise", "framework.fault_batch=20", "epochs=0")
    (run,) = result.runs
    assert run.data.params["batch_global"] == "16" and "32 crashed, 24 crashed" in run.data.tags["batch_search"]


def test_ctrl_c_while_it_is_searched(start_train: Callable[..., subprocess.Popen[str]], tmp_path):
    process = start_train(*MAX, "framework.fault=hang", "framework.fault_batch=8")
    folder = wait_for(lambda: next((path.parent for path in tmp_path.glob("outputs/*/*/tries/16/events.0.jsonl")
                                    if "first_step" in path.read_text()), None), 120, "the second try")  # fmt: skip
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert workers_of(folder) == []
    rows = [json.loads(line) for path in tmp_path.glob("outputs/*/*/outcomes.jsonl") for line in path.read_text().splitlines()]
    assert [row["outcome"] for row in rows] == ["interrupted"]
