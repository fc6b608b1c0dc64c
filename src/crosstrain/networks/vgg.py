"""VGG (Simonyan & Zisserman 2015) as in convnet-benchmarks, without dropout.

vgg_a has 132,863,336 parameters, vgg_16 138,357,544, vgg_19 143,667,240.
"""

from __future__ import annotations

from crosstrain.errors import ConfigError
from crosstrain.networks.blocks import classifier, conv_relu, widths
from crosstrain.networks.spec import Network, Spec, classes, image

#: convolutions in each of the five stages (configurations A, B, D, E)
STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def vgg(depth: int, num_classes: int = 1000, size: int = 224, width_multiplier: float = 1.0) -> Spec:
    """Five stages of 3×3 convolutions (64, 128, 256, 512, 512 channels), each ended by max 2/2; fc 4096-4096; input (3, size, size).

    `depth` counts layers with weights: 11 (VGG-A), 13, 16 or 19.
    """
    if depth not in STAGES:
        raise ConfigError(f"depth={depth!r} of a VGG must be one of {', '.join(map(str, STAGES))}")
    width = widths(width_multiplier)
    net = Network(f"vgg_{depth}", image(3, size, size), classes(num_classes))
    for stage, (count, channels) in enumerate(zip(STAGES[depth], (64, 128, 256, 512, 512), strict=True), 1):
        for number in range(1, count + 1):
            conv_relu(net, f"conv{stage}_{number}", width(channels), 3, padding=1)
        net.add("max_pool", f"pool{stage}", kernel=2, stride=2)
    classifier(net, 6, [width(4096)] * 2, num_classes)
    return net.finish()
