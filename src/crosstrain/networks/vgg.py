"""VGG (Simonyan & Zisserman 2015) as in convnet-benchmarks, without dropout.

vgg_a has 132,863,336 parameters, vgg_16 138,357,544, vgg_19 143,667,240.
"""

from __future__ import annotations

from collections.abc import Sequence

from crosstrain.networks.blocks import classifier, conv_relu, stages, widths
from crosstrain.networks.spec import Network, Spec, classes, image


def vgg(convolutions: Sequence[int], num_classes: int = 1000, size: int = 224, width_multiplier: float = 1.0) -> Spec:
    """Stages of 3×3 convolutions (64, 128, 256, 512, 512 channels), each ended by max 2/2; fc 4096-4096; input (3, size, size).

    `convolutions` in each stage: [1, 1, 2, 2, 2] for VGG-A, [2, 2, 3, 3, 3] for VGG-16, [2, 2, 4, 4, 4] for VGG-19.
    """
    width = widths(width_multiplier)
    net = Network("vgg", image(3, size, size), classes(num_classes))
    for stage, (channels, count) in enumerate(stages("convolutions", convolutions, (64, 128, 256, 512, 512)), 1):
        for number in range(1, count + 1):
            conv_relu(net, f"conv{stage}_{number}", width(channels), 3, padding=1)
        net.add("max_pool", f"pool{stage}", kernel=2, stride=2)
    classifier(net, 6, [width(4096)] * 2, num_classes)
    return net.finish()
