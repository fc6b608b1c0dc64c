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

from crosstrain import certificates, parity, paths
from crosstrain.certificates import Certificate
from crosstrain.networks import Network, Spec, initial_weights
from crosstrain.networks.reference import Reference
from crosstrain.networks.spec import classes, image, itself, tokens, vector
from crosstrain_worker import ladder
from crosstrain_worker.frameworks.base import Base


def framework_json(name: str) -> dict[str, Any]:
    settings = {"compile": "off", "memory_format": "contiguous", "autotune": False, "deterministic": False}
    return {"name": name, "version": None, **settings}


def strided() -> Spec:
    """A 3×3 convolution with stride 2 and padding 1 on 32×32, batch norm of images and of vectors, and one op of most kinds."""
    net = Network("strided", image(3, 32, 32), classes(10))
    net.add("conv2d", "conv1", out_channels=8, kernel=3, stride=2, padding=1, bias=False, init="he")
    net.add("batch_norm", "bn1")
    net.add("relu", "relu1")
    net.add("avg_pool", "pool1", kernel=3, stride=2, padding=1, count_include_pad=True)
    net.add("conv2d", "conv2", out_channels=8, kernel=3, padding=1, groups=2)
    net.add("tanh", "tanh2")
    net.add("max_pool", "pool2", kernel=3, stride=2)
    net.add("flatten", "flat")
    net.add("linear", "fc1", out=24, bias=False)
    # of 8 values each: the biased and the unbiased variance differ by 14 %
    net.add("batch_norm", "bn2")
    net.add("sigmoid", "sigmoid1")
    net.add("dropout", "drop", rate=0.5)
    net.add("linear", "fc2", out=12)
    net.add("relu", "relu2")
    net.add("linear", "fc3", out=10)
    return net.finish()


def language() -> Spec:
    net = Network("language", tokens(6), classes(20))
    net.add("embedding", "embed", vocabulary=20, width=8)
    net.add("position_embedding", "place")
    net.add("lstm", "lstm1", hidden=8)
    net.add("layer_norm", "norm")
    net.add("attention", "attend", heads=2, causal=True)
    net.add("add", "sum", inputs=["norm", "attend"])
    net.add("gelu", "gelu1")
    net.add("tied_linear", "head", tied="embed", transpose=False)
    return net.finish()


def sentiment() -> Spec:
    net = Network("sentiment", tokens(6), classes(2))
    net.add("embedding", "embed", vocabulary=20, width=8)
    net.add("lstm", "lstm1", hidden=8)
    net.add("masked_mean", "mean")
    net.add("linear", "fc", out=2)
    return net.finish()


def autoencoder() -> Spec:
    net = Network("autoencoder", vector(12), itself())
    net.add("linear", "encoder", out=5)
    net.add("sigmoid", "code")
    net.add("tied_linear", "decoder", tied="encoder", transpose=True)
    return net.finish(loss="mean_squared_error")


# -- wrong networks ----------------------------------------------------------------------------------------------------


def op_of(run: dict[str, Any], name: str) -> dict[str, Any]:
    return next(op for op in run["network"]["ops"] if op["name"] == name)


