"""Specs: shapes, parameters, FLOPs, JSON and errors; the shipped networks; the initial weights."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

from crosstrain import paths
from crosstrain.errors import ConfigError, CrosstrainError
from crosstrain.networks import Network, Spec, build, initial_weights
from crosstrain.networks.spec import classes, image, itself, tokens, values, vector


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def entry(name: str) -> dict[str, Any]:
    return yaml.safe_load((paths.conf_dir() / "network" / f"{name}.yaml").read_text())


# -- the shipped networks ----------------------------------------------------------------------------------------------


# Counts as published (lenet: Bahrampour et al.; fcn_r, alexnet_r: Shi et al.); multiply-adds by hand from the layer shapes.
@pytest.mark.parametrize(
    "name,parameters,multiply_adds,first",
    [
        ("lenet", 431_080, 20 * 24 * 24 * 25 + 50 * 8 * 8 * 500 + 800 * 500 + 500 * 10, 20 * 24 * 24 * 25),
        ("fcn_r", 14_205_962, 784 * 2048 + 2048 * 4096 + 4096 * 1024 + 1024 * 10, 784 * 2048),
        ("alexnet_r", 85_098, 32 * 32 * 32 * 75 + 32 * 15 * 15 * 800 + 64 * 7 * 7 * 800 + 576 * 10, 32 * 32 * 32 * 75),
    ],
)
def test_the_published_networks(name: str, parameters: int, multiply_adds: int, first: int) -> None:
    spec = build(entry(name))
    assert (spec.name, spec.parameter_count, spec.output_shape) == (name, parameters, (10,))
    assert spec.forward_flops == 2 * multiply_adds
    # forward, weight gradients and input gradients, but for the first layer's
    assert spec.training_flops == 6 * multiply_adds - 2 * first


def test_alexnet_r_rounds_down() -> None:
    shapes = {op.name: op.shape for op in build(entry("alexnet_r")).ops}
    assert [shapes[f"pool{i}"] for i in (1, 2, 3)] == [(32, 15, 15), (32, 7, 7), (64, 3, 3)]


def test_every_shipped_network_builds_and_recommends() -> None:
    wanted = {"batch_size", "data", "optimizer", "learning_rate", "momentum", "weight_decay", "epochs"}
    names = [path.stem for path in (paths.conf_dir() / "network").glob("*.yaml")]
    assert {"lenet", "fcn_r", "alexnet_r"} <= set(names)
    for name in names:
        assert build(entry(name)).name == name
        assert wanted <= set(entry(name)["recommended"]), name


# -- the builder -------------------------------------------------------------------------------------------------------


def transformer() -> Spec:
    net = Network("t", image(3, 8, 8), classes(5))
    net.add("conv2d", "patch", out_channels=6, kernel=4, stride=4)
    net.add("patches_to_tokens", "sequence")
    net.add("class_token", "token")
    net.add("position_embedding", "place")
    net.add("layer_norm", "norm")
    net.add("attention", "attend", heads=2, causal=False)
    net.add("add", "sum", inputs=["place", "attend"])
    net.add("gelu", "gelu1")
    net.add("select_token", "first", index=0)
    net.add("linear", "head", out=5)
    return net.finish()


def test_shapes_parameters_and_decay_follow_from_the_ops() -> None:
    spec = transformer()
    assert [op.shape for op in spec.ops] == [(6, 2, 2), (4, 6), (5, 6), (5, 6), (5, 6), (5, 6), (5, 6), (5, 6), (6,), (5,)]
    shapes = {p.name: p.shape for p in spec.parameters}
    assert shapes["attend.qkv_weight"] == (18, 6) and shapes["place.weight"] == (5, 6) and shapes["patch.weight"] == (6, 3, 4, 4)
    assert {p.name for p in spec.parameters if not p.decay} == {
        "patch.bias", "norm.weight", "norm.bias", "attend.qkv_bias", "attend.out_bias", "head.bias"
    }  # fmt: skip


def test_flops_of_attention_and_lstm() -> None:
    length, width = 5, 6
    projections, products = length * width * 3 * width + length * width * width, 2 * length * length * width
    assert transformer().flops()["attend"] == 2 * (projections + products)
    net = Network("l", tokens(7), classes(9))
    net.add("embedding", "embed", vocabulary=9, width=4)
    net.add("lstm", "lstm1", hidden=3)
    net.add("linear", "head", out=9)
    spec = net.finish()
    assert spec.flops() == {"embed": 0, "lstm1": 2 * 7 * 4 * 3 * (4 + 3), "head": 2 * 7 * 3 * 9}
    # the embedding has parameters, so the LSTM's input gradient is needed too
    assert spec.training_flops == 3 * spec.forward_flops


def test_batch_norm_and_its_states() -> None:
    net = Network("bn", image(3, 4, 4), classes(3))
    net.add("batch_norm", "bn", decay=0.99)
    net.add("global_avg_pool", "pool")
    spec = net.finish()
    assert [(s.name, s.shape, s.init["value"]) for s in spec.states] == [("bn.running_mean", (3,), 0), ("bn.running_var", (3,), 1)]
    op = spec.to_json()["ops"][0]
    assert (op["decay"], op["epsilon"], op["variance"]) == (0.99, 1e-5, "unbiased")


@pytest.mark.parametrize(
    "size,kernel,stride,padding,up,windows",
    [
        (32, 3, 2, 0, False, 15),
        (32, 3, 2, 0, True, 16),
        (32, 3, 2, [0, 1, 0, 1], False, 16),
        # rounding up gives 4 windows, of which the last would start in the padding behind: dropped, as Caffe and torch do
        (6, 2, 3, 1, True, 3),
        (5, 2, 2, 1, True, 3),
    ],
)
def test_pool_sizes(size: int, kernel: int, stride: int, padding: Any, up: bool, windows: int) -> None:
    net = Network("p", image(1, size, size), values(1, windows, windows))
    net.add("max_pool", "pool", kernel=kernel, stride=stride, padding=padding, ceil=up)
    assert net.finish(loss="mean_squared_error").output_shape == (1, windows, windows)


BAD: list[tuple[dict[str, Any], list[tuple[str, dict[str, Any]]], str]] = [
    (vector(4), [("linaer", {"out": 2})], "unknown op 'linaer'"),
    (vector(4), [("linear", {})], r"op op0 \(linear\): attribute out is missing"),
    (vector(4), [("linear", {"out": 2, "size": 3})], "unknown attribute 'size', known are out, bias"),
    (vector(4), [("linear", {"out": 0})], "out=0 must be a whole number ≥ 1"),
    (vector(4), [("linear", {"out": True})], "out=True must be a whole number"),
    (vector(4), [("linear", {"out": 2, "bias": 1})], "bias=1 must be true or false"),
    (image(2, 4, 4), [("conv2d", {"out_channels": 2, "kernel": [3]})], r"kernel=\[3\] must be one or two whole numbers"),
    (image(2, 4, 4), [("conv2d", {"out_channels": 2, "kernel": 3, "padding": "same"})], "padding='same' must be one or four"),
    (image(2, 4, 4), [("batch_norm", {"decay": 1})], r"decay=1 must be a number in \[0, 1\)"),
    (image(2, 4, 4), [("batch_norm", {"variance": "both"})], "variance='both' must be unbiased or biased"),
    (image(2, 4, 4), [("linear", {"out": 2})], r"op op0 \(linear\): wants one input \(D,\) or \(T, D\), got \(2, 4, 4\)"),
    (vector(4), [("conv2d", {"out_channels": 2, "kernel": 3})], r"wants one input \(C, H, W\), got \(4,\)"),
    (image(2, 4, 4), [("conv2d", {"out_channels": 2, "kernel": 5})], "is larger than its input"),
    (image(3, 4, 4), [("conv2d", {"out_channels": 4, "kernel": 1, "groups": 2})], "groups=2 must divide the 3 input"),
    (image(2, 4, 4), [("max_pool", {"kernel": 2, "stride": 2, "padding": 2})], "must be smaller than kernel"),
    (image(2, 4, 4), [("lrn", {"size": 4, "alpha": 1, "beta": 1, "k": 1})], "size=4 must be odd"),
    (image(2, 4, 4), [("add", {"inputs": ["input"]})], "wants two or more inputs"),
    (image(2, 4, 4), [("global_avg_pool", {}), ("add", {"inputs": ["input", "op0"]})], r"one shape, got \(2, 4, 4\), \(2,\)"),
    (vector(4), [("relu", {"inputs": ["later"]})], "its input 'later' is no earlier op"),
    (tokens(4), [("linear", {"out": 2})], r"token ids go through an embedding first, got \(4,\) of token ids"),
    (vector(4), [("embedding", {"vocabulary": 4, "width": 2})], "wants the network's input, of kind tokens"),
    (image(2, 4, 4), [("patches_to_tokens", {}), ("masked_mean", {})], "with the T of a tokens input, here image"),
    (image(2, 4, 4), [("patches_to_tokens", {}), ("attention", {"heads": 3, "causal": True})], "heads=3 must divide the width 2"),
    (image(2, 4, 4), [("patches_to_tokens", {}), ("select_token", {"index": 16})], "index=16 is outside"),
    (vector(4), [("tied_linear", {"tied": "nobody", "transpose": True})], "tied=nobody must name an earlier linear or embedding"),
    (
        vector(4),
        [("linear", {"out": 3}), ("tied_linear", {"tied": "op0", "transpose": False})],
        r"tied to op0.weight \(3, 4\) wants \(4,\)",
    ),
]


@pytest.mark.parametrize("given,ops,message", BAD)
def test_a_bad_op_is_one_line_that_names_it(given: dict[str, Any], ops: list[tuple[str, dict[str, Any]]], message: str) -> None:
    net = Network("bad", given, classes(2))
    with pytest.raises(ConfigError, match=message) as caught:
        for i, (op, attributes) in enumerate(ops):
            net.add(op, f"op{i}", **attributes)
    assert str(caught.value).startswith(f"op op{len(ops) - 1}") and "\n" not in str(caught.value)


def test_bad_networks() -> None:
    net = Network("n", vector(4), classes(3))
    with pytest.raises(ConfigError, match="it has no ops"):
        net.finish()
    net.add("linear", "fc", out=3)
    for name in ("fc", "input", "a.b", ""):
        with pytest.raises(ConfigError, match="used once"):
            net.add("relu", name)
    with pytest.raises(ConfigError, match="output 'nothing' is no op"):
        net.finish(output="nothing")
    with pytest.raises(ConfigError, match="loss 'hinge' is not"):
        net.finish(loss="hinge")
    with pytest.raises(ConfigError, match="does not fit loss mean_squared_error"):
        net.finish(loss="mean_squared_error")
    net.add("tanh", "forgotten", inputs="fc")
    with pytest.raises(ConfigError, match=r"op forgotten \(tanh\) does not lead to the output fc"):
        net.finish(output="fc")
    for target in (classes(2), values(3), itself()):
        wrong = Network("n", vector(4), target)
        wrong.add("linear", "fc", out=3)
        with pytest.raises(ConfigError, match=r"output fc \(3,\) does not fit"):
            wrong.finish()
    for given in ({"kind": "image", "shape": [3, 4]}, {"kind": "sound", "shape": [3]}, {"kind": "vector", "shape": [0]}):
        with pytest.raises(ConfigError, match="must be image"):
            Network("n", given, classes(3))


# -- JSON and keys -----------------------------------------------------------------------------------------------------


def test_json_and_back() -> None:
    spec = transformer()
    data = json.loads(json.dumps(spec.to_json()))
    assert Spec.from_json(data) == spec and Spec.from_json(data).key() == spec.key()
    assert data["ops"][0] == {
        "op": "conv2d", "name": "patch", "inputs": ["input"], "out_channels": 6, "kernel": [4, 4], "stride": [4, 4],
        "padding": [0, 0, 0, 0], "dilation": [1, 1], "groups": 1, "bias": True, "shape": [6, 2, 2],
    }  # fmt: skip
    assert data["parameters"][1] == {
        "name": "patch.bias", "shape": [6], "init": {"kind": "constant", "value": 0.0}, "decay": False, "trained": True,
    }  # fmt: skip
    assert (data["output"], data["loss"]) == ("head", {"op": "softmax_cross_entropy"})
    bare = {key: value for key, value in data.items() if key not in ("parameters", "states")}
    assert Spec.from_json(bare) == spec


def test_json_that_contradicts_itself_is_refused() -> None:
    data = json.loads(json.dumps(transformer().to_json()))
    data["ops"][0]["shape"] = [6, 3, 3]
    with pytest.raises(ConfigError, match=r"op patch \(conv2d\): shape \[6, 3, 3\] is written, \[6, 2, 2\] follows"):
        Spec.from_json(data)
    data = json.loads(json.dumps(transformer().to_json()))
    del data["parameters"][0]
    with pytest.raises(ConfigError, match="parameters written"):
        Spec.from_json(data)


def test_the_key_is_that_of_the_network_not_of_its_name() -> None:
    spec = transformer()
    assert replace(spec, name="other").key() == spec.key()
    assert spec.with_attributes("gelu", approximate="tanh").key() != spec.key()
    assert spec.with_attributes("gelu", approximate="none") == spec


def test_a_spec_can_not_be_changed() -> None:
    spec = transformer()
    with pytest.raises(FrozenInstanceError):
        spec.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        spec.ops[0].attributes["bias"] = False  # type: ignore[index]
    spec.to_json()["ops"][0]["kernel"][0] = 99
    assert spec.ops[0].attributes["kernel"] == (4, 4)


# -- conf entries ------------------------------------------------------------------------------------------------------


def not_a_spec() -> int:
    return 3


def raises() -> Spec:
    raise KeyError("oh\nno")


def test_build_takes_name_arguments_and_omegaconf() -> None:
    target = {"_target_": "crosstrain.networks.fcn.fcn"}
    spec = build(OmegaConf.create({"name": "mine", **target, "inputs": 6, "hidden": [5], "num_classes": 3}))
    assert (spec.name, spec.parameter_count) == ("mine", 6 * 5 + 5 + 5 * 3 + 3)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"_target_": None}, "must be the dotted path"),
        ({"_target_": "crosstrain.networks.lenet.lenett"}, "_target_=crosstrain.networks.lenet.lenett can not be loaded"),
        ({"_target_": "no_such_package.net"}, "can not be loaded"),
        ({"depth": 3}, "got an unexpected keyword argument 'depth'; its arguments are .*num_classes"),
        ({"num_classes": 0}, "out=0 must be"),
        ({"_target_": f"{__name__}.not_a_spec"}, "returned int, not a Spec"),
        ({"_target_": f"{__name__}.raises"}, "raised KeyError: 'oh"),
    ],
)
def test_a_bad_entry_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build({**entry("lenet"), **changes})
    assert "\n" not in str(caught.value)


# -- initial weights ---------------------------------------------------------------------------------------------------


def test_weights_follow_init_and_seed(cache: Path) -> None:
    net = Network("w", vector(300), classes(4))
    net.add("linear", "fc1", out=200, init="he")
    net.add("batch_norm", "bn")
    net.add("linear", "fc2", out=100, init={"kind": "normal", "std": 0.3})
    net.add("linear", "fc3", out=4)
    spec = net.finish()
    path = initial_weights.make(spec, 7)
    flat = np.load(path)
    assert flat.dtype == np.float32 and flat.shape == (spec.parameter_count + 400,)
    arrays = initial_weights.split(spec, flat)
    assert list(arrays) == [v.name for v in spec.parameters + spec.states]
    random = np.random.RandomState(7)
    bound = np.sqrt(6 / 300)
    np.testing.assert_array_equal(arrays["fc1.weight"], random.uniform(-bound, bound, (200, 300)).astype(np.float32))
    np.testing.assert_array_equal(arrays["fc2.weight"], random.normal(0, 0.3, (100, 200)).astype(np.float32))
    assert abs(arrays["fc3.weight"]).max() <= np.sqrt(6 / 104)
    assert not arrays["fc1.bias"].any() and (arrays["bn.weight"] == 1).all() and (arrays["bn.running_var"] == 1).all()
    assert initial_weights.make(spec, 7) == path and initial_weights.make(spec, 8) != path
    assert sorted(p.suffix for p in cache.iterdir()) == [".npy", ".npy"]


def test_weights_do_not_depend_on_the_piece_they_are_drawn_in(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Network("w", vector(30), classes(4))
    net.add("linear", "fc1", out=7, init={"kind": "normal", "std": 1.0})
    net.add("linear", "fc2", out=4)
    spec = net.finish()
    whole = np.load(initial_weights.make(spec, 1))
    initial_weights.make(spec, 1).unlink()
    monkeypatch.setattr(initial_weights, "_CHUNK", 13)
    np.testing.assert_array_equal(np.load(initial_weights.make(spec, 1)), whole)


def test_weights_that_do_not_fit() -> None:
    spec = transformer()
    with pytest.raises(CrosstrainError, match=r"weights of shape \(3,\) do not fit network t, which has \d+ numbers"):
        initial_weights.split(spec, np.zeros(3, np.float32))


def test_a_full_disk_is_one_line_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 10**6))
    with pytest.raises(CrosstrainError, match=r"need 57 MB in .*weights, only 1 MB are free") as caught:
        initial_weights.make(build(entry("fcn_r")), 1)
    assert str(cache) in str(caught.value) and list(cache.iterdir()) == []
