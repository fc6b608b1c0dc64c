"""The parity ladder: proven for right networks, and failing at a named level for every kind of wrong one."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import contracts
from crosstrain import certificates, parity, paths
from crosstrain.certificates import Certificate
from crosstrain.networks import Network, Spec, initial_weights
from crosstrain.networks.reference import Reference
from crosstrain.networks.spec import classes, vector
from ladders import NETWORKS, ReferenceFramework, autoencoder, framework_json, language, measure, sentiment, strided


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))


def level_of(certificate: Certificate) -> str | None:
    return certificate.failed.level if certificate.failed else None


@pytest.mark.parametrize("network", NETWORKS)
def test_the_reference_is_proven_equal_to_itself(network: Callable[[], Spec], tmp_path: Path) -> None:
    spec = network()
    run = parity.ladder_run_json(spec, framework_json("fake"), tmp_path)
    certificate = parity.compare(spec, run, measure(run), "1")
    levels = "1-8" if network is strided else "1-6, 8"
    assert certificate.tag() == f"proven: levels {levels}; executed FLOPs not counted"
    states = {level.level: level.state for level in certificate.levels}
    assert list(states) == ["1", "2", "3", "4", "5", "gradient", "6", "7", "8", "flops"]
    assert states["7"] == ("passed" if network is strided else "not applicable")
    assert states["flops"] == "not applicable"


class SwapsBiases(ReferenceFramework):
    """Mixes up two parameters of one shape, on the way in and on the way out alike."""

    @staticmethod
    def swap(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**arrays, "bn1.bias": arrays["conv2.bias"], "conv2.bias": arrays["bn1.bias"]}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        super().load(self.swap(arrays))

    def read(self) -> dict[str, np.ndarray]:
        return self.swap(super().read())


class Frozen(ReferenceFramework):
    """Forgets that one parameter is trained."""

    def gradients(self, batch: Any) -> dict[str, np.ndarray]:
        found = super().gradients(batch)
        return {**found, "fc2.weight": np.zeros_like(found["fc2.weight"])}


class SumsTheLoss(ReferenceFramework):
    """Reports the sum over the batch."""

    def gradient(self, batch: Any) -> tuple[float, None]:
        return 8 * super().gradient(batch)[0], None


class Explodes(ReferenceFramework):
    steps = 0

    def step(self, batch: Any) -> tuple[float, None]:
        self.steps += 1
        loss = super().step(batch)[0]
        return (float("nan") if self.steps > 25 else loss), None


@pytest.mark.parametrize("adapter,level", [(SwapsBiases, "4"), (Frozen, "gradient"), (SumsTheLoss, "5"), (Explodes, "8")])
def test_a_wrong_adapter_fails_at_its_level(adapter: type[ReferenceFramework], level: str, tmp_path: Path) -> None:
    spec = strided()
    run = parity.ladder_run_json(spec, framework_json("fake"), tmp_path)
    assert level_of(parity.compare(spec, run, measure(run, adapter), "1")) == level


def test_a_parameter_that_can_not_learn_is_named(tmp_path: Path) -> None:
    net = Network("idle", vector(6), classes(3))
    net.add("linear", "fc1", out=4)
    net.add("batch_norm", "bn")
    net.add("linear", "fc2", out=3)
    spec = net.finish()
    run = parity.ladder_run_json(spec, framework_json("fake"), tmp_path)
    certificate = parity.compare(spec, run, measure(run), "1")
    assert "level gradient" in certificate.tag() and "fc1.bias does not change the loss" in certificate.tag()


class BiasedVariance(ReferenceFramework):
    """Keeps the biased running variance, and says so where it is asked to."""

    says = True

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        spec = Spec.from_json(self.run["network"]).with_attributes("batch_norm", variance="biased")
        self.reference = Reference(spec, arrays, self.run["optimizer"])
        words = "running variance is biased, the spec's is unbiased"
        self.deviations = {"bn1": words, "bn2": words} if self.says else {}


class SilentlyBiased(BiasedVariance):
    says = False


class FalselyDeclared(ReferenceFramework):
    def load(self, arrays: dict[str, np.ndarray]) -> None:
        super().load(arrays)
        self.deviations = {"bn2": "running variance is biased, the spec's is unbiased"}


def test_a_declared_deviation_is_held_to_and_listed_and_a_silent_or_false_one_fails(tmp_path: Path) -> None:
    spec = strided()
    run = parity.ladder_run_json(spec, framework_json("fake"), tmp_path)
    declared = parity.compare(spec, run, measure(run, BiasedVariance), "1")
    assert declared.proven
    assert declared.tag().endswith("; deviations: running variance is biased, the spec's is unbiased (bn1, bn2)")
    for adapter in (SilentlyBiased, FalselyDeclared):
        certificate = parity.compare(spec, run, measure(run, adapter), "1")
        assert level_of(certificate) == "7" and certificate.failed and certificate.failed.words.startswith("bn2.running_var")


class Counts(ReferenceFramework):
    """Counts its FLOPs, with so many more in each sample than the spec says."""

    more = 0

    def executed_flops(self, batch: Any) -> dict[str, int]:
        return {"mm": 8 * (Spec.from_json(self.run["network"]).training_flops + self.more) - 100, "bmm": 100}


def test_executed_flops_are_the_spec_s_or_the_ladder_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = sentiment()
    run = parity.ladder_run_json(spec, framework_json("fake"), tmp_path)
    assert parity.compare(spec, run, measure(run, Counts), "1").tag() == "proven: levels 1-6, 8; executed FLOPs are the spec's"
    # a fused LSTM kernel also gives the gradient of an input that nobody needs (the embedding is frozen)
    monkeypatch.setattr(Counts, "more", 8 * 6 * 8 * 8)
    assert parity.compare(spec, run, measure(run, Counts), "1").proven
    for more in (-1, 1, 8 * 6 * 8 * 8 + 1):
        monkeypatch.setattr(Counts, "more", more)
        failed = parity.compare(spec, run, measure(run, Counts), "1").failed
        assert failed and failed.level == "flops"
        assert f"should be {8 * spec.training_flops:,} (counted: bmm 100, mm " in failed.words


def test_the_gradient_of_an_lstm_s_input_is_no_surplus_where_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = language()
    run = parity.ladder_run_json(spec, framework_json("fake"), tmp_path)
    assert parity.compare(spec, run, measure(run, Counts), "1").proven
    monkeypatch.setattr(Counts, "more", 8 * 6 * 8 * 8)
    assert level_of(parity.compare(spec, run, measure(run, Counts), "1")) == "flops"


def test_the_update_is_judged_by_its_own_size() -> None:
    before = np.array([1.0, -2.0])
    right = before + 1e-4
    assert parity.update_error(right.astype(np.float32).astype(np.float64), right, before) == 0
    assert parity.update_error(before + 1.1e-4, right, before) == pytest.approx(0.1, abs=0.01)
    rounded_twice = right + 4 * 2.0**-23
    assert parity.update_error(rounded_twice, right, before) > 1e-4 > parity.update_error(rounded_twice, right, before, steps=2)
    assert parity.error_of(before + 1.1e-4, right) < 1e-4


def test_errors_of_missing_other_or_no_numbers_are_infinite() -> None:
    one = np.ones(3)
    assert parity.error_of(np.ones(2), one) == parity.error_of(np.array([1, np.nan, 1]), one) == float("inf")
    assert parity.update_error(np.ones(2), one, 0 * one) == parity.error_of(one, 0 * one) == float("inf")
    assert parity.error_of(0 * one, 0 * one) == 0 and parity.error_of(one * 1.5, one) == 0.5


def test_no_constant_is_left_on_the_ladder(tmp_path: Path) -> None:
    spec = strided()
    run = parity.ladder_run_json(spec, framework_json("fake"), tmp_path)
    arrays = initial_weights.split(spec, np.load(run["weights"]))
    for name, values in arrays.items():
        assert len(np.unique(values)) == values.size > 1, name
    assert abs(arrays["bn1.running_var"] - 1).max() <= 0.25 and abs(arrays["fc2.bias"]).max() <= 0.25
    assert all(op["rate"] == 0 for op in run["network"]["ops"] if op["op"] == "dropout")


def test_the_batches_are_padded_at_the_end_where_the_network_masks(tmp_path: Path) -> None:
    parity.write_batches(sentiment(), tmp_path, seed=3, batch=8)
    inputs = np.load(tmp_path / "inputs.npy")
    assert inputs.dtype == np.int32 and inputs.shape == (32, 6) and inputs.max() < 20
    padding = inputs == 0
    assert padding.any() and not padding[:, 0].any()
    assert not (padding[:, :-1] & ~padding[:, 1:]).any()
    assert np.load(tmp_path / "targets.npy").dtype == np.int64


# -- certificates ---------------------------------------------------------------------------------------------------------------


def proven(tmp_path: Path) -> tuple[Spec, Certificate]:
    spec = autoencoder()
    run = parity.ladder_run_json(spec, framework_json("torch"), tmp_path)
    return spec, parity.compare(spec, run, measure(run), "2.13.0")


def test_a_certificate_is_found_for_exactly_what_it_proves(tmp_path: Path) -> None:
    spec, certificate = proven(tmp_path)
    assert Certificate.from_json(json.loads(json.dumps(certificate.to_json()))) == certificate
    torch = framework_json("torch")
    assert certificates.find(torch, "2.13.0", spec, "fp32", "cpu") is None
    stored = certificates.store(certificate)
    assert certificates.find(torch, "2.13.0", spec, "fp32", "cpu") == certificate
    assert certificates.find(torch, "2.13.0", replace(spec, name="alias"), "fp32", "cpu") == certificate
    assert certificates.find(torch, "2.12.0", spec, "fp32", "cpu") is None
    assert certificates.find(torch, "2.13.0", spec, "fp32", "gpu") is None
    assert certificates.find(torch, "2.13.0", spec, "bf16", "cpu") is None
    assert certificates.find(torch, "2.13.0", strided(), "fp32", "cpu") is None
    assert certificates.find(framework_json("mxnet"), "2.13.0", spec, "fp32", "cpu") is None
    for changes in ({"compile": "on"}, {"memory_format": "channels_last"}):
        other = framework_json("torch", **changes)
        assert certificates.find(other, "2.13.0", spec, "fp32", "cpu") is None
        certificates.store(replace(certificate, **changes))
        assert certificates.find(other, "2.13.0", spec, "fp32", "cpu") == replace(certificate, **changes)
    assert certificates.find(torch, "2.13.0", spec, "fp32", "cpu") == certificate
    stored.write_text("{}")
    assert certificates.find(framework_json("torch"), "2.13.0", spec, "fp32", "cpu") is None
    assert certificates.tag(None) == "not proven" and certificates.tag(certificate).startswith("proven: levels 1-6, 8")


@pytest.mark.parametrize("changed", ["frameworks/on_torch.py", "frameworks/torch_layers.py", "ladder.py"])
def test_a_change_of_the_worker_makes_a_certificate_void(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "crosstrain_worker"
    shutil.copytree(paths.worker_dir(), worker)
    monkeypatch.setattr(paths, "worker_dir", lambda: worker)
    spec, certificate = proven(tmp_path)
    certificates.store(certificate)
    (worker / "frameworks" / "on_mxnet.py").write_text("# another framework's code does not matter\n")
    assert certificates.find(framework_json("torch"), "2.13.0", spec, "fp32", "cpu") == certificate
    with (worker / changed).open("a") as out:
        out.write("# changed\n")
    assert certificates.find(framework_json("torch"), "2.13.0", spec, "fp32", "cpu") is None


# -- a large network and its reduced variant ------------------------------------------------------------------------------------


def wide(width: int) -> Spec:
    net = Network("wide", vector(12), classes(3))
    net.add("linear", "fc1", out=width)
    net.add("batch_norm", "bn")
    net.add("relu", "relu1")
    net.add("linear", "fc2", out=3)
    return net.finish()


def without_bias(spec: Spec) -> Spec:
    """A bias before a batch norm does not change the loss."""
    data = spec.to_json()
    data["ops"][0]["bias"] = False
    return Spec.from_json({key: value for key, value in data.items() if key not in ("parameters", "states")})


def test_a_reduced_variant_climbs_for_the_full_network(tmp_path: Path) -> None:
    full, variant = without_bias(wide(500)), without_bias(wide(10))
    run = parity.ladder_run_json(variant, framework_json("fake"), tmp_path)
    climbed = parity.compare(variant, run, measure(run), "1")
    assert climbed.proven
    shapes = {v.name: list(v.shape) for v in full.parameters + full.states}
    built = {"shapes": shapes, "deviations": {"bn": "is odd"}}
    certificate = parity.of_full(climbed, full, built)
    assert certificate.tag() == (
        "proven: levels 1-8 (levels 3-8 on a reduced variant); executed FLOPs not counted; deviations: is odd (bn)"
    )
    assert (certificate.spec_key, certificate.variant) == (full.key(), variant.key())
    certificates.store(certificate)
    assert certificates.find(framework_json("fake"), "1", full, "fp32", "cpu") == certificate
    assert certificates.find(framework_json("fake"), "1", variant, "fp32", "cpu") is None
    wrong = parity.of_full(climbed, full, {**built, "shapes": {**shapes, "fc2.weight": [3, 499]}})
    assert wrong.tag() == "failed at level 1 (names and shapes): fc2.weight is (3, 499), should be (3, 500)"
    failed = replace(climbed, levels=(replace(climbed.levels[0], state="failed", words="the variant's"), *climbed.levels[1:]))
    assert "the variant's" in parity.of_full(failed, full, built).tag()


def test_level_9_counts_as_reduced_too(tmp_path: Path) -> None:
    _, certificate = proven(tmp_path)
    ninth = certificates.Level("9", "replicas train as one", "passed")
    tag = replace(certificate, levels=(*certificate.levels, ninth), variant="0").tag()
    assert tag.startswith("proven: levels 1-6, 8-9 (levels 3-8 on a reduced variant, 9 too)")


def test_many_deviations_are_told_once(tmp_path: Path) -> None:
    _, certificate = proven(tmp_path)
    many = replace(certificate, deviations={f"bn{i}": "is odd" for i in range(53)})
    assert many.tag().endswith("; deviations: is odd (bn0, bn1, bn2, 50 more)")


# -- the real frameworks --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=contracts.NAMES)
def framework(request: pytest.FixtureRequest, framework_python: Callable[[str], Path]) -> tuple[str, Path]:
    """Name and interpreter. Of the module, so that it is looked up in the user's own cache."""
    return request.param, framework_python(request.param)


