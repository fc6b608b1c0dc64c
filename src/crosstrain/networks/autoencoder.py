"""Stacked autoencoders of Bahrampour et al.: trained layer by layer, then as a classifier (415,310 and 3,451,010 parameters)."""

from __future__ import annotations

from collections.abc import Sequence

from crosstrain.errors import ConfigError
from crosstrain.networks.spec import Network, Spec, classes, itself, output_of, vector

#: the classifier on top of all encoders
FINETUNE = "finetune"


def autoencoder(stage: str = FINETUNE, widths: Sequence[int] = (400, 200, 100), inputs: int = 784, num_classes: int = 10) -> Spec:
    """One stage of inputs → widths…, sigmoid everywhere.

    stage `ae<k>`: encoder k and its tied decoder (the encoder's weight transposed, a bias of its own, sigmoid) learn to give back
    what encoder k gets, by the squared error; the encoders below are frozen. `finetune`: all encoders and a softmax classifier
    are trained together. Raises ConfigError for another stage.
    """
    stages = [f"ae{k}" for k in range(1, len(widths) + 1)] + [FINETUNE]
    if stage not in stages:
        raise ConfigError(f"network.stage={stage}: must be one of {', '.join(stages)}")
    if stage == FINETUNE:
        net = Network("autoencoder", vector(inputs), classes(num_classes))
        for k, width in enumerate(widths, 1):
            _encoder(net, k, width)
        net.add("linear", "classifier", out=num_classes)
        return net.finish()
    layer = int(stage.removeprefix("ae"))
    net = Network("autoencoder", vector(inputs), itself() if layer == 1 else output_of(f"code{layer - 1}"))
    for k, width in enumerate(widths[:layer], 1):
        _encoder(net, k, width, trained=k == layer)
    net.add("tied_linear", "decoder", tied=f"encoder{layer}", transpose=True)
    net.add("sigmoid", "reconstruction")
    return net.finish(loss="mean_squared_error")


def _encoder(net: Network, k: int, width: int, trained: bool = True) -> None:
    net.add("linear", f"encoder{k}", out=width, init="glorot_sigmoid", trained=trained)
    net.add("sigmoid", f"code{k}")
