"""JAX's float16 and its LSTM by cuDNN, both for GPUs: what the CPU can show of them."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import test_adapters as adapters
from test_torch import CONVOLUTIONS, spec_of_convolution

HERE = Path(__file__).parent


def ask(python: Path, folder: Path, part: str, spec: Any, precisions: tuple[str, ...], **changes: Any) -> dict[str, Any]:
    for precision in precisions:
        run = adapters.run_of("jax", spec, precision=precision, framework={"compile": "on"}, **changes)
        (folder / f"{precision}.json").write_text(json.dumps(run))
    inputs, targets = adapters.batch_of(spec)
    assert targets is not None
    np.savez(folder / "given.npz", inputs=inputs, targets=targets, **{f"w.{k}": a for k, a in adapters.arrays_of(spec).items()})
    script = [str(python), "-B", str(HERE / "jax_worker.py"), str(HERE.parent / "src"), str(folder), part]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


@pytest.mark.parametrize("replicas", [1, 2])
def test_fp16_trains_like_fp32_and_skips_what_overflows(
    replicas: int, framework_python: Callable[[str], Path], tmp_path: Path
) -> None:
    # one precision in a process of two replicas: the number of devices can be set once
    precisions = ("fp32", "fp16") if replicas == 1 else ("fp16",)
    changes = {"replicas": replicas, "batch_per_replica": adapters.BATCH // replicas}
    facts = ask(framework_python("jax"), tmp_path, "fp16", adapters.small_net(), precisions, **changes)
    assert facts["precision"] == "fp16"
    assert facts["compiled"] == 1
    losses = facts["fp16"]
    if replicas == 1:
        skipped = sum(a == b for a, b in itertools.pairwise(losses))  # the first scales may overflow
        assert skipped <= 2
        assert losses[skipped : skipped + 20] == pytest.approx(facts["fp32"], rel=0.05)
    assert losses[-1] < 0.5 * losses[0]
    assert facts["scales"] == [65536, 32768, 1024, 1024, 1024], "halved when it overflows; the worker sets 1024, which does not"
    assert facts["same"] == facts["momentum"] == [True, True, False, False]
    # of the first alone: where inputs are beyond float16, running statistics become NaN and stay so, as in PyTorch
    assert not facts["states"][0], "running statistics follow a skipped batch, too, as in PyTorch"
    assert facts["reset"] == 65536


def test_the_lstm_by_cudnn_is_the_same_function(framework_python: Callable[[str], Path], tmp_path: Path) -> None:
    facts = ask(framework_python("jax"), tmp_path, "lstm", adapters.spec_of("two lstms"), ("fp32",))
    assert max(facts["differences"]) < 1e-5
    assert (facts["highest"], facts["tensorfloat32"]) == (False, True)
    assert facts["calls"] == [2, 2, 0]
    assert not facts["tf32"]
    assert facts["effective"] == "cudnn"
    assert facts["chosen"] == [True, True, False, False, False]


BLOCKS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import jax, numpy
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)
from crosstrain_worker.frameworks import jax_layers
found = []
for spec in json.loads(sys.argv[2]):
    random = numpy.random.RandomState(0)
    (op,), (channels, height, width), given = spec["ops"], spec["input"]["shape"], []
    for shape in ((2, height, width, channels), tuple(op["kernel"]) + (channels, op["out_channels"]), (op["out_channels"],)):
        given.append(random.normal(size=shape))
    results, kinds = [], []
    for on in (False, True):
        own = jax_layers.network_of(spec, jax.numpy.float64, False, False, on)
        apply = lambda x, kernel, bias: own.apply({"params": {"conv1": {"kernel": kernel, "bias": bias}}}, x, True)[0]
        output, back = jax.vjp(apply, *given)
        results.append([output, *back(numpy.random.RandomState(1).normal(size=output.shape))])
        kinds.append(sorted(kind.__name__ for kind in jax_layers.initialized(own, jax.ShapeDtypeStruct(given[0].shape, "float64"))[1]))
    same = [a.shape == b.shape and numpy.allclose(a, b, atol=1e-12) for a, b in zip(*results, strict=True)]
    found.append([same, kinds])
print(json.dumps(found))
"""


def test_blocks_of_pixels_give_the_same_convolution_and_gradients(framework_python: Callable[[str], Path]) -> None:
    given = [spec_of_convolution(one) for one in CONVOLUTIONS]
    script = [str(framework_python("jax")), "-B", "-c", BLOCKS, str(HERE.parent / "src"), json.dumps(given)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    # the output, and the gradients of input, weight and bias; and they are layers of two kinds
    expected = [[True] * 4, [["Conv", "Network"], ["Network", "SpaceToDepthConv"]]]
    assert json.loads(done.stdout) == [expected] * len(CONVOLUTIONS)
