"""Residual networks (He et al. 2016, "Deep residual learning"), post-activation.

resnet50 has 25,557,032 parameters, resnet101 44,549,160, resnet152 60,192,808 (for ImageNet), resnet56 853,018 (for CIFAR-10).
"""

from __future__ import annotations

from collections.abc import Sequence

from crosstrain.networks.blocks import conv_norm, stages, widths
from crosstrain.networks.spec import Network, Spec, classes, image


def resnet(
    blocks: Sequence[int],
    num_classes: int = 1000,
    size: int = 224,
    width_multiplier: float = 1.0,
    stride_in_3x3: bool = False,
) -> Spec:
    """conv 64-7/2 p3, max 3/2 p1, stages of bottlenecks (64, 128, 256, 512, four times that out), mean, fc; input (3, size, size).

    `blocks`: bottlenecks in each stage, [3, 4, 6, 3] for ResNet-50. Shortcuts are 1×1 convolutions where the shape changes (option B).
    A stage from the second on halves the map in the first 1×1 convolution, as published (v1); with `stride_in_3x3` in the 3×3 one
    (v1.5: fb.resnet.torch and later code).
    """
    width = widths(width_multiplier)
    net = Network("resnet", image(3, size, size), classes(num_classes))
    conv_norm(net, "conv1", width(64), 7, stride=2)
    last = net.add("max_pool", "pool1", kernel=3, stride=2, padding=1)
    for stage, (channels, count) in enumerate(stages("blocks", blocks, (64, 128, 256, 512)), 1):
        for number in range(1, count + 1):
            stride = 2 if stage > 1 and number == 1 else 1
            last = _bottleneck(net, f"stage{stage}_block{number}", width(channels), stride, stride_in_3x3, number == 1, last)
    net.add("global_avg_pool", "mean")
    net.add("linear", "fc", out=num_classes)
    return net.finish()


def _bottleneck(net: Network, name: str, channels: int, stride: int, stride_in_3x3: bool, project: bool, source: str) -> str:
    """1×1, 3×3, 1×1 to four times the channels; ReLU after the sum."""
    strides = (1, stride) if stride_in_3x3 else (stride, 1)
    conv_norm(net, f"{name}_conv1", channels, 1, strides[0], source)
    conv_norm(net, f"{name}_conv2", channels, 3, strides[1])
    branch = conv_norm(net, f"{name}_conv3", 4 * channels, 1, relu=False)
    shortcut = conv_norm(net, f"{name}_shortcut", 4 * channels, 1, stride, source, relu=False) if project else source
    return _sum(net, name, shortcut, branch)


def resnet_cifar(blocks: int = 9, num_classes: int = 10, size: int = 32, width_multiplier: float = 1.0) -> Spec:
    """conv 16-3, three stages of `blocks` pairs of 3×3 convolutions (16, 32, 64), mean, fc: 6·blocks + 2 layers; input (3, size, size).

    The original design: shortcuts without parameters (option A: every second pixel, zero channels behind) and ReLU after the sum.
    """
    width = widths(width_multiplier)
    net = Network("resnet_cifar", image(3, size, size), classes(num_classes))
    last = conv_norm(net, "conv1", width(16), 3)
    for stage, (channels, count) in enumerate(stages("blocks", [blocks] * 3, (16, 32, 64)), 1):
        for number in range(1, count + 1):
            name, stride = f"stage{stage}_block{number}", 2 if stage > 1 and number == 1 else 1
            conv_norm(net, f"{name}_conv1", width(channels), 3, stride, last)
            branch = conv_norm(net, f"{name}_conv2", width(channels), 3, relu=False)
            shortcut = last
            if stride > 1:
                shortcut = net.add("channel_pad_shortcut", f"{name}_shortcut", last, out_channels=width(channels), stride=stride)
            last = _sum(net, name, shortcut, branch)
    net.add("global_avg_pool", "mean")
    net.add("linear", "fc", out=num_classes)
    return net.finish()


def _sum(net: Network, name: str, shortcut: str, branch: str) -> str:
    net.add("add", f"{name}_sum", inputs=[shortcut, branch])
    return net.add("relu", f"{name}_relu")
