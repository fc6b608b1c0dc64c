"""What only Caffe's adapter does: sequences that run time first, frozen layers whose gradient Caffe computes, nets per batch size."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstrain.networks import Network, Spec
from crosstrain.networks.reference import Reference
from crosstrain.networks.spec import classes, image, output_of, tokens, values, vector
from test_adapters import STEPS, arrays_of, batch_of, close, run_of

HERE = Path(__file__).parent


def sequence(target: dict[str, Any], *middle: tuple[str, str, dict[str, Any]], loss: str = "softmax_cross_entropy") -> Spec:
    """An embedding, the ops in the middle, and 4 numbers at the end."""
    net = Network("case", tokens(5), target)
    net.add("embedding", "first", vocabulary=7, width=6)
    for op, name, attributes in middle:
        net.add(op, name, **attributes)
    net.add("linear", "head", out=4)
    return net.finish(loss=loss)


def target_that_trains() -> Spec:
    """The target comes from a layer that is trained: as a constant, so not through the target."""
    net = Network("case", vector(4), output_of("code"))
    net.add("linear", "first", out=6)
    net.add("tanh", "code")
    net.add("linear", "second", out=5)
    net.add("sigmoid", "inner")
    net.add("linear", "head", out=6)
    return net.finish(loss="mean_squared_error")


def frozen_in_the_middle() -> Spec:
    net = Network("case", image(2, 6, 5), classes(4))
    net.add("conv2d", "first", out_channels=3, kernel=2)
    net.add("batch_norm", "norm", trained=False)
    net.add("relu", "active")
    net.add("conv2d", "second", out_channels=3, kernel=2, trained=False)
    net.add("flatten", "flat")
    net.add("linear", "head", out=4)
    return net.finish()


LSTM = ("lstm", "lstm", {"hidden": 6})
CASES: dict[str, Spec] = {
    "squared error at every step": sequence(values(5, 4), LSTM, loss="mean_squared_error"),
    "a frozen LSTM above a trained embedding": sequence(classes(4), ("lstm", "lstm", {"hidden": 3, "trained": False})),
    "a sum of both orders": sequence(classes(4), LSTM, ("position_embedding", "place", {}), ("add", "sum", {"inputs": ["lstm", "place"]})),
    "back to the batch first and again": sequence(
        classes(4), LSTM, ("position_embedding", "place", {}), ("lstm", "lstm2", {"hidden": 6}), ("select_token", "last", {"index": -1})
    ),
    "the target trains": target_that_trains(),
    "frozen in the middle": frozen_in_the_middle(),
}


@pytest.fixture(scope="module")
def answers(framework_python: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """{case: (facts, arrays)}, all in one process."""
    folder = tmp_path_factory.mktemp("caffe")
    (folder / "cases.json").write_text(json.dumps([{"run": run_of("caffe", spec), "steps": STEPS} for spec in CASES.values()]))
    for i, spec in enumerate(CASES.values()):
        given = {key: array for key, array in zip(("inputs", "targets"), batch(spec), strict=True) if array is not None}
        np.savez(folder / f"{i}.npz", **given, **{f"w.{name}": array for name, array in arrays_of(spec).items()})
    script = [str(framework_python("caffe")), "-B", str(HERE / "adapter_worker.py"), str(HERE.parent / "src"), str(folder)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads((folder / "results.json").read_text())
    return {case: (facts[i], dict(np.load(folder / f"{i}.out.npz"))) for i, case in enumerate(CASES)}


def batch(spec: Spec) -> tuple[Any, Any]:
    inputs, targets = batch_of(spec)
    return inputs, None if spec.target["kind"] == "op" else targets


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_the_reference(case: str, answers: dict[str, tuple[Any, Any]]) -> None:
    spec, (facts, arrays) = CASES[case], answers[case]
    reference = Reference(spec, arrays_of(spec), run_of("caffe", spec)["optimizer"])
    close(arrays["output"], reference.output(batch(spec)[0]))
    for name, gradient in reference.gradients(*batch(spec))[1].items():
        close(arrays["g." + name], gradient)
    losses = [reference.step(*batch(spec)) for _ in range(STEPS)]
    close(np.array(facts["losses"]), np.array(losses))
    for name, value in {**reference.parameters, **reference.states}.items():
        close(arrays["last." + name], value)
    assert facts["loaded"] and facts["untouched"] and facts["same_end"] and facts["again"] == facts["losses"]


#: many batches of 3.2 MB, trained and evaluated, then another batch size; facts on stdout
LONG = """
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy
from crosstrain_worker.frameworks.on_caffe import Framework
run = json.loads(sys.stdin.read())
framework = Framework(run)
framework.load_library()
framework.check()
framework.setup()
framework.build()
random = numpy.random.RandomState(0)
framework.load({p["name"]: random.normal(size=p["shape"]).astype("float32") * 1e-3 for p in run["network"]["parameters"]})
inputs, targets = random.normal(size=(16, 50000)).astype("float32"), numpy.arange(16) % 4
evaluated = [framework.evaluate(framework.to_device(inputs[:n], targets[:n])) for n in (16, 5)]
resident = []
for _ in range(3):
    for _ in range(50):
        framework.step(framework.to_device(inputs.copy(), targets))
        framework.evaluate(framework.to_device(inputs.copy(), targets))
    with open("/proc/self/status") as status:
        resident.append(int(next(line for line in status if line.startswith("VmRSS")).split()[1]))
try:
    framework.step(framework.to_device(inputs[:5], targets[:5]))
    refused = ""
except ValueError as error:
    refused = str(error)
numpy.savez(sys.argv[2], inputs=inputs, targets=targets)
print(json.dumps({"evaluated": evaluated, "resident": resident, "refused": refused}))
"""


def test_batches_are_let_go_and_come_in_other_sizes_for_evaluation(framework_python: Callable[[str], Path], tmp_path: Path) -> None:
    """pycaffe itself keeps every array that MemoryData was ever given."""
    net = Network("case", vector(50000), classes(4))
    net.add("linear", "first", out=4)
    spec = net.finish()
    script = [str(framework_python("caffe")), "-B", "-c", LONG, str(HERE.parent / "src"), str(tmp_path / "data.npz")]
    run = json.dumps({**run_of("caffe", spec), "batch_per_replica": 16})
    done = subprocess.run(script, input=run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads(done.stdout)
    # 100 batches of 3.2 MB between two looks
    assert max(facts["resident"]) - facts["resident"][0] < 30_000, facts["resident"]
    assert "16 to 5" in facts["refused"]
    random = np.random.RandomState(0)
    weights = {p.name: (random.normal(size=p.shape).astype("float32") * 1e-3).astype("float32") for p in spec.parameters}
    data = np.load(tmp_path / "data.npz")
    for (loss, correct), size in zip(facts["evaluated"], (16, 5), strict=True):
        inputs, targets = data["inputs"][:size], data["targets"][:size]
        reference = Reference(spec, weights)
        assert loss == pytest.approx(reference.loss(inputs, targets, training=False), rel=1e-4)
        assert correct == int((reference.output(inputs).argmax(-1) == targets).sum())
