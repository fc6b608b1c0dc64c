"""CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32×32, from the binary version (no pickle)."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np

from crosstrain.data.download import File, Source, obtain
from crosstrain.data.recipe import Arrays, Recipe, Request

# Size and SHA-256 as in tensorflow/datasets, url_checksums/cifar10.txt.
SOURCE = Source(
    "cifar10",
    ("https://www.cs.toronto.edu/~kriz",),
    (
        File(
            "cifar-10-binary.tar.gz",
            170052171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    ),
)

TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = ("test_batch.bin",)

# Mean and standard deviation of each channel over all pixels of the training set, in units of 0…255, as davidcpage/cifar10-fast
# (the DAWNBench entry) has them; rounded they are the 125.3/63.0, 123.0/62.1, 113.9/66.7 of He's and DenseNet's code.
MEAN = (125.31, 122.95, 113.87)
DEVIATION = (62.99, 62.09, 66.70)


def cifar10(request: Request) -> Recipe:
    """uint8 3×32×32, 10 classes; the feed subtracts each channel's mean and divides by its standard deviation."""
    return cifar_recipe(SOURCE, request)


def cifar_recipe(source: Source, request: Request) -> Recipe:
    def load() -> Arrays:
        paths = obtain(source, request.data_dir, request.report)
        contents = _members(paths[source.files[0].name])
        train, test = _samples(contents, TRAIN), _samples(contents, TEST)
        return {"train_inputs": train[0], "train_targets": train[1], "test_inputs": test[0], "test_targets": test[1]}

    scale = [1 / deviation for deviation in DEVIATION]
    offset = [-mean / deviation for mean, deviation in zip(MEAN, DEVIATION, strict=True)]
    return Recipe("image", (3, 32, 32), 10, f"1 {source.version}", scale, offset, load)


def _members(path: Path) -> dict[str, bytes]:
    """{file name: content} of a tar archive."""
    contents = {}
    with tarfile.open(path) as archive:
        for entry in archive:
            file = archive.extractfile(entry)
            if file is not None:
                contents[Path(entry.name).name] = file.read()
    return contents


def _samples(contents: dict[str, bytes], members: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(uint8 (n, 3, 32, 32), int64 (n,)) of the named files: rows of one label and 3072 values, channel by channel."""
    rows = np.concatenate([np.frombuffer(contents[member], np.uint8).reshape(-1, 3073) for member in members])
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)
