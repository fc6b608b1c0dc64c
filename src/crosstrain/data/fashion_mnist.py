"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): 60,000 + 10,000 pictures of clothes in MNIST's format."""

from __future__ import annotations

from pathlib import Path

from crosstrain.data.download import File, Source
from crosstrain.data.idx import idx_recipe
from crosstrain.data.recipe import Recipe, Request

# Sizes and SHA-256 of the official files as in tensorflow/datasets, url_checksums/fashion_mnist.txt. Debian's package holds the
# same idx content in gzip files without name and date, so their own checksums differ: those of the unpacked content decide there.
SOURCE = Source(
    "fashion_mnist",
    ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",),
    (
        File(
            "train-images-idx3-ubyte.gz",
            26421880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        File(
            "train-labels-idx1-ubyte.gz",
            29515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        File(
            "t10k-images-idx3-ubyte.gz",
            4422102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        File(
            "t10k-labels-idx1-ubyte.gz",
            5148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    folders=(Path("/usr/share/datasets/fashion-mnist"),),
    hint="on Debian: apt-get install dataset-fashion-mnist",
)


def fashion_mnist(request: Request) -> Recipe:
    """uint8 1×28×28, 10 classes, scaled to [0, 1]; the official split. Debian's package is used where it is installed."""
    return idx_recipe(SOURCE, request)
