"""MNIST (LeCun, Cortes, Burges): 60,000 + 10,000 handwritten digits."""

from __future__ import annotations

from crosstrain.data.download import File, Source
from crosstrain.data.idx import idx_recipe
from crosstrain.data.recipe import Recipe, Request

# Sizes and SHA-256 of the official files as in tensorflow/datasets, url_checksums/mnist.txt; behind them those of the unpacked idx.
SOURCE = Source(
    "mnist",
    ("http://yann.lecun.com/exdb/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
    (
        File(
            "train-images-idx3-ubyte.gz",
            9912422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        File(
            "train-labels-idx1-ubyte.gz",
            28881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        File(
            "t10k-images-idx3-ubyte.gz",
            1648877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        File(
            "t10k-labels-idx1-ubyte.gz",
            4542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
)


def mnist(request: Request) -> Recipe:
    """uint8 1×28×28, 10 classes, scaled to [0, 1]; the official split."""
    return idx_recipe(SOURCE, request)
