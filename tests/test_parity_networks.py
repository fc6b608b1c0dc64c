"""Every framework on the parity ladder: small networks of all kinds, and one of each family on the variant that its yaml names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

import contracts
from crosstrain import paths
from crosstrain.networks import Spec, ladder_variant
from crosstrain.networks.autoencoder import autoencoder
from crosstrain.networks.lstm import lstm_classifier, lstm_language
from crosstrain.networks.transformer import gpt2, vit
from ladders import NETWORKS, Change, Climb, Climbed, climb_of, op_of

#: one of each family, and what differs within it: (network, changed arguments)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fcn_8": ("fcn_8", {}),
    "alexnet_s": ("alexnet_s", {}),
    "alexnet_owt": ("alexnet_owt", {}),
    "alexnet_lrn": ("alexnet_lrn", {}),
    "alexnet_lrn, one group": ("alexnet_lrn", {"groups": 1}),
    "overfeat": ("overfeat", {}),
    "vgg_a": ("vgg_a", {}),
    "vgg_19": ("vgg_19", {}),
    "googlenet": ("googlenet", {}),
    "resnet50": ("resnet50", {}),
    "resnet50, v1.5": ("resnet50", {"stride_in_3x3": True}),
    "resnet56": ("resnet56", {}),
}


def variant(case: str) -> Spec:
    name, changes = VARIANTS[case]
    given = yaml.safe_load((paths.conf_dir() / "network" / f"{name}.yaml").read_text())
    return ladder_variant({**given, **changes})


SMALL: dict[str, Spec] = {
    "ae1": autoencoder("ae1", widths=(12, 8, 6), inputs=20),
    "ae3": autoencoder("ae3", widths=(12, 8, 6), inputs=20),
    "finetune": autoencoder("finetune", widths=(12, 8, 6), inputs=20),
    "lstm_ptb": lstm_language(steps=8, vocabulary=50, width=16),
    "lstm_imdb": lstm_classifier(length=10, vocabulary=50, width=16),
    "gpt2_small": gpt2(steps=8, vocabulary=50, width=24, layers=2, heads=3, embedding_dropout=0.1, residual_dropout=0.1),
    "vit_b16": vit(image_size=16, patch=4, width=24, layers=2, heads=3, num_classes=10),
}

SPECS: dict[str, Spec] = {**{make.__name__: make() for make in NETWORKS}, **{case: variant(case) for case in VARIANTS}, **SMALL}


def lrn_alpha(run: dict[str, Any]) -> None:
    op_of(run, "norm2")["alpha"] /= 5


def branches_swapped(run: dict[str, Any]) -> None:
    op_of(run, "inception_4a")["inputs"].reverse()


def no_relu_after_the_sum(run: dict[str, Any]) -> None:
    """What two of the published ResNet-56 do."""
    ops = run["network"]["ops"]
    dropped = op_of(run, "stage2_block1_relu")
    ops.remove(dropped)
    for op in ops:
        op["inputs"] = [dropped["inputs"][0] if name == dropped["name"] else name for name in op["inputs"]]


def melt(run: dict[str, Any]) -> None:
    for parameter in run["network"]["parameters"]:
        parameter["trained"] = True


def deeper(run: dict[str, Any]) -> None:
    """Reconstructing a layer of the same width that is not the one below."""
    run["network"]["target"]["name"] = "code3"


#: wrong networks whose names, counts and shapes of all parameters are right: (the right one, what is wrong, the level that tells)
WRONG: dict[str, tuple[Spec, Change, str]] = {
    "LRN's alpha divided by the window": (variant("alexnet_lrn"), lrn_alpha, "4"),
    "branches of a concat swapped": (variant("googlenet"), branches_swapped, "4"),
    "no ReLU after the sum": (variant("resnet56"), no_relu_after_the_sum, "4"),
    "a frozen layer is trained all the same": (SMALL["ae3"], melt, "6"),
    "another target": (autoencoder("ae3", widths=(12, 8, 8), inputs=20), deeper, "5"),
}


def climbs_of(name: str, folder: Path) -> dict[str, Climb]:
    climbs = {case: climb_of(spec, name, folder / str(i)) for i, (case, spec) in enumerate(SPECS.items())}
    climbs |= {case: climb_of(spec, name, folder / f"wrong{i}", change) for i, (case, (spec, change, _)) in enumerate(WRONG.items())}
    long = {WRONG[case][0].name if case in WRONG else case for case in climbs} & set(contracts.OF[name].LONG)
    return {case: climb for case, climb in climbs.items() if case not in long and climb.spec.name not in long}


@pytest.fixture(scope="module")
def climbing(
    request: pytest.FixtureRequest, framework_python: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Climbed]]]:
    """All of this file, climbed in one process of each framework, some at a time."""
    pythons = contracts.chosen(request, framework_python)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(contracts.AT_A_TIME) as pool:
        patch.setenv("CROSSTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        folders = {name: tmp_path_factory.mktemp(name) for name in pythons}
        yield {name: pool.submit(Climbed, pythons[name], folders[name], climbs_of(name, folders[name])) for name in pythons}
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module", params=contracts.NAMES)
def climbed(
    request: pytest.FixtureRequest, climbing: dict[str, Future[Climbed]], framework_python: Callable[[str], Path]
) -> tuple[str, Climbed]:
    """(framework, what it made of them)."""
    if request.param not in climbing:
        framework_python(request.param)  # skipped
    return request.param, climbing[request.param].result()


@pytest.mark.parametrize("case", SPECS)
def test_a_framework_is_proven_or_says_why_not(case: str, climbed: tuple[str, Climbed]) -> None:
    name, climbs = climbed
    if case not in climbs.climbs:
        assert SPECS[case].name in contracts.OF[name].LONG or case in contracts.OF[name].LONG
        return
    unsupported = contracts.OF[name].UNSUPPORTED_NETWORKS.get(case, "")
    assert bool(climbs.refusal(case)) == bool(unsupported) and unsupported in climbs.refusal(case), climbs.results[case]
    if unsupported:
        return
    spec, certificate = SPECS[case], climbs.certificate(case)
    assert certificate.proven, certificate.tag()
    assert set(certificate.deviations) == set(contracts.deviations(name, spec))
    states = {level.level: level.state for level in certificate.levels}
    assert states["7"] == ("passed" if spec.has("batch_norm") else "not applicable")
    assert states["flops"] == ("passed" if contracts.OF[name].COUNTS_FLOPS else "not applicable")


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_network_fails_at_its_level(case: str, climbed: tuple[str, Climbed]) -> None:
    name, climbs = climbed
    if case not in climbs.climbs:
        return
    if climbs.refusal(case):
        assert case in contracts.OF[name].UNSUPPORTED_NETWORKS
        return
    failed = climbs.certificate(case).failed
    assert failed is not None and failed.level == WRONG[case][2], failed
