"""The parity ladder of the convolutional and fully connected networks, on the variants that their yaml names, in PyTorch and MXNet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from crosstrain import paths
from crosstrain.networks import Spec, ladder_variant
from ladders import climb, op_of

#: one of each family, and what differs within it: (network, changed arguments)
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
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


def spec_of(case: str) -> Spec:
    name, changes = NETWORKS[case]
    given = yaml.safe_load((paths.conf_dir() / "network" / f"{name}.yaml").read_text())
    return ladder_variant({**given, **changes})


@pytest.fixture(scope="module", params=["torch", "mxnet"])
def framework(request: pytest.FixtureRequest, framework_python: Callable[[str], Path]) -> tuple[str, Path]:
    """Name and interpreter. Of the module, so that it is looked up in the user's own cache."""
    return request.param, framework_python(request.param)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: tuple[str, Path]) -> None:
    """Initial weights in a cache of their own; after `framework`, which looks for environments in the user's."""
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("case", NETWORKS)
def test_a_framework_is_proven(case: str, framework: tuple[str, Path], tmp_path: Path) -> None:
    spec = spec_of(case)
    certificate = climb(spec, framework, tmp_path)
    assert certificate.proven, certificate.tag()
    # both keep running variances, MXNet the biased ones
    norms = {op.name for op in spec.ops if op.op == "batch_norm"}
    assert set(certificate.deviations) == (norms if framework[0] == "mxnet" else set())
    seventh = next(level for level in certificate.levels if level.level == "7")
    assert seventh.state == ("passed" if norms else "not applicable")


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


#: what a wrong network of each family looks like; names, counts and shapes of all parameters stay right
WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "LRN's alpha divided by the window": ("alexnet_lrn", lrn_alpha),
    "branches of a concat swapped": ("googlenet", branches_swapped),
    "no ReLU after the sum": ("resnet56", no_relu_after_the_sum),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_network_fails_at_its_output(case: str, framework: tuple[str, Path], tmp_path: Path) -> None:
    name, change = WRONG[case]
    failed = climb(spec_of(name), framework, tmp_path, change).failed
    assert failed is not None and failed.level == "4", failed
