"""The parity ladder can fail: every kind of wrong network, adapter and optimiser is caught at a named level, in every framework."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstrain import parity, paths
from crosstrain.certificates import Certificate
from crosstrain.networks import Spec
from ladders import (
    Change,
    as_it_is,
    attribute,
    autoencoder,
    decaying,
    double_softmax,
    framework_json,
    language,
    measure,
    mutated,
    optimizer,
    other_weights,
    rate_times_replicas,
    strided,
    swapped_widths,
    without,
)


@dataclass(frozen=True)
class Mutation:
    """What is wrong: a change of the worker's run.json, or a patch of its adapter (a function of mutated_worker.py).

    `level`: where it must be caught; `network`: on which network; `frameworks`: where it exists.
    """

    level: str
    change: Change = as_it_is
    patch: str | None = None
    network: Callable[[], Spec] = strided
    frameworks: tuple[str, ...] = ("torch", "mxnet")


MUTATIONS = {
    # the network
    "padding on one side": Mutation("4", attribute("conv1", padding=[0, 1, 0, 1])),
    "pooling rounded up": Mutation("1", attribute("pool2", ceil=True)),
    "averages without the padding": Mutation("4", attribute("pool1", count_include_pad=False)),
    "no bias": Mutation("1", attribute("conv2", bias=False)),
    "a layer dropped": Mutation("1", without("fc2")),
    "an activation dropped": Mutation("4", without("tanh2")),
    "another activation": Mutation("4", attribute("sigmoid1", op="tanh")),
    "widths swapped": Mutation("1", swapped_widths),
    "groups ignored": Mutation("1", attribute("conv2", groups=1)),
    "double softmax": Mutation("4", double_softmax),
    "batch norm decay upside down": Mutation("7", attribute("bn2", decay=0.1)),
    "batch norm epsilon": Mutation("4", attribute("bn1", epsilon=1e-2)),
    "biased for unbiased variance, or the reverse": Mutation("7", patch="flipped_declaration"),
    "attention to later tokens": Mutation("4", attribute("attend", causal=False), network=language),
    "gate order": Mutation("4", patch="gate_order", network=language),
    "forget bias": Mutation("4", patch="forget_bias", network=language),
    "flattened channels last": Mutation("4", patch="flatten_channels_last"),
    "true convolution": Mutation("4", patch="true_convolution"),
    # the weights
    "other weights": Mutation("3", other_weights),
    "two biases swapped": Mutation("4", patch="biases_swapped"),
    # the loss
    "sum for mean loss": Mutation("5", patch="sum_loss"),
    "sum for mean loss of a language model": Mutation("5", patch="sum_loss", network=language),
    # the optimiser
    "Nesterov for plain momentum": Mutation("6", patch="nesterov"),
    "weight decay on biases and norms": Mutation("6", patch="decay_biases"),
    "weight decay on biases and norms, by the spec": Mutation("6", decaying(lambda name: True, True)),
    "no decay of convolutions": Mutation("6", decaying(lambda name: name.startswith("conv"), False)),
    "no weight decay": Mutation("6", optimizer(weight_decay=0.0)),
    "learning rate times replicas": Mutation("6", rate_times_replicas),
    "no clipping": Mutation("6", optimizer(clip_norm=None)),
    "clipping after weight decay": Mutation("6", patch="clip_after_decay"),
    "a parameter forgotten": Mutation("6", patch="forgotten_parameter"),
    "no momentum": Mutation("7", optimizer(momentum=0.0)),
    "no momentum, without batch norm": Mutation("8", optimizer(momentum=0.0), network=language),
    "a moving average for momentum": Mutation("7", patch="dampening"),
    # what it costs; only PyTorch counts
    "forward pass done twice": Mutation("flops", patch="forward_twice", network=autoencoder, frameworks=("torch",)),
}

NOTHING_WRONG = Mutation("")
#: an empty level: proven
CASES = {"nothing wrong": NOTHING_WRONG, **MUTATIONS}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))


def case(mutation: Mutation, framework: str, folder: Path) -> tuple[Spec, dict[str, Any], dict[str, Any]]:
    """(the right network, the right run, the wrong one)."""
    spec = mutation.network()
    (folder / "wrong").mkdir(parents=True)
    run = parity.ladder_run_json(spec, framework_json(framework), folder)
    return spec, run, mutated(run, mutation.change, folder / "wrong")


def check(certificate: Certificate, level: str) -> None:
    failed = certificate.failed
    assert (failed.level if failed else "") == level, certificate.tag()
    assert certificate.proven == (level == "")
    assert certificate.tag().startswith(f"failed at level {level} (" if level else "proven: levels ")


@pytest.mark.parametrize("name", [name for name, mutation in CASES.items() if mutation.patch is None])
def test_the_reference_with_a_mutation_fails_at_its_level(name: str, tmp_path: Path) -> None:
    spec, run, wrong = case(CASES[name], "fake", tmp_path)
    check(parity.compare(spec, run, measure(wrong), "1"), CASES[name].level)


class Climbed:
    """All mutations of one framework, climbed in one worker process."""

    def __init__(self, framework: str, python: Path, folder: Path) -> None:
        chosen = {name: mutation for name, mutation in CASES.items() if framework in mutation.frameworks}
        self.cases = {name: case(mutation, framework, folder / str(i)) for i, (name, mutation) in enumerate(chosen.items())}
        listed = [{"run": self.cases[name][2], "patch": mutation.patch} for name, mutation in chosen.items()]
        (folder / "cases.json").write_text(json.dumps(listed))
        worker = Path(__file__).with_name("mutated_worker.py")
        command = [str(python), "-I", "-B", str(worker), str(paths.worker_dir().parent), str(folder)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
        assert done.returncode == 0, done.stderr[-4000:]
        self.results = dict(zip(self.cases, json.loads((folder / "results.json").read_text()), strict=True))

    def certificate(self, name: str) -> Certificate:
        spec, run, wrong = self.cases[name]
        assert "version" in self.results[name], self.results[name]["error"]
        arrays = dict(np.load(Path(wrong["folder"]) / "ladder.npz", allow_pickle=False))
        return parity.compare(spec, run, arrays, self.results[name]["version"])


@pytest.fixture(scope="module")
def climbed(
    request: pytest.FixtureRequest, framework_python: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Climbed:
    python = framework_python(request.param)  # in the user's own cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        return Climbed(request.param, python, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("name", [name for name, mutation in CASES.items() if len(mutation.frameworks) == 2])
@pytest.mark.parametrize("climbed", ["torch", "mxnet"], indirect=True)
def test_a_framework_with_a_mutation_fails_at_its_level(name: str, climbed: Climbed) -> None:
    check(climbed.certificate(name), CASES[name].level)


@pytest.mark.parametrize("name", [name for name, mutation in CASES.items() if mutation.frameworks == ("torch",)])
@pytest.mark.parametrize("climbed", ["torch"], indirect=True)
def test_pytorch_with_a_mutation_that_only_pytorch_can_see(name: str, climbed: Climbed) -> None:
    check(climbed.certificate(name), CASES[name].level)
