"""The idx format of MNIST and the sets that copy it: http://yann.lecun.com/exdb/mnist/ describes it."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path

import numpy as np

from crosstrain.data.download import Source, obtain
from crosstrain.data.recipe import Arrays, Recipe, Request

FILES = {
    "train_inputs": "train-images-idx3-ubyte.gz",
    "train_targets": "train-labels-idx1-ubyte.gz",
    "test_inputs": "t10k-images-idx3-ubyte.gz",
    "test_targets": "t10k-labels-idx1-ubyte.gz",
}


def read_idx(path: Path) -> np.ndarray:
    """uint8 array of a gzipped idx file: two zero bytes, type 8, number of axes, big-endian sizes, the values.

    Raises ValueError that names the file when it is something else or too short.
    """
    with gzip.open(path) as file:
        content = file.read()
    zeros, kind, axes = struct.unpack_from(">HBB", content)
    if (zeros, kind) != (0, 8):
        raise ValueError(f"{path} is not an idx file of unsigned bytes")
    shape = struct.unpack_from(f">{axes}I", content, 4)
    if len(content) != 4 + 4 * axes + math.prod(shape):
        raise ValueError(f"{path} announces {shape} values and holds {len(content) - 4 - 4 * axes} bytes")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def idx_recipe(source: Source, request: Request) -> Recipe:
    """Grey 28×28 images of 10 classes in four idx files, scaled to [0, 1] (÷ 255) by the feed."""

    def load() -> Arrays:
        paths = obtain(source, request.data_dir, request.report)
        arrays = {name: read_idx(paths[file]) for name, file in FILES.items()}
        return {
            name: array[:, None] if name.endswith("_inputs") else array.astype(np.int64) for name, array in arrays.items()
        }

    return Recipe("image", (1, 28, 28), 10, f"1 {source.version}", [1 / 255], [0.0], load)
