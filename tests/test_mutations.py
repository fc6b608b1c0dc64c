"""The parity ladder can fail: every kind of wrong network, adapter and optimiser is caught at a named level, in every framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from crosstrain import parity
from crosstrain.certificates import Certificate
from crosstrain.networks import Spec
from ladders import (
    Change,
    Climb,
    Climbed,
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
    """What is wrong: a change of the worker's run.json, or a patch of its adapter (a function of ladder_worker.py).

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


@pytest.fixture(scope="module")
def climbed(
    request: pytest.FixtureRequest, framework_python: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Climbed:
    """All mutations of one framework, climbed in one worker process."""
    framework: str = request.param
    python = framework_python(framework)  # in the user's own cache
    folder = tmp_path_factory.mktemp(framework)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        chosen = {name: mutation for name, mutation in CASES.items() if framework in mutation.frameworks}
        climbs = {
            name: Climb(*case(mutation, framework, folder / str(i)), mutation.patch)
            for i, (name, mutation) in enumerate(chosen.items())
        }
        return Climbed(python, folder, climbs)


@pytest.mark.parametrize("name", [name for name, mutation in CASES.items() if len(mutation.frameworks) == 2])
@pytest.mark.parametrize("climbed", ["torch", "mxnet"], indirect=True)
def test_a_framework_with_a_mutation_fails_at_its_level(name: str, climbed: Climbed) -> None:
    check(climbed.certificate(name), CASES[name].level)


@pytest.mark.parametrize("name", [name for name, mutation in CASES.items() if mutation.frameworks == ("torch",)])
@pytest.mark.parametrize("climbed", ["torch"], indirect=True)
def test_pytorch_with_a_mutation_that_only_pytorch_can_see(name: str, climbed: Climbed) -> None:
    check(climbed.certificate(name), CASES[name].level)