def work(python: Path, run: dict[str, Any]) -> None:
    """Run one worker to its end."""
    folder = Path(run["folder"])
    (folder / "run.json").write_text(json.dumps(run))
    command = [str(python), "-I", "-B", "-u", str(paths.worker_dir()), str(folder), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_framework_shows_the_shapes_of_a_network_that_is_only_looked_at(framework: tuple[str, Path], tmp_path: Path) -> None:
    (name, python), spec = framework, strided()
    run = parity.shapes_run_json(spec, contracts.settings(name), tmp_path)
    assert run["weights"] is None and run["data"] is None
    work(python, run)
    built = json.loads((tmp_path / "shapes.json").read_text())
    assert built["shapes"] == {v.name: list(v.shape) for v in spec.parameters + spec.states}
    assert set(built["deviations"]) == set(contracts.deviations(name, spec))


#: The kernels of a GPU can not be called here, but their signatures are there: the formulas must read the arguments they mean.
SIGNATURES = """
import sys
sys.path.insert(0, sys.argv[1])
from crosstrain_worker.frameworks import torch_flops
aten = torch_flops.aten
names = {kernel: [argument.name for argument in kernel.default._schema.arguments] for kernel in torch_flops.FORMULAS}
for kernel in (aten._cudnn_rnn, aten._cudnn_rnn_backward):
    assert names[kernel][:2] == ["input", "weight"], names[kernel]
assert names[aten._cudnn_rnn_backward][-1] == "output_mask"
for kernel, formula in torch_flops.FORMULAS.items():
    if formula is torch_flops.attention_backward:
        assert names[kernel][1:4] == ["query", "key", "value"], names[kernel]
x, weights = (5, 4, 8), [(24, 8), (24, 6), (24,), (24,)]
forward = 2 * 5 * 4 * (24 * 8 + 24 * 6)
assert torch_flops.mkldnn_lstm(x, *weights) == torch_flops.cudnn_lstm(x, weights, 4, None) == forward
assert torch_flops.cudnn_lstm_backward(x, weights, 4, [True, False, False, True], out_shape=None) == 2 * forward
assert torch_flops.cudnn_lstm_backward(x, weights, 4, [True, False, False, False], out_shape=None) == forward
"""


@pytest.mark.parametrize("framework", ["torch"], indirect=True)
def test_the_flop_formulas_fit_pytorch_s_kernels(framework: tuple[str, Path]) -> None:
    command = [str(framework[1]), "-c", SIGNATURES, str(paths.worker_dir().parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
