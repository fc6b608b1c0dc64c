"""Caffe ends the process where it can not go on (glog's FATAL, SIGABRT): the driver reads from stderr what it was."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import contracts
from conftest import QUICK, run_train
from crosstrain import parity, paths
from crosstrain.networks.lenet import lenet
from crosstrain.outcomes import of_failed_rank

CAFFE = ["framework=caffe", "device=cpu", "data=synthetic", "network=lenet", *QUICK]

HEAD = "WARNING: Logging before InitGoogleLogging() is written to STDERR\n"
TAIL = """
*** Check failure stack trace: ***
Fatal Python error: Aborted

Current thread 0x00007f16451c8b80 (most recent call first):
  File "/somewhere/caffe/pycaffe.py", line 131 in _Net_forward
"""
#: what Caffe wrote → (outcome, a part of the message)
TEXTS = {
    "F20261129 22:26:20.869743 23552 syncedmem.hpp:33] Check failed: *ptr host allocation of size 8000000000 failed": (
        "host_oom",
        "host allocation of size 8000000000 failed",
    ),
    # from its sources (CUDA_CHECK in device_alternate.hpp), with the older glog's short date
    "F1129 22:26:20.869743 23552 syncedmem.cpp:71] Check failed: error == cudaSuccess (2 vs. 0)  out of memory": (
        "device_oom",
        "out of memory",
    ),
    "F1129 22:26:20.869743 23552 syncedmem.cpp:71] Check failed: error == cudaSuccess (77 vs. 0)  an illegal memory access": (
        "crashed",
        "died by SIGABRT: Check failed: error == cudaSuccess (77 vs. 0)  an illegal memory access",
    ),
    "F20261129 22:25:42.510195 22560 common.cpp:66] Cannot use GPU in CPU-only Caffe: check mode.": (
        "unsupported",
        "Cannot use GPU in CPU-only Caffe",
    ),
    "F20261129 22:25:31.485679 21898 eltwise_layer.cpp:34] Check failed: bottom[0]->shape() == bottom[i]->shape() bottom[0]: 2 3": (
        "crashed",
        "died by SIGABRT: Check failed: bottom[0]->shape() == bottom[i]->shape()",
    ),
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_an_abort_becomes_its_outcome(text: str) -> None:
    outcome = of_failed_rank(0, -signal.SIGABRT, None, "build", HEAD + text + TAIL, 0)
    name, words = TEXTS[text]
    assert outcome.name == name
    assert words in outcome.message and "\n" not in outcome.message
    assert text.split()[2] not in outcome.message, "time, thread and source line tell a user nothing"
    assert outcome.phase == "build"


def test_an_abort_without_a_text_is_still_told() -> None:
    assert of_failed_rank(0, -signal.SIGABRT, None, "build", TAIL, 0).message == "the worker died by SIGABRT"


@pytest.fixture(scope="module")
def real(framework_python: Callable[[str], Path]) -> Path:
    return framework_python("caffe")


def interpreter(folder: Path, body: str) -> Path:
    """A program for framework.python; `body` is shell text, `$@` what it is asked to run."""
    path = folder / "python-of-caffe"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_too_little_host_memory_is_host_oom(real: Path, tmp_path: Path) -> None:
    """With 1.2 GB of address space the activations of a batch of 8,000 (0.4 GB the first, and its gradient) find no room."""
    python = interpreter(tmp_path, f'ulimit -v 1200000\nexec "{real}" "$@"')
    result = run_train(tmp_path, *CAFFE, f"framework.python={python}", "threads=1", "batch_size=8000", "data.samples=16000")
    (row,) = result.outcomes
    assert row["outcome"] == "host_oom", row
    assert row["phase"] == "first_step" and "host allocation of size" in row["reason"]
    assert result.code == 1


@pytest.mark.parametrize(
    ("does", "outcome", "words"),
    [
        ("import caffe; caffe.set_mode_gpu(); caffe.set_device(0)", "unsupported", "Cannot use GPU in CPU-only Caffe"),
        ("import caffe; caffe.Net('net.prototxt', caffe.TRAIN)", "crashed", "died by SIGABRT: Check failed: registry.count(type) == 1"),
    ],
)
def test_what_caffe_itself_says_when_it_aborts(does: str, outcome: str, words: str, real: Path, tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text('layer { name: "x" type: "Nothing" top: "x" }')
    instead = f'cd "{tmp_path}"; exec "{real}" -c "{does}"'
    python = interpreter(tmp_path, f'case "$*" in *crosstrain_worker*) {instead};; esac\nexec "{real}" "$@"')
    result = run_train(tmp_path, *CAFFE, f"framework.python={python}")
    (row,) = result.outcomes
    assert row["outcome"] == outcome, row
    assert words in row["reason"]


def test_more_numbers_than_a_blob_holds_are_refused(real: Path, tmp_path: Path) -> None:
    """Only built, without data: conv1 of LeNet has 20 x 24 x 24 numbers a sample."""
    run = parity.shapes_run_json(
        lenet(), contracts.settings("caffe"), tmp_path, run_id="0" * 32, device="cpu", gpus=[], threads=1, batch_per_replica=200_000
    )
    (tmp_path / "run.json").write_text(json.dumps(run))
    command = [str(real), "-I", "-B", str(paths.worker_dir()), str(tmp_path), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    result = json.loads((tmp_path / "result.0.json").read_text())
    assert (done.returncode, result["status"]) == (1, "unsupported"), done.stderr
    assert "conv1 holds 2304000000 numbers" in result["message"]
    assert result["hint"] == "lower batch_size"