def attribute(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda run: op_of(run, name).update(changes)


def without(name: str) -> Callable[[dict[str, Any]], None]:
    def drop(run: dict[str, Any]) -> None:
        dropped, ops = op_of(run, name), run["network"]["ops"]
        ops.remove(dropped)
        for op in ops:
            op["inputs"] = [dropped["inputs"][0] if i == name else i for i in op["inputs"]]

    return drop


def double_softmax(run: dict[str, Any]) -> None:
    run["network"]["ops"].append({"op": "softmax", "name": "softmax1", "inputs": ["fc3"]})
    run["network"]["output"] = "softmax1"


def swapped_widths(run: dict[str, Any]) -> None:
    attribute("fc1", out=12)(run)
    attribute("fc2", out=24)(run)


def optimizer(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda run: run["optimizer"].update(changes)


def rate_times_replicas(run: dict[str, Any]) -> None:
    run["optimizer"]["learning_rate"] *= 2


def decaying(what: Callable[[str], bool], decay: bool) -> Callable[[dict[str, Any]], None]:
    """Weight decay on or off for some parameters."""
    return lambda run: run["decay"].update({name: decay for name in run["decay"] if what(name)})


def other_weights(run: dict[str, Any]) -> None:
    run["seed"] += 1


#: what is wrong in the worker: (mutation of its run, the level at which it must fail)
MUTATIONS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "padding on one side": (attribute("conv1", padding=[0, 1, 0, 1]), "4"),
    "no bias": (attribute("conv2", bias=False), "1"),
    "an activation dropped": (without("tanh2"), "4"),
    "a layer dropped": (without("fc2"), "1"),
    "double softmax": (double_softmax, "4"),
    "widths swapped": (swapped_widths, "1"),
    "groups ignored": (attribute("conv2", groups=1), "1"),
    "averages without the padding": (attribute("pool1", count_include_pad=False), "4"),
    "pooling rounded up": (attribute("pool2", ceil=True), "1"),
    "another activation": (attribute("sigmoid1", op="tanh"), "4"),
    "batch norm decay upside down": (attribute("bn2", decay=0.1), "7"),
    "batch norm epsilon": (attribute("bn1", epsilon=1e-2), "4"),
    "learning rate times replicas": (rate_times_replicas, "6"),
    "no weight decay": (optimizer(weight_decay=0.0), "6"),
    "decay of biases and norms too": (decaying(lambda name: True, True), "6"),
    "no decay of convolutions": (decaying(lambda name: name.startswith("conv"), False), "6"),
    "no clipping": (optimizer(clip_norm=None), "6"),
    "no momentum": (optimizer(momentum=0.0), "7"),
    "other weights": (other_weights, "3"),
}


def mutated(run: dict[str, Any], mutation: Callable[[dict[str, Any]], None], folder: Path) -> dict[str, Any]:
    """The run as a wrong worker would do it: its network derived anew, its weights those of the right one wherever they fit."""
    wrong = json.loads(json.dumps(run))
    wrong["folder"] = str(folder)
    right = Spec.from_json(run["network"])
    wrong["decay"] = {p.name: p.decay for p in right.parameters}
    mutation(wrong)
    network = wrong["network"]
    for op in network["ops"]:
        op.pop("shape", None)
    derived = Spec.from_json({key: value for key, value in network.items() if key not in ("parameters", "states")})
    decay = wrong.pop("decay")
    derived = replace(derived, parameters=tuple(replace(p, decay=decay[p.name]) for p in derived.parameters))
    wrong["network"] = derived.to_json()
    if wrong["seed"] != run["seed"]:
        known: dict[str, np.ndarray] = {}
    else:
        known = initial_weights.split(right, np.load(run["weights"]))
    random = np.random.RandomState(9)
    flat = [
        known[v.name] if v.name in known and known[v.name].shape == v.shape else random.uniform(0.1, 0.3, v.shape)
        for v in derived.parameters + derived.states
    ]
    wrong["weights"] = str(folder / "weights.npy")
    np.save(wrong["weights"], np.concatenate([np.ravel(a) for a in flat]).astype(np.float32))
    return wrong


# -- the reference itself as a framework: always there, and quick ------------------------------------------------------------


class ReferenceFramework(Base):
    """The reference behind the adapters' interface: what a framework without any mistake gives, in float32."""

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        self.reference = Reference(Spec.from_json(self.run["network"]), arrays, self.run["optimizer"])

    def read(self) -> dict[str, np.ndarray]:
        return {k: v.astype(np.float32) for k, v in {**self.reference.parameters, **self.reference.states}.items()}

    def to_device(self, inputs: Any, targets: Any) -> Any:
        return inputs, targets

    def step(self, batch: Any) -> tuple[float, None]:
        return self.reference.step(*batch), None

    def gradient(self, batch: Any) -> tuple[float, None]:
        return self.reference.gradients(*batch)[0], None

    def sync(self) -> None:
        pass

    def value(self, handle: Any) -> float:
        return float(handle)

    def output(self, batch: Any, training: bool) -> np.ndarray:
        return self.reference.output(batch[0], training).astype(np.float32)

    def gradients(self, batch: Any) -> dict[str, np.ndarray]:
        return {k: v.astype(np.float32) for k, v in self.reference.gradients(*batch)[1].items()}


def measure(run: dict[str, Any], adapter: type[ReferenceFramework] = ReferenceFramework) -> dict[str, np.ndarray]:
    """What ladder.npz would hold."""
    framework = adapter(run)
    framework.load(initial_weights.split(Spec.from_json(run["network"]), np.load(run["weights"])))
    ladder.run(run, framework)
    return dict(np.load(Path(run["folder"]) / "ladder.npz", allow_pickle=False))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))


def level_of(certificate: Certificate) -> str | None:
    return certificate.failed.level if certificate.failed else None


@pytest.mark.parametrize("network", [strided, language, sentiment, autoencoder])
def test_the_reference_is_proven_equal_to_itself(network: Callable[[], Spec], tmp_path: Path) -> None:
    spec = network()
    run = parity.ladder_run_json(spec, framework_json("fake"), tmp_path)
    certificate = parity.compare(spec, run, measure(run), "1")
    assert certificate.tag() == f"proven: levels {'1-8' if network is strided else '1-6, 8'}"
    seventh = next(level for level in certificate.levels if level.level == "7")
    assert seventh.state == ("passed" if network is strided else "not applicable")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_network_fails_at_its_level(name: str, tmp_path: Path) -> None:
    mutation, level = MUTATIONS[name]
    spec = strided()
    run = parity.ladder_run_json(spec, framework_json("fake"), tmp_path)
    (tmp_path / "wrong").mkdir()
    certificate = parity.compare(spec, run, measure(mutated(run, mutation, tmp_path / "wrong")), "1")
    assert level_of(certificate) == level, certificate.tag()
    assert not certificate.proven and certificate.tag().startswith(f"failed at level {level} (")


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
    assert "deviations: bn1 running variance is biased, the spec's is unbiased; bn2" in declared.tag()
    for adapter in (SilentlyBiased, FalselyDeclared):
        certificate = parity.compare(spec, run, measure(run, adapter), "1")
        assert level_of(certificate) == "7" and certificate.failed and certificate.failed.words.startswith("bn2.running_var")


