"""OverFeat, the fast model (Sermanet et al. 2014), as in convnet-benchmarks: 145,920,872 parameters."""

from __future__ import annotations

from crosstrain.networks.blocks import classifier, conv_relu, widths
from crosstrain.networks.spec import Network, Spec, classes, image


def overfeat(num_classes: int = 1000, size: int = 231, width_multiplier: float = 1.0) -> Spec:
    """conv 96-11/4, max 2/2, conv 256-5, max 2/2, conv 512-3 p1, 1024-3 p1, 1024-3 p1, max 2/2, fc 3072-4096; no dropout.

    Input (3, size, size); the first two convolutions are not padded: 231 → 56 → 28 → 24 → 12 → 6.
    """
    width = widths(width_multiplier)
    net = Network("overfeat", image(3, size, size), classes(num_classes))
    conv_relu(net, "conv1", width(96), 11, stride=4)
    net.add("max_pool", "pool1", kernel=2, stride=2)
    conv_relu(net, "conv2", width(256), 5)
    net.add("max_pool", "pool2", kernel=2, stride=2)
    conv_relu(net, "conv3", width(512), 3, padding=1)
    conv_relu(net, "conv4", width(1024), 3, padding=1)
    conv_relu(net, "conv5", width(1024), 3, padding=1)
    net.add("max_pool", "pool5", kernel=2, stride=2)
    classifier(net, 6, [width(3072), width(4096)], num_classes)
    return net.finish()
