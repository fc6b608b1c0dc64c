"""Small networks that climb the parity ladder in tests, wrong versions of them, and the reference behind the adapters' interface."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import contracts
from crosstrain import parity, paths
from crosstrain.certificates import Certificate
from crosstrain.networks import Network, Spec, initial_weights
from crosstrain.networks.reference import Reference
from crosstrain.networks.spec import classes, image, itself, output_of, tokens, vector
from crosstrain_worker import ladder
from crosstrain_worker.frameworks.base import Base

Change = Callable[[dict[str, Any]], None]


def framework_json(name: str, **changes: Any) -> dict[str, Any]:
    settings = {"compile": "off", "memory_format": "contiguous", "autotune": False, "deterministic": False, "replicas_per_rank": "one"}
    return {"name": name, "version": None, **settings, **changes}


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
    """The embedding is frozen, so nobody needs the gradient of the LSTM's input."""
    net = Network("sentiment", tokens(6), classes(2))
    net.add("embedding", "embed", vocabulary=20, width=8, trained=False)
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


def second_autoencoder() -> Spec:
    """The second layer of a stack: the first is frozen, and what it gives is the target."""
    net = Network("second_autoencoder", vector(12), output_of("code1"))
    net.add("linear", "encoder1", out=7, trained=False)
    net.add("sigmoid", "code1")
    net.add("linear", "encoder2", out=5)
    net.add("sigmoid", "code2")
    net.add("tied_linear", "decoder", tied="encoder2", transpose=True)
    return net.finish(loss="mean_squared_error")


NETWORKS = [strided, language, sentiment, autoencoder, second_autoencoder]


# -- wrong networks and optimisers: changes of a worker's run.json -------------------------------------------------------------


def op_of(run: dict[str, Any], name: str) -> dict[str, Any]:
    return next(op for op in run["network"]["ops"] if op["name"] == name)


def attribute(name: str, **changes: Any) -> Change:
    return lambda run: op_of(run, name).update(changes)


def without(name: str) -> Change:
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


def optimizer(**changes: Any) -> Change:
    return lambda run: run["optimizer"].update(changes)


def rate_times_replicas(run: dict[str, Any]) -> None:
    run["optimizer"]["learning_rate"] *= 2


def decaying(what: Callable[[str], bool], decay: bool) -> Change:
    """Weight decay on or off for some parameters."""
    return lambda run: run["decay"].update({name: decay for name in run["decay"] if what(name)})


def other_weights(run: dict[str, Any]) -> None:
    run["seed"] += 1


def as_it_is(run: dict[str, Any]) -> None:
    pass


def mutated(run: dict[str, Any], change: Change, folder: Path) -> dict[str, Any]:
    """The run as a wrong worker would do it: its network derived anew, its weights those of the right one wherever they fit."""
    wrong = json.loads(json.dumps(run))
    wrong["folder"] = str(folder)
    right = Spec.from_json(run["network"])
    wrong["decay"] = {p.name: p.decay for p in right.parameters}
    change(wrong)
    network = wrong["network"]
    for op in network["ops"]:
        op.pop("shape", None)
    derived = Spec.from_json({key: value for key, value in network.items() if key not in ("parameters", "states")})
    decay = wrong.pop("decay")
    derived = replace(derived, parameters=tuple(replace(p, decay=decay.get(p.name, p.decay)) for p in derived.parameters))
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


# -- real frameworks: many networks in one worker process, since starting one takes seconds ----------------------------------------


def remembering(function: Callable[[Spec, Mapping[str, Any]], Any]) -> Callable[[Spec, Mapping[str, Any]], Any]:
    """What the reference gives is the same for every framework, and takes seconds."""
    known: dict[str, Any] = {}

    def call(spec: Spec, run: Mapping[str, Any]) -> Any:
        key = json.dumps([spec.to_json(), *(run[name] for name in ("optimizer", "seed", "batch_per_replica"))], sort_keys=True)
        if key not in known:
            known[key] = function(spec, run)
        return known[key]

    return call


EXPECT, OPTIMIZER = remembering(parity._expect), remembering(parity._optimizer)


@contextlib.contextmanager
def one_reference() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "_expect", EXPECT)
        patch.setattr(parity, "_optimizer", OPTIMIZER)
        yield


@dataclass(frozen=True)
class Climb:
    """The right network and its run, what the worker is given instead, and a patch of its adapter (a function of ladder_worker.py)."""

    spec: Spec
    run: dict[str, Any]
    given: dict[str, Any]
    patch: str | None = None


def climb_of(spec: Spec, framework: str, folder: Path, change: Change = as_it_is) -> Climb:
    """`change` makes the worker's network another one than the reference's."""
    folder.mkdir(parents=True)
    with one_reference():
        run = parity.ladder_run_json(spec, contracts.settings(framework), folder)
    given = json.loads(json.dumps(run))
    change(given)
    return Climb(spec, run, given)


class Climbed:
    """What a framework made of the climbs."""

    def __init__(self, python: Path, folder: Path, climbs: Mapping[str, Climb]) -> None:
        self.climbs = climbs
        listed = [{"run": climb.given, "patch": climb.patch} for climb in climbs.values()]
        (folder / "cases.json").write_text(json.dumps(listed))
        worker = Path(__file__).with_name("ladder_worker.py")
        command = [str(python), "-I", "-B", str(worker), str(paths.worker_dir().parent), str(folder)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=env)
        assert done.returncode == 0, done.stderr[-4000:]
        self.results = dict(zip(climbs, json.loads((folder / "results.json").read_text()), strict=True))

    def refusal(self, name: str) -> str:
        """Why the framework can not do it; "" where it did."""
        return str(self.results[name].get("unsupported", ""))

    def certificate(self, name: str) -> Certificate:
        climb, result = self.climbs[name], self.results[name]
        assert "version" in result, result
        arrays = dict(np.load(Path(climb.given["folder"]) / "ladder.npz", allow_pickle=False))
        with one_reference():
            return parity.compare(climb.spec, climb.run, arrays, result["version"])
