"""What only Paddle's adapter does: MKL told what to do before it is loaded, LSTMs that can not be frozen, a port that two ranks share."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import test_adapters
from crosstrain.networks import Network, Spec
from crosstrain.networks.reference import Reference
from crosstrain.networks.spec import classes, tokens
from test_adapters import STEPS, arrays_of, batch_of, close, run_of, small_net

SOURCE = Path(__file__).parents[1] / "src"
ask = test_adapters.ask


def frozen_lstm(*frozen: str) -> Spec:
    """An embedding that is trained, before an LSTM and a second one; those named in `frozen` are not."""
    net = Network("case", tokens(5), classes(4))
    net.add("embedding", "first", vocabulary=7, width=6)
    net.add("lstm", "lstm1", hidden=4, trained="lstm1" not in frozen)
    net.add("lstm", "lstm2", hidden=3, trained="lstm2" not in frozen)
    net.add("linear", "head", out=4)
    return net.finish()


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("frozen", [["lstm1"], ["lstm2"], ["lstm1", "lstm2"]])
def test_a_frozen_lstm_stays_and_hands_the_gradient_on(compiled: str, frozen: list[str], ask: Any) -> None:
    spec = frozen_lstm(*frozen)
    (answer,) = ask("paddle", [(spec, {"framework": {"compile": compiled}})])
    assert answer.arrays, answer.facts
    weights, (inputs, targets) = arrays_of(spec), batch_of(spec)
    reference = Reference(spec, weights, run_of("paddle", spec)["optimizer"])
    gradients = reference.gradients(inputs, targets)[1]
    assert {name[2:] for name in answer.arrays if name.startswith("g.")} == set(gradients)
    for name, gradient in gradients.items():
        close(answer.arrays["g." + name], gradient)
    for _ in range(STEPS):
        reference.step(inputs, targets)
    for name, value in reference.parameters.items():
        close(answer.arrays["last." + name], value)
        if name.split(".")[0] in frozen:
            assert np.array_equal(answer.arrays["last." + name], weights[name])


@pytest.mark.parametrize("clip_norm", [0.5, None])
def test_without_momentum_the_update_is_the_same_sgd(clip_norm: float | None, ask: Any) -> None:
    spec = small_net()
    optimizer = {"name": "sgd", "learning_rate": 0.05, "momentum": 0.0, "weight_decay": 0.3, "clip_norm": clip_norm}
    (answer,) = ask("paddle", [(spec, {"optimizer": optimizer})])
    reference = Reference(spec, arrays_of(spec), optimizer)
    losses = [reference.step(*batch_of(spec)) for _ in range(STEPS)]
    close(np.array(answer.facts["losses"]), np.array(losses))
    for name, value in reference.parameters.items():
        close(answer.arrays["last." + name], value)


@pytest.mark.parametrize("asked", [True, False])
def test_deterministic_reaches_mkl(asked: bool, ask: Any) -> None:
    (answer,) = ask("paddle", [(small_net(), {"framework": {"deterministic": asked}})])
    assert answer.facts["effective"]["deterministic"] is asked


def test_mkl_is_told_to_be_fast_on_amd_and_the_user_has_the_last_word(ask: Any) -> None:
    """Read back from MKL itself: 5 is its code for AVX2, 4 that for AVX."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    amd = "AuthenticAMD" in first and " avx2 " in first
    (answer,) = ask("paddle", [(small_net(), {})], MKL_DEBUG_CPU_TYPE="4")
    assert answer.facts["effective"]["mkl_debug_cpu_type"] == "4"
    if amd:
        assert answer.facts["effective"]["mkl_cpu_type"] == 4
    (answer,) = ask("paddle", [(small_net(), {})])
    assert answer.facts["effective"]["mkl_debug_cpu_type"] == ("5" if amd else "")
    if amd:
        assert answer.facts["effective"]["mkl_cpu_type"] == 5
    assert "2019" in answer.facts["versions"]["mkl"]


SCRIPT = """
import json, socket, sys
sys.path.insert(0, sys.argv[1])
from crosstrain_worker.frameworks import on_paddle
adapter = on_paddle.Framework(json.loads(sys.argv[3]))
adapter.load_library()
folder, paddle = sys.argv[2], on_paddle.paddle
found = {}
"""


def answer_of(python: Path, script: str, folder: Path) -> Any:
    """What `script` leaves in `found`, in Paddle's interpreter with a loaded adapter."""
    run = json.dumps(run_of("paddle", small_net()))
    command = [str(python), "-c", SCRIPT + script + "\nprint(json.dumps(found))", str(SOURCE), str(folder), run]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_out_of_memory_is_told_from_other_errors(framework_python: Callable[[str], Path], tmp_path: Path) -> None:
    script = """
for name, work in (
    ("memory", lambda: paddle.zeros([1 << 45])),
    ("in a step", lambda: paddle.matmul(paddle.ones([1 << 23, 1]), paddle.ones([1, 1 << 23]))),
    ("shapes", lambda: paddle.matmul(paddle.ones([2, 3]), paddle.ones([2, 3]))),
):
    try:
        work()
    except Exception as error:
        found[name] = adapter.is_oom(error)
"""
    found = answer_of(framework_python("paddle"), script, tmp_path)
    assert found == {"memory": True, "in a step": True, "shapes": False}


def test_the_offered_port_is_kept_for_paddle_and_for_nobody_else(framework_python: Callable[[str], Path], tmp_path: Path) -> None:
    script = """
ranks = on_paddle.ranks
held = ranks.offer(folder + "/rendezvous")
port = int(ranks.read(folder + "/rendezvous").split(":")[1])
other = socket.socket()
try:
    other.bind(("127.0.0.1", port))
    found["taken"] = False
except OSError:
    found["taken"] = True
store = paddle.base.core.TCPStore("127.0.0.1", port, True, 1, 5)
store.set("key", "value")
found["stored"] = store.get("key").decode()
"""
    assert answer_of(framework_python("paddle"), script, tmp_path) == {"taken": True, "stored": "value"}
