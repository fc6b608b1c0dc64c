"""The autoencoders with their frozen layers, the recurrent networks and the transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from crosstrain import paths
from crosstrain.data import Target
from crosstrain.errors import ConfigError
from crosstrain.networks import Network, Spec, build, initial_weights, ladder_variant
from crosstrain.networks.autoencoder import autoencoder
from crosstrain.networks.reference import Reference
from crosstrain.networks.spec import classes, output_of, values, vector
from crosstrain.networks.transformer import gpt2, vit
from crosstrain_worker.frameworks.base import Base, Unsupported

NAMES = ("autoencoder_small", "autoencoder_large", "lstm_ptb", "lstm_imdb", "gpt2_small", "vit_b16")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(tmp_path / "cache"))


def entry(name: str, **arguments: Any) -> dict[str, Any]:
    return {**yaml.safe_load((paths.conf_dir() / "network" / f"{name}.yaml").read_text()), **arguments}


def ops(spec: Spec) -> dict[str, Any]:
    return {op.name: op for op in spec.ops}


# -- the shipped networks ----------------------------------------------------------------------------------------------


# Counts as published, or (GPT-2, ViT) as their authors' code has them.
@pytest.mark.parametrize(
    ("name", "parameters", "input_shape", "output_shape"),
    [
        ("autoencoder_small", 415_310, [784], (10,)),
        ("autoencoder_large", 3_451_010, [784], (10,)),
        ("lstm_ptb", 6_180_624, [32], (32, 10000)),
        ("lstm_imdb", 1_411_842, [100], (2,)),
        ("gpt2_small", 124_439_808, [1024], (1024, 50257)),
        ("vit_b16", 86_567_656, [3, 224, 224], (1000,)),
    ],
)
def test_the_published_counts(name: str, parameters: int, input_shape: list[int], output_shape: tuple[int, ...]) -> None:
    spec = build(entry(name))
    assert (spec.name, spec.parameter_count, spec.output_shape) == (name, parameters, output_shape)
    assert list(spec.input["shape"]) == input_shape
    assert spec.trained == spec.parameters
    assert spec.answers_each_token == (name in ("lstm_ptb", "gpt2_small"))


@pytest.mark.parametrize("name", NAMES)
def test_the_ladder_variant_is_the_same_network_made_smaller(name: str) -> None:
    full, small = build(entry(name)), ladder_variant(entry(name))
    assert small.parameter_count <= 4_000_000
    kept = {op.op for op in full.ops}
    assert {op.op for op in small.ops} == kept
    assert [op.attributes.get("causal") for op in small.ops if op.op == "attention"][:2] == [
        op.attributes.get("causal") for op in full.ops if op.op == "attention"
    ][:2]


def test_multiply_adds_by_hand() -> None:
    # a token of the LSTM: 8·256·256 for each layer, 256·10000 for the head; the embedding is no arithmetic
    assert build(entry("lstm_ptb")).forward_flops == 2 * 32 * (2 * 8 * 256 * 256 + 256 * 10000)
    assert build(entry("lstm_ptb", steps=64)).forward_flops == 2 * 64 * (2 * 8 * 256 * 256 + 256 * 10000)
    assert build(entry("lstm_imdb")).forward_flops == 2 * (100 * 8 * 128 * 128 + 128 * 2)
    # ViT-B/16: 17.6 G multiply-adds are published
    assert build(entry("vit_b16")).forward_flops / 2 == pytest.approx(17.56e9, rel=0.01)
    # GPT-2: 2 × parameters (positions aside, the tied one once) and 4·T·width for each layer's attention, per token
    gpt = build(entry("gpt2_small"))
    weights = sum(p.size for p in gpt.parameters if p.decay and p.name != "position.weight")
    assert gpt.forward_flops == 1024 * (2 * weights + 12 * 4 * 1024 * 768)


def test_the_lstm_starts_within_a_tenth_and_with_forget_bias_0() -> None:
    spec = ladder_variant(entry("lstm_ptb"))
    arrays = initial_weights.split(spec, np.load(initial_weights.make(spec, 1)))
    for name, array in arrays.items():
        if name.endswith("bias"):
            assert not array.any()
        else:
            assert 0.095 < array.max() <= 0.1 and -0.1 <= array.min() < -0.095
    assert entry("lstm_ptb")["recommended"]["clip_norm"] == 5


def test_gpt2_starts_as_the_original() -> None:
    spec = gpt2(steps=32, vocabulary=300, width=64, layers=8, heads=4)
    arrays = initial_weights.split(spec, np.load(initial_weights.make(spec, 1)))
    for name, array in arrays.items():
        wanted = 0.02 / 4 if name.endswith(("_attention.out_weight", "_fc2.weight")) else 0.02
        if array.ndim == 2:
            assert array.std() == pytest.approx(wanted, rel=0.1), name
    # the head is the embedding: it has no weight of its own
    assert not [p for p in spec.parameters if p.name.startswith("head")]


def test_what_a_causal_model_says_depends_on_the_past_only() -> None:
    spec = gpt2(steps=6, vocabulary=20, width=8, layers=2, heads=2)
    arrays = initial_weights.split(spec, np.load(initial_weights.make(spec, 1)))
    tokens = np.array([[1, 2, 3, 4, 5, 6]])
    changed = np.array([[1, 2, 3, 9, 5, 6]])
    before, after = (Reference(spec, arrays).output(t)[0] for t in (tokens, changed))
    assert np.array_equal(before[:3], after[:3]) and (before[3:] != after[3:]).any(axis=1).all()


def test_dropout_is_an_argument_and_absent_at_0() -> None:
    count = lambda spec: [op.attributes["rate"] for op in spec.ops if op.op == "dropout"]  # noqa: E731
    small = {"width": 8, "layers": 2, "heads": 2}
    assert count(gpt2(steps=4, vocabulary=9, **small)) == []
    assert count(gpt2(steps=4, vocabulary=9, embedding_dropout=0.2, **small)) == [0.2]
    assert count(gpt2(steps=4, vocabulary=9, residual_dropout=0.1, **small)) == [0.1] * 4
    assert count(vit(image_size=8, patch=4, dropout=0.1, **small)) == [0.1] * 5
    assert count(build(entry("lstm_imdb"))) == [0.5]
    with_dropout = gpt2(steps=4, vocabulary=9, embedding_dropout=0.2, residual_dropout=0.1, **small)
    off = with_dropout.with_attributes("dropout", rate=0.0)
    arrays = initial_weights.split(off, np.load(initial_weights.make(off, 1)))
    tokens = np.array([[1, 2, 3, 4]])
    same = Reference(gpt2(steps=4, vocabulary=9, **small), arrays).output(tokens)
    assert np.array_equal(Reference(off, arrays).output(tokens), same)


# -- stages of an autoencoder ------------------------------------------------------------------------------------------


def test_the_stages_train_one_layer_and_freeze_those_below() -> None:
    stage = {name: build(entry("autoencoder_small", stage=name)) for name in ("ae1", "ae2", "ae3")}
    assert {name: [p.name for p in spec.trained] for name, spec in stage.items()} == {
        "ae1": ["encoder1.weight", "encoder1.bias", "decoder.bias"],
        "ae2": ["encoder2.weight", "encoder2.bias", "decoder.bias"],
        "ae3": ["encoder3.weight", "encoder3.bias", "decoder.bias"],
    }
    assert {name: spec.output_shape for name, spec in stage.items()} == {"ae1": (784,), "ae2": (400,), "ae3": (200,)}
    assert [dict(spec.target) for spec in stage.values()] == [
        {"kind": "input"},
        {"kind": "op", "name": "code1"},
        {"kind": "op", "name": "code2"},
    ]
    assert {spec.loss for spec in stage.values()} == {"mean_squared_error"}
    # frozen parameters are loaded and counted, but neither trained nor decayed
    assert stage["ae2"].parameter_count == 784 * 400 + 400 + 400 * 200 + 200 + 400
    assert {p.name for p in stage["ae2"].parameters if p.decay} == {"encoder2.weight"}
    # forward: three products; training: the frozen one once, the encoder twice (no input gradient), the decoder three times
    first, second = 784 * 400, 400 * 200
    assert stage["ae2"].forward_flops == 2 * (first + 2 * second)
    assert stage["ae2"].training_flops == 2 * (first + 2 * second + 3 * second)


def test_an_unknown_stage_is_named() -> None:
    with pytest.raises(ConfigError, match=r"network\.stage=ae4: must be one of ae1, ae2, ae3, finetune"):
        build(entry("autoencoder_small", stage="ae4"))


@pytest.mark.parametrize("stage", ["ae1", "ae2", "ae3", "finetune"])
def test_json_keeps_what_is_frozen(stage: str) -> None:
    spec = autoencoder(stage, widths=(6, 5, 4), inputs=8)
    again = Spec.from_json(spec.to_json())
    assert again == spec and again.key() == spec.key()
    assert [p["trained"] for p in spec.to_json()["parameters"]] == [p.trained for p in spec.parameters]
    melted = spec.to_json()
    for parameter in melted["parameters"]:
        parameter["trained"] = True
    frozen = stage in ("ae2", "ae3")
    assert (Spec.from_json(melted).key() != spec.key()) == frozen


def test_the_data_of_a_stage_needs_no_targets() -> None:
    spec = autoencoder("ae2", widths=(6, 5), inputs=8)
    assert Target.of(spec.to_json()).kind == "input"
    assert Target.of(autoencoder("finetune", widths=(6, 5), inputs=8).to_json()) == Target("class", (), 10)


def test_an_op_as_target_must_exist_and_have_the_outputs_shape() -> None:
    def network(target: dict[str, Any]) -> Spec:
        net = Network("n", vector(4), target)
        net.add("linear", "a", out=3)
        net.add("linear", "b", out=4)
        return net.finish(loss="mean_squared_error")

    for target in (output_of("a"), output_of("nothing")):
        with pytest.raises(ConfigError, match="does not fit loss mean_squared_error with target"):
            network(target)
    assert network({"kind": "input"}).output_shape == (4,)


def arrays_of(spec: Spec, seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.RandomState(seed)
    return {v.name: random.uniform(-1, 1, v.shape) for v in spec.parameters}


def test_the_gradient_of_a_stage_is_the_slope_of_its_loss() -> None:
    spec = autoencoder("ae2", widths=(4, 3), inputs=5)
    arrays, inputs = arrays_of(spec), np.random.RandomState(2).uniform(0, 1, (6, 5))
    loss, gradients = Reference(spec, arrays).gradients(inputs, None)
    assert set(gradients) == {"encoder2.weight", "encoder2.bias", "decoder.bias"}
    code = 1 / (1 + np.exp(-(inputs @ arrays["encoder1.weight"].T + arrays["encoder1.bias"])))
    deeper = 1 / (1 + np.exp(-(code @ arrays["encoder2.weight"].T + arrays["encoder2.bias"])))
    again = 1 / (1 + np.exp(-(deeper @ arrays["encoder2.weight"] + arrays["decoder.bias"])))
    assert loss == pytest.approx(((again - code) ** 2).mean(), rel=1e-12)
    for name, gradient in gradients.items():
        for index in np.ndindex(*gradient.shape):
            moved = []
            for step in (1e-6, -1e-6):
                other = {key: value.copy() for key, value in arrays.items()}
                other[name][index] += step
                moved.append(Reference(spec, other).loss(inputs, None))
            assert gradient[index] == pytest.approx((moved[0] - moved[1]) / 2e-6, abs=1e-7), (name, index)


def test_steps_leave_frozen_parameters_alone_and_out_of_the_clipping() -> None:
    spec = autoencoder("ae2", widths=(4, 3), inputs=5)
    arrays, inputs = arrays_of(spec), np.random.RandomState(2).uniform(0, 1, (6, 5))
    rule = {"name": "sgd", "learning_rate": 0.5, "momentum": 0.9, "weight_decay": 0.1, "clip_norm": None}
    plain, clipped = Reference(spec, arrays, rule), Reference(spec, arrays, {**rule, "clip_norm": 1e-3, "weight_decay": 0.0})
    for reference in (plain, clipped):
        reference.step(inputs, None)
        assert np.array_equal(reference.parameters["encoder1.weight"], arrays["encoder1.weight"])
        assert np.array_equal(reference.parameters["encoder1.bias"], arrays["encoder1.bias"])
        assert not np.array_equal(reference.parameters["encoder2.weight"], arrays["encoder2.weight"])
    moved = [clipped.parameters[p.name] - arrays[p.name] for p in spec.trained]
    assert np.sqrt(sum((m**2).sum() for m in moved)) == pytest.approx(0.5 * 1e-3, rel=1e-9)


def test_the_target_is_a_constant_even_where_it_could_be_trained() -> None:
    def network(target: dict[str, Any]) -> Spec:
        net = Network("n", vector(4), target)
        net.add("linear", "a", out=3)
        net.add("linear", "b", out=3)
        return net.finish(loss="mean_squared_error")

    own, given = network(output_of("a")), network(values(3))
    arrays, inputs = arrays_of(own), np.random.RandomState(2).uniform(0, 1, (6, 4))
    fixed = inputs @ arrays["a.weight"].T + arrays["a.bias"]
    expected = Reference(given, arrays).gradients(inputs, fixed)[1]
    for name, gradient in Reference(own, arrays).gradients(inputs, None)[1].items():
        assert np.allclose(gradient, expected[name], rtol=0, atol=1e-15)


def test_an_adapter_that_can_not_freeze_says_so() -> None:
    class Adapter(Base):
        ops = frozenset(("linear", "tied_linear", "sigmoid"))

    def run(stage: str) -> dict[str, Any]:
        return {
            "framework": {"name": "mine"},
            "network": autoencoder(stage).to_json(),
            "precision": "fp32",
            "device": "cpu",
            "replicas": 1,
            "world_size": 1,
        }

    Adapter(run("finetune")).check()
    with pytest.raises(Unsupported, match="mine: this adapter can not freeze parameters, as network autoencoder asks"):
        Adapter(run("ae2")).check()
    Adapter.frozen_parameters = True
    Adapter(run("ae2")).check()


def test_a_network_with_frozen_and_class_targets_is_possible() -> None:
    net = Network("probe", vector(4), classes(3))
    net.add("linear", "features", out=5, trained=False)
    net.add("tanh", "tanh")
    net.add("linear", "head", out=3)
    spec = net.finish()
    assert [p.name for p in spec.trained] == ["head.weight", "head.bias"]
    # the frozen layer once, the head twice: nothing below it needs a gradient
    assert spec.training_flops == 2 * (4 * 5 + 2 * 5 * 3)
