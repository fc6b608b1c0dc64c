"""scikit-learn's copy of the UCI handwritten digits: 1797 grey images of 8×8, here enlarged to 28×28. Needs no download."""

from __future__ import annotations

import numpy as np

from crosstrain.data.fit import scale
from crosstrain.data.recipe import Arrays, Recipe, Request

TRAIN = 1437  # 80 % of 1797


def digits(request: Request) -> Recipe:
    """10 classes, uint8 1×28×28 (bilinear from 8×8, values 0…16 stored as 0…255), scaled to [0, 1] by the feed.

    There is no official split: the first 1437 of `RandomState(0).permutation(1797)` are for training, 360 for the test.
    """
    return Recipe("image", (1, 28, 28), 10, version="1", scale=[1 / 255], offset=[0.0], load=_load)


def _load() -> Arrays:
    from sklearn.datasets import load_digits  # here: its import takes about a second

    bunch = load_digits()
    images = scale(bunch.images[:, None].astype(np.float32), 28, 28)
    images = np.rint(images * (255 / 16)).astype(np.uint8)
    targets = bunch.target.astype(np.int64)
    order = np.random.RandomState(0).permutation(len(images))
    train, test = order[:TRAIN], order[TRAIN:]
    return {
        "train_inputs": images[train],
        "train_targets": targets[train],
        "test_inputs": images[test],
        "test_targets": targets[test],
    }