def test_the_update_is_judged_by_its_own_size() -> None:
    before = np.array([1.0, -2.0])
    right = before + 1e-4
    assert parity.update_error(right.astype(np.float32).astype(np.float64), right, before) == 0
    assert parity.update_error(before + 1.1e-4, right, before) == pytest.approx(0.1, abs=0.01)
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
    assert certificates.find("torch", "2.13.0", spec, "fp32", "cpu") is None
    stored = certificates.store(certificate)
    assert certificates.find("torch", "2.13.0", spec, "fp32", "cpu") == certificate
    assert certificates.find("torch", "2.13.0", replace(spec, name="alias"), "fp32", "cpu") == certificate
    assert certificates.find("torch", "2.12.0", spec, "fp32", "cpu") is None
    assert certificates.find("torch", "2.13.0", spec, "fp32", "gpu") is None
    assert certificates.find("torch", "2.13.0", spec, "bf16", "cpu") is None
    assert certificates.find("torch", "2.13.0", strided(), "fp32", "cpu") is None
    stored.write_text("{}")
    assert certificates.find("torch", "2.13.0", spec, "fp32", "cpu") is None
    assert certificates.tag(None) == "not proven" and certificates.tag(certificate) == "proven: levels 1-6, 8"


@pytest.mark.parametrize("changed", ["frameworks/on_torch.py", "frameworks/torch_layers.py", "ladder.py"])
def test_a_change_of_the_worker_makes_a_certificate_void(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "crosstrain_worker"
    shutil.copytree(paths.worker_dir(), worker)
    monkeypatch.setattr(paths, "worker_dir", lambda: worker)
    spec, certificate = proven(tmp_path)
    certificates.store(certificate)
    (worker / "frameworks" / "on_mxnet.py").write_text("# another framework's code does not matter\n")
    assert certificates.find("torch", "2.13.0", spec, "fp32", "cpu") == certificate
    with (worker / changed).open("a") as out:
        out.write("# changed\n")
    assert certificates.find("torch", "2.13.0", spec, "fp32", "cpu") is None


# -- the real frameworks --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["torch", "mxnet"])
def framework(request: pytest.FixtureRequest, framework_python: Callable[[str], Path]) -> tuple[str, Path]:
    """Name and interpreter. Of the module, so that it is looked up in the user's own cache."""
    return request.param, framework_python(request.param)


def launched(python: Path, run: dict[str, Any]) -> tuple[str, dict[str, np.ndarray]]:
    """(framework's version, arrays) of a ladder run by a worker process."""
    folder = Path(run["folder"])
    (folder / "run.json").write_text(json.dumps(run))
    command = [str(python), "-I", "-B", "-u", str(paths.worker_dir()), str(folder), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    version = json.loads((folder / "result.0.json").read_text())["versions"]["framework"]
    return version, dict(np.load(folder / "ladder.npz", allow_pickle=False))


@pytest.mark.parametrize("network", [strided, language, sentiment, autoencoder])
def test_a_framework_is_proven(network: Callable[[], Spec], framework: tuple[str, Path], tmp_path: Path) -> None:
    spec, (name, python) = network(), framework
    run = parity.ladder_run_json(spec, framework_json(name), tmp_path)
    version, arrays = launched(python, run)
    certificate = parity.compare(spec, run, arrays, version)
    assert certificate.proven, certificate.tag()
    deviating = {"lstm1"} if spec.has("lstm") else {"bn1", "bn2"} if name == "mxnet" and spec.has("batch_norm") else set()
    assert set(certificate.deviations) == deviating


@pytest.mark.parametrize("wrong", MUTATIONS)
def test_a_framework_with_a_wrong_network_fails_at_its_level(wrong: str, framework: tuple[str, Path], tmp_path: Path) -> None:
    mutation, level = MUTATIONS[wrong]
    spec, (name, python) = strided(), framework
    run = parity.ladder_run_json(spec, framework_json(name), tmp_path)
    (tmp_path / "wrong").mkdir()
    version, arrays = launched(python, mutated(run, mutation, tmp_path / "wrong"))
    certificate = parity.compare(spec, run, arrays, version)
    assert level_of(certificate) == level, certificate.tag()
