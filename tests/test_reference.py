"""The float64 reference: gradients against finite differences, outputs against loops, scipy and torch, SGD against its formula."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.signal import correlate

from crosstrain.errors import ConfigError
from crosstrain.networks import Network, Spec
from crosstrain.networks.attributes import ATTRIBUTES
from crosstrain.networks.reference import FORWARD, Reference
from crosstrain.networks.spec import classes, image, itself, tokens, values, vector

IMAGE, VECTOR, TOKENS = image(2, 6, 5), vector(4), tokens(5)


def arrays_of(spec: Spec, seed: int = 0) -> dict[str, np.ndarray]:
    """Random parameters, also for biases and norms; variances above 0."""
    random = np.random.RandomState(seed)
    arrays = {v.name: random.normal(0.1, 0.5, v.shape) for v in spec.parameters + spec.states}
    return {name: np.abs(a) + 0.5 if name.endswith("running_var") else a for name, a in arrays.items()}


def batch_of(spec: Spec, n: int = 3, seed: int = 1) -> tuple[np.ndarray, np.ndarray | None]:
    random = np.random.RandomState(seed)
    shape = (n, *spec.input["shape"])
    if spec.input["kind"] == "tokens":
        inputs = random.randint(1, 7, shape)
        inputs[0, 3:] = 0
    else:
        inputs = random.normal(size=shape)
    if spec.target["kind"] == "class":
        return inputs, random.randint(0, spec.target["classes"], (n, *spec.output_shape[:-1]))
    return inputs, None if spec.target["kind"] == "input" else random.normal(size=(n, *spec.output_shape))


# Each entry: the input, the ops between a first layer with parameters and the head (so that input gradients count too).
CASES: dict[str, tuple[dict, list[tuple[str, dict]]]] = {
    "linear": (VECTOR, [("linear", {"out": 5})]),
    "linear without bias": (VECTOR, [("linear", {"out": 5, "bias": False})]),
    "linear over time": (TOKENS, [("linear", {"out": 5})]),
    "tied_linear": (VECTOR, [("tied_linear", {"tied": "first", "transpose": True})]),
    "tied_linear to an embedding": (TOKENS, [("tied_linear", {"tied": "first", "transpose": False, "bias": False})]),
    "conv2d": (IMAGE, [("conv2d", {"out_channels": 4, "kernel": 3, "padding": 1})]),
    "conv2d, one-sided": (IMAGE, [("conv2d", {"out_channels": 2, "kernel": [3, 2], "stride": 2, "padding": [0, 1, 2, 0]})]),
    "conv2d, dilated groups": (
        IMAGE,
        [("conv2d", {"out_channels": 6, "kernel": 2, "stride": [1, 2], "dilation": [2, 1], "groups": 3, "bias": False})],
    ),
    "max_pool": (IMAGE, [("max_pool", {"kernel": 3, "stride": 2, "padding": [1, 0, 0, 1]})]),
    "max_pool rounding up": (IMAGE, [("max_pool", {"kernel": 3, "stride": [2, 3], "ceil": True})]),
    "avg_pool": (IMAGE, [("avg_pool", {"kernel": 3, "stride": 2, "padding": 1})]),
    "avg_pool, input only": (IMAGE, [("avg_pool", {"kernel": 3, "stride": 2, "padding": 1, "count_include_pad": False})]),
    "avg_pool rounding up": (IMAGE, [("avg_pool", {"kernel": 2, "stride": 3, "padding": 1, "ceil": True})]),
    "global_avg_pool": (IMAGE, [("global_avg_pool", {})]),
    "batch_norm": (IMAGE, [("batch_norm", {})]),
    "batch_norm of vectors": (VECTOR, [("batch_norm", {"variance": "biased"})]),
    "layer_norm": (TOKENS, [("layer_norm", {"epsilon": 1e-3})]),
    "lrn": (IMAGE, [("lrn", {"size": 3, "alpha": 0.8, "beta": 0.75, "k": 1.5})]),
    "relu": (VECTOR, [("relu", {})]),
    "tanh": (VECTOR, [("tanh", {})]),
    "sigmoid": (VECTOR, [("sigmoid", {})]),
    "softmax": (VECTOR, [("softmax", {})]),
    "gelu": (VECTOR, [("gelu", {})]),
    "gelu, tanh": (VECTOR, [("gelu", {"approximate": "tanh"})]),
    "dropout off": (VECTOR, [("dropout", {"rate": 0.0})]),
    "add": (IMAGE, [("add", {"inputs": ["first", "first"]})]),
    "concat": (IMAGE, [("tanh", {}), ("concat", {"inputs": ["op0", "first"]})]),
    "channel_pad_shortcut": (IMAGE, [("channel_pad_shortcut", {"out_channels": 5, "stride": 2})]),
    "flatten": (IMAGE, [("flatten", {})]),
    "embedding": (TOKENS, []),
    "position_embedding": (TOKENS, [("position_embedding", {})]),
    "class_token": (TOKENS, [("class_token", {}), ("select_token", {"index": 0})]),
    "patches_to_tokens": (IMAGE, [("patches_to_tokens", {})]),
    "select_token": (TOKENS, [("select_token", {"index": -1})]),
    "lstm": (TOKENS, [("lstm", {"hidden": 3})]),
    "two lstms": (TOKENS, [("lstm", {"hidden": 3}), ("lstm", {"hidden": 2})]),
    "attention": (TOKENS, [("attention", {"heads": 2, "causal": False})]),
    "causal attention": (TOKENS, [("attention", {"heads": 3, "causal": True})]),
    "masked_mean": (TOKENS, [("masked_mean", {})]),
}


def net_of(case: str) -> Spec:
    given, ops = CASES[case]
    net = Network("case", given, classes(4))
    if given["kind"] == "image":
        net.add("conv2d", "first", out_channels=3, kernel=2)
    elif given["kind"] == "vector":
        net.add("linear", "first", out=6)
    else:
        net.add("embedding", "first", vocabulary=7, width=6)
    for i, (op, attributes) in enumerate(ops):
        net.add(op, f"op{i}", **attributes)
    if len(net.ops[-1].shape) == 3:
        net.add("flatten", "flat")
    net.add("linear", "head", out=4)
    return net.finish()


def test_every_op_of_the_design_has_a_rule_a_reference_and_a_case() -> None:
    used = {op for _, ops in CASES.values() for op, _ in ops} | {"embedding"}
    assert set(ATTRIBUTES) == set(FORWARD) == used


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_finite_differences(case: str) -> None:
    spec = net_of(case)
    arrays, (inputs, targets) = arrays_of(spec), batch_of(spec)
    _, gradients = Reference(spec, arrays).gradients(inputs, targets)
    random = np.random.RandomState(2)
    for p in spec.parameters:
        direction = random.normal(size=p.shape)
        near = [
            Reference(spec, {**arrays, p.name: arrays[p.name] + sign * 1e-6 * direction}).loss(inputs, targets)
            for sign in (1, -1)
        ]
        slope = (near[0] - near[1]) / 2e-6
        assert np.vdot(gradients[p.name], direction) == pytest.approx(slope, rel=1e-5, abs=1e-8), p.name


def test_squared_error_gradients() -> None:
    for target in (itself(), values(4)):
        net = Network("ae", VECTOR, target)
        net.add("linear", "enc", out=3)
        net.add("sigmoid", "act")
        net.add("tied_linear", "dec", tied="enc", transpose=True)
        spec = net.finish(loss="mean_squared_error")
        arrays, (inputs, targets) = arrays_of(spec), batch_of(spec)
        reference = Reference(spec, arrays)
        wanted = inputs if targets is None else targets
        assert reference.loss(inputs, targets) == pytest.approx(np.mean((reference.output(inputs) - wanted) ** 2), rel=1e-12)
        _, gradients = reference.gradients(inputs, targets)
        moved = {**arrays, "enc.weight": arrays["enc.weight"] + 1e-6}
        slope = (Reference(spec, moved).loss(inputs, targets) - reference.loss(inputs, targets)) / 1e-6
        assert gradients["enc.weight"].sum() == pytest.approx(slope, rel=1e-4)


def single(op: str, given: dict, **attributes: object) -> Spec:
    """A network of one op, its output the target (squared error), to look at its output alone."""
    probe = Network("one", given, {})
    probe.add(op, "op", **attributes)
    net = Network("one", given, values(*probe.ops[-1].shape))
    net.add(op, "op", **attributes)
    return net.finish(loss="mean_squared_error")


def test_convolution_is_scipys_correlation() -> None:
    spec = single("conv2d", image(3, 7, 8), out_channels=2, kernel=[3, 2], stride=[2, 1], padding=[1, 0, 2, 1])
    arrays, (x, _) = arrays_of(spec), batch_of(spec, 2)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 0), (2, 1)))
    expected = [
        [
            sum(correlate(sample[c], arrays["op.weight"][o, c], "valid") for c in range(3))[::2] + arrays["op.bias"][o]
            for o in range(2)
        ]
        for sample in padded
    ]
    np.testing.assert_allclose(Reference(spec, arrays).output(x), expected, rtol=1e-12)


@pytest.mark.parametrize("op", ["max_pool", "avg_pool"])
@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("sizes", [(5, 2, 2, [1, 1, 1, 1]), (6, 3, 2, [0, 1, 1, 0]), (7, 2, 3, [1, 0, 0, 1])])
def test_pooling_is_the_loop_over_windows(op: str, up: bool, include: bool, sizes: tuple[int, int, int, list[int]]) -> None:
    size, kernel, stride, padding = sizes
    attributes = {"count_include_pad": include} if op == "avg_pool" else {}
    spec = single(op, image(2, size, size), kernel=kernel, stride=stride, padding=padding, ceil=up, **attributes)
    x, _ = batch_of(spec, 1)
    top, bottom, left, right = padding
    rows, columns = spec.output_shape[1:]
    expected = np.zeros((1, 2, rows, columns))
    for r in range(rows):
        for c in range(columns):
            y0, x0 = r * stride - top, c * stride - left
            window = x[:, :, max(y0, 0) : y0 + kernel, max(x0, 0) : x0 + kernel]
            counted = (min(y0 + kernel, size + bottom) - y0) * (min(x0 + kernel, size + right) - x0)
            count = counted if include else window.shape[2] * window.shape[3]
            expected[:, :, r, c] = window.max(axis=(2, 3)) if op == "max_pool" else window.sum(axis=(2, 3)) / count
    np.testing.assert_allclose(Reference(spec, {}).output(x), expected, rtol=1e-12)


def test_batch_norm_follows_the_batch_and_evaluates_with_the_running_values() -> None:
    for variance, correction in (("unbiased", 1), ("biased", 0)):
        net = Network("bn", vector(4), classes(4))
        net.add("batch_norm", "bn", decay=0.75, epsilon=0.01, variance=variance)
        spec = net.finish()
        arrays, (x, targets) = arrays_of(spec), batch_of(spec, 5)
        frozen = {"name": "sgd", "learning_rate": 0.0, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None}
        reference = Reference(spec, arrays, frozen)
        in_training = reference.output(x, training=True)
        z = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 0.01)
        np.testing.assert_allclose(in_training, z * arrays["bn.weight"] + arrays["bn.bias"], rtol=1e-12)
        reference.step(x, targets)
        mean = 0.75 * arrays["bn.running_mean"] + 0.25 * x.mean(axis=0)
        var = 0.75 * arrays["bn.running_var"] + 0.25 * x.var(axis=0, ddof=correction)
        np.testing.assert_allclose(reference.states["bn.running_mean"], mean, rtol=1e-12)
        np.testing.assert_allclose(reference.states["bn.running_var"], var, rtol=1e-12)
        expected = (x - mean) / np.sqrt(var + 0.01) * arrays["bn.weight"] + arrays["bn.bias"]
        np.testing.assert_allclose(reference.output(x, training=False), expected, rtol=1e-12)


def test_sgd_is_the_documented_form() -> None:
    net = Network("sgd", VECTOR, classes(3))
    net.add("linear", "fc", out=3)
    spec = net.finish()
    arrays, (x, targets) = arrays_of(spec), batch_of(spec)
    rule = {"name": "sgd", "learning_rate": 0.5, "momentum": 0.9, "weight_decay": 0.1, "clip_norm": 0.3}
    reference = Reference(spec, arrays, rule)
    w, b = arrays["fc.weight"], arrays["fc.bias"]
    v_w, v_b, clipped = 0.0, 0.0, []
    for _ in range(20):
        _, g = Reference(spec, {"fc.weight": w, "fc.bias": b}).gradients(x, targets)
        norm = np.sqrt((g["fc.weight"] ** 2).sum() + (g["fc.bias"] ** 2).sum())
        scale = min(1.0, 0.3 / norm)
        clipped.append(scale < 1)
        v_w = 0.9 * v_w + scale * g["fc.weight"] + 0.1 * w
        v_b = 0.9 * v_b + scale * g["fc.bias"]
        w, b = w - 0.5 * v_w, b - 0.5 * v_b
        reference.step(x, targets)
    assert True in clipped and False in clipped
    np.testing.assert_allclose(reference.parameters["fc.weight"], w, rtol=1e-12)
    np.testing.assert_allclose(reference.parameters["fc.bias"], b, rtol=1e-12)


def test_dropout_is_the_identity_in_evaluation_and_refused_in_training() -> None:
    spec = single("dropout", VECTOR, rate=0.5)
    x, _ = batch_of(spec)
    np.testing.assert_array_equal(Reference(spec, {}).output(x, training=False), x)
    with pytest.raises(ValueError, match="dropout op"):
        Reference(spec, {}).output(x, training=True)


def test_an_op_without_a_reference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FORWARD, "lrn")
    spec = single("lrn", IMAGE, size=3, alpha=1, beta=0.75, k=2)
    with pytest.raises(ConfigError, match=r"op op \(lrn\): the reference does not know it"):
        Reference(spec, {})
