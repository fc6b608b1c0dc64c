"""The convolutional and fully connected networks of the three studies: counts, shapes, FLOPs, arguments and ladder variants."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from crosstrain import paths
from crosstrain.errors import ConfigError
from crosstrain.networks import Spec, build, ladder_variant
from crosstrain.networks.alexnet import alexnet_lrn

#: parameters as published or counted from the studies' code, shape of the input, classes, the study's batch size
PUBLISHED: dict[str, tuple[int, tuple[int, ...], int, int]] = {
    "fcn_s": (122_194_048, (26752,), 26752, 64),
    "fcn_s_code": (117_997_696, (26752,), 26752, 64),
    "fcn_8": (130_586_752, (26752,), 26752, 64),
    "alexnet_s": (62_378_344, (3, 224, 224), 1000, 16),
    "alexnet_owt": (61_100_840, (3, 224, 224), 1000, 64),
    "alexnet_lrn": (60_965_224, (3, 224, 224), 1000, 256),
    "overfeat": (145_920_872, (3, 231, 231), 1000, 64),
    "vgg_a": (132_863_336, (3, 224, 224), 1000, 64),
    "vgg_16": (138_357_544, (3, 224, 224), 1000, 64),
    "vgg_19": (143_667_240, (3, 224, 224), 1000, 64),
    "googlenet": (6_998_552, (3, 224, 224), 1000, 64),
    "resnet50": (25_557_032, (3, 224, 224), 1000, 16),
    "resnet101": (44_549_160, (3, 224, 224), 1000, 64),
    "resnet152": (60_192_808, (3, 224, 224), 1000, 64),
    "resnet56": (853_018, (3, 32, 32), 10, 128),
}

#: shapes behind some ops
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "fcn_s": {"sigmoid4": (2048,)},
    "fcn_s_code": {"sigmoid3": (2048,), "fc4": (26752,)},
    "fcn_8": {"sigmoid6": (2048,)},
    "alexnet_s": {"conv1": (96, 55, 55), "pool1": (96, 27, 27), "pool2": (256, 13, 13), "conv4": (384, 13, 13), "pool5": (256, 6, 6)},
    "alexnet_owt": {"conv1": (64, 55, 55), "conv2": (192, 27, 27), "conv4": (256, 13, 13), "flat": (9216,)},
    "alexnet_lrn": {"norm1": (96, 55, 55), "norm2": (256, 27, 27), "pool5": (256, 6, 6), "fc7_dropout": (4096,)},
    "overfeat": {"conv1": (96, 56, 56), "conv2": (256, 24, 24), "conv3": (512, 12, 12), "flat": (36864,), "fc6": (3072,), "fc7": (4096,)},
    "vgg_a": {"conv1_1": (64, 224, 224), "conv3_2": (256, 56, 56), "pool5": (512, 7, 7), "fc6": (4096,)},
    "vgg_16": {"conv1_2": (64, 224, 224), "conv5_3": (512, 14, 14)},
    "vgg_19": {"conv3_4": (256, 56, 56), "conv5_4": (512, 14, 14)},
    "googlenet": {
        "conv1": (64, 112, 112), "pool1": (64, 56, 56), "pool3": (192, 28, 28), "inception_3a": (256, 28, 28),
        "inception_3b": (480, 28, 28), "inception_4a": (512, 14, 14), "inception_4d": (528, 14, 14), "inception_4e": (832, 14, 14),
        "inception_5b": (1024, 7, 7), "mean": (1024,),
    },
    "resnet50": {
        "conv1": (64, 112, 112), "pool1": (64, 56, 56), "stage1_block3_relu": (256, 56, 56), "stage2_block4_relu": (512, 28, 28),
        "stage3_block6_relu": (1024, 14, 14), "stage4_block3_relu": (2048, 7, 7), "mean": (2048,),
    },
    "resnet101": {"stage3_block23_relu": (1024, 14, 14)},
    "resnet152": {"stage2_block8_relu": (512, 28, 28), "stage3_block36_relu": (1024, 14, 14)},
    "resnet56": {"stage1_block9_relu": (16, 32, 32), "stage2_block1_shortcut": (32, 16, 16), "stage3_block9_relu": (64, 8, 8)},
}  # fmt: skip


def entry(name: str, **arguments: Any) -> dict[str, Any]:
    return {**yaml.safe_load((paths.conf_dir() / "network" / f"{name}.yaml").read_text()), **arguments}


def shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    return {op.name: op.shape for op in spec.ops}


def kinds(spec: Spec, op: str) -> list[Any]:
    return [o for o in spec.ops if o.op == op]


# -- the shipped networks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_networks(name: str) -> None:
    parameters, given, outputs, batch = PUBLISHED[name]
    spec = build(entry(name))
    assert (spec.name, spec.parameter_count, tuple(spec.input["shape"]), spec.output_shape) == (name, parameters, given, (outputs,))
    assert spec.target == {"kind": "class", "classes": outputs} and spec.loss == "softmax_cross_entropy"
    found = shapes(spec)
    assert {op: found.get(op) for op in SHAPES[name]} == SHAPES[name]
    # logits: no activation on them, as some of the published versions have
    assert spec.ops[-1].op == "linear"
    assert entry(name)["recommended"]["batch_size"] == batch


def test_what_the_networks_are_made_of() -> None:
    made_of = {name: {op.op for op in build(entry(name)).ops} for name in PUBLISHED}
    chain = {"conv2d", "relu", "max_pool", "flatten", "linear"}
    assert made_of["fcn_s"] == made_of["fcn_s_code"] == made_of["fcn_8"] == {"linear", "sigmoid"}
    for name in ("alexnet_s", "alexnet_owt", "overfeat", "vgg_a", "vgg_16", "vgg_19"):
        assert made_of[name] == chain, name
    assert made_of["alexnet_lrn"] == chain | {"lrn", "dropout"}
    assert made_of["googlenet"] == chain - {"flatten"} | {"concat", "global_avg_pool"}
    residual = {"conv2d", "batch_norm", "relu", "add", "global_avg_pool", "linear"}
    assert made_of["resnet50"] == made_of["resnet101"] == made_of["resnet152"] == residual | {"max_pool"}
    assert made_of["resnet56"] == residual | {"channel_pad_shortcut"}


# -- AlexNet with LRN --------------------------------------------------------------------------------------------------


def test_alexnet_lrn_as_published() -> None:
    spec = build(entry("alexnet_lrn"))
    assert [conv.attributes["groups"] for conv in kinds(spec, "conv2d")] == [1, 2, 1, 2, 2]
    lrn = {"size": 5, "alpha": 1e-4, "beta": 0.75, "k": 1.0}
    assert [(op.name, op.inputs, dict(op.attributes)) for op in kinds(spec, "lrn")] == [
        ("norm1", ("conv1_relu",), lrn), ("norm2", ("conv2_relu",), lrn)
    ]  # fmt: skip
    assert [op.attributes["rate"] for op in kinds(spec, "dropout")] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("changes", "parameters", "groups", "norms"),
    [
        ({"groups": 1}, 62_378_344, {1}, 2),
        ({"lrn": False}, 60_965_224, {1, 2}, 0),
        ({"groups": 1, "lrn": False, "dropout": 0.0}, 62_378_344, {1}, 0),
    ],
)
def test_the_variants_of_alexnet_lrn(changes: dict[str, Any], parameters: int, groups: set[int], norms: int) -> None:
    spec = build(entry("alexnet_lrn", **changes))
    assert spec.parameter_count == parameters
    assert {conv.attributes["groups"] for conv in kinds(spec, "conv2d")} == groups
    assert len(kinds(spec, "lrn")) == norms
    assert bool(kinds(spec, "dropout")) == ("dropout" not in changes)
    plain = build(entry("alexnet_s"))
    assert (spec.key() == plain.key()) == ("dropout" in changes)


# -- residual networks -------------------------------------------------------------------------------------------------


def test_version_1_strides_in_the_first_convolution_and_1_5_in_the_second() -> None:
    first, later = build(entry("resnet50")), build(entry("resnet50", stride_in_3x3=True))
    assert first.parameter_count == later.parameter_count
    middle = "stage2_block1_conv1"
    assert (shapes(first)[middle], shapes(later)[middle]) == ((128, 28, 28), (128, 56, 56))
    for spec in (first, later):
        assert shapes(spec)["stage2_block1_conv2"] == (128, 28, 28)
    # published: 3.8 G multiply-adds (He et al.) and 4.09 G (torchvision's, v1.5)
    assert first.forward_flops / 2e9 == pytest.approx(3.86, abs=0.01)
    assert later.forward_flops / 2e9 == pytest.approx(4.09, abs=0.01)


def test_the_relu_of_a_block_follows_the_sum() -> None:
    for name, blocks in (("resnet50", 16), ("resnet56", 27)):
        spec = build(entry(name))
        sums = [op.name for op in kinds(spec, "add")]
        after = {op.inputs[0] for op in kinds(spec, "relu")}
        assert len(sums) == blocks and set(sums) <= after
        for op in kinds(spec, "add"):
            assert op.inputs[1].endswith("_bn"), "the branch ends in batch norm"


def test_option_a_and_option_b() -> None:
    deep, cifar = build(entry("resnet50")), build(entry("resnet56"))
    projections = [op for op in kinds(deep, "conv2d") if op.name.endswith("_shortcut")]
    assert [op.attributes["stride"] for op in projections] == [(1, 1), (2, 2), (2, 2), (2, 2)]
    assert len(kinds(cifar, "conv2d")) == 55 and all(op.attributes["kernel"] == (3, 3) for op in kinds(cifar, "conv2d"))
    assert [op.name for op in kinds(cifar, "channel_pad_shortcut")] == ["stage2_block1_shortcut", "stage3_block1_shortcut"]
    for spec in (deep, cifar):
        assert not any(op.attributes["bias"] for op in kinds(spec, "conv2d"))


# -- GoogLeNet ---------------------------------------------------------------------------------------------------------


def test_the_branches_of_an_inception_module_read_the_same_map() -> None:
    spec = build(entry("googlenet"))
    ops = {op.name: op for op in spec.ops}
    for name in ("1x1", "3x3_reduce", "5x5_reduce", "pool"):
        assert ops[f"inception_4b_{name}"].inputs == ("inception_4a",)
    assert [ops[branch].shape[0] for branch in ops["inception_4b"].inputs] == [160, 224, 64, 64]
    assert (ops["inception_4b_3x3_reduce"].shape[0], ops["inception_4b_5x5_reduce"].shape[0]) == (112, 24)
    assert [op.name for op in kinds(spec, "max_pool") if op.attributes["stride"] == (2, 2)] == ["pool1", "pool3", "pool4", "pool5"]


# -- executed FLOPs ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_flops_are_those_that_pytorch_counts(framework_python: Callable[[str], Path], tmp_path: Path) -> None:
    """On the full networks. The counter ignores the groups in the weight gradient of a convolution: that is added here."""
    python = framework_python("torch")
    specs = {name: build(entry(name)) for name in PUBLISHED}
    (tmp_path / "networks.json").write_text(json.dumps([spec.to_json() for spec in specs.values()]))
    worker = Path(__file__).with_name("flop_worker.py")
    source = paths.worker_dir().parent
    done = subprocess.run([str(python), "-B", str(worker), str(source), str(tmp_path)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    counted = json.loads((tmp_path / "flops.json").read_text())
    for name, spec in specs.items():
        grouped = sum(op.input_flops * (op.attributes["groups"] - 1) for op in kinds(spec, "conv2d"))
        assert (grouped > 0) == (name == "alexnet_lrn")
        assert counted[name] == [spec.forward_flops, spec.training_flops + grouped], name


# -- the ladder's variants ---------------------------------------------------------------------------------------------


def kinds_of_ops(spec: Spec) -> set[Any]:
    """Every op with what is not a size or strength."""
    sizes = ("out", "out_channels", "alpha")
    return {(op.op, *sorted((k, v) for k, v in op.attributes.items() if k not in sizes)) for op in spec.ops}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_ladder_variant_is_small_and_has_every_kind_of_op(name: str) -> None:
    full, small = build(entry(name)), ladder_variant(entry(name))
    assert small.name == name and small.parameter_count < 150_000
    assert kinds_of_ops(small) == kinds_of_ops(full)


def test_only_the_ladder_reads_the_key_ladder() -> None:
    given = entry("resnet56")
    without = {key: value for key, value in given.items() if key != "ladder"}
    assert build(given).key() == build(without).key() == ladder_variant(without).key()
    assert ladder_variant(OmegaConf.create(given)).key() == ladder_variant(given).key() != build(given).key()
    # what the user changes stays changed
    changed = ladder_variant({**entry("alexnet_lrn"), "groups": 1})
    assert {conv.attributes["groups"] for conv in kinds(changed, "conv2d")} == {1}


@pytest.mark.parametrize(
    ("ladder", "message"),
    [
        (3, r"network resnet56: ladder=3 must be \{argument of _target_: value, …\}"),
        ({"name": "other"}, "network resnet56: ladder=.* must be"),
        ({"_target_": "crosstrain.networks.lenet.lenet"}, "network resnet56: ladder=.* must be"),
        ({"depth": 8}, "unexpected keyword argument 'depth'; its arguments are .*blocks"),
    ],
)
def test_a_bad_ladder_is_one_line(ladder: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ladder_variant({**entry("resnet56"), "ladder": ladder})
    assert "\n" not in str(caught.value)


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_width_multiplier_scales_every_layer_but_the_last() -> None:
    half = build(entry("resnet50", width_multiplier=0.5, num_classes=7))
    full = build(entry("resnet50"))
    for name, shape in shapes(full).items():
        assert shapes(half)[name][0] == (7 if name == "fc" else shape[0] // 2), name


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("vgg_a", {"width_multiplier": 0.01}, r"width_multiplier=0\.01: a layer of 64 would get 0\.64, must be a whole number ≥ 1"),
        ("vgg_a", {"width_multiplier": 0}, "width_multiplier=0: a layer of 64 would get 0"),
        ("vgg_a", {"convolutions": []}, r"convolutions=\[\] must be 1 to 5 whole numbers ≥ 1, one for each stage"),
        ("vgg_a", {"convolutions": [1, 0]}, r"convolutions=\[1, 0\] must be 1 to 5 whole numbers"),
        ("resnet50", {"blocks": [1, 1, 1, 1, 1]}, "must be 1 to 4 whole numbers ≥ 1, one for each stage"),
        ("resnet56", {"blocks": 0}, "must be 1 to 3 whole numbers ≥ 1"),
        ("googlenet", {"modules": ["3a", "3c"]}, r"modules=\['3a', '3c'\]: '3c' is not one of 3a, 3b, 4a"),
        ("alexnet_s", {"size": 40}, r"op pool5 \(max_pool\): kernel .* is larger than its input"),
    ],
)
def test_bad_arguments_are_one_line(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(entry(name, **changes))
    assert "\n" not in str(caught.value)


def test_alexnet_lrn_with_more_groups_than_channels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"op conv2 \(conv2d\): groups=2 must divide the 3 input"):
        alexnet_lrn(width_multiplier=1 / 32)
