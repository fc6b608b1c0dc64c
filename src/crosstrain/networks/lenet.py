"""LeNet as in Bahrampour et al.: 431,080 parameters."""

from __future__ import annotations

from crosstrain.networks.spec import Network, Spec, classes, image


def lenet(num_classes: int = 10, channels: int = 1) -> Spec:
    """conv 20-5, max 2, tanh, conv 50-5, max 2, tanh, fc 500 ReLU, fc; input (channels, 28, 28)."""
    net = Network("lenet", image(channels, 28, 28), classes(num_classes))
    net.add("conv2d", "conv1", out_channels=20, kernel=5)
    net.add("max_pool", "pool1", kernel=2, stride=2)
    net.add("tanh", "tanh1")
    net.add("conv2d", "conv2", out_channels=50, kernel=5)
    net.add("max_pool", "pool2", kernel=2, stride=2)
    net.add("tanh", "tanh2")
    net.add("flatten", "flat")
    net.add("linear", "fc1", out=500, init="he")
    net.add("relu", "relu1")
    net.add("linear", "fc2", out=num_classes)
    return net.finish()
