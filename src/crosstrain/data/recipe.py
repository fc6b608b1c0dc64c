"""What a data set's function is asked and what it answers. A new data set is one such function and one file in conf/data.

    def flowers(request: Request) -> Recipe:
        return Recipe("image", (3, 32, 32), classes=5, version="1", scale=[1 / 255] * 3, offset=[0.0] * 3, load=read_them)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Target:
    """What a network learns to give for one sample.

    kind: `class` (int64 class indices of shape `shape`: () or (T,)), `values` (float32 of shape `shape`) or `input` (the
    input itself or something the network makes of it, an autoencoder: the data needs no targets). classes: only for `class`.
    """

    kind: str
    shape: tuple[int, ...]
    classes: int | None = None

    @staticmethod
    def of(spec: Mapping[str, Any]) -> Target:
        """From the spec as JSON: the loss and the shape of the output say everything but whether it is an autoencoder."""
        output = tuple(next(op["shape"] for op in spec["ops"] if op["name"] == spec["output"]))
        if spec["loss"]["op"] == "softmax_cross_entropy":
            return Target("class", output[:-1], output[-1])
        return Target("input" if spec["target"]["kind"] in ("input", "op") else "values", output)


@dataclass(frozen=True)
class Request:
    """What `prepare` tells a data set's function.

    network: the spec as JSON. samples: data.samples (a limit of the training set; None = all). data_dir: the user's folder
    of files, or None. config: the whole data group, with keys of the user's own. report: shows one line to the user.
    """

    network: Mapping[str, Any]
    batch_global: int
    seed: int
    samples: int | None
    data_dir: Path | None
    config: Mapping[str, Any]
    report: Callable[[str], None]


@dataclass(frozen=True)
class Stream:
    """An array too large for the memory, in parts along its first axis."""

    shape: tuple[int, ...]
    dtype: Any
    parts: Iterable[np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


Arrays = dict[str, "np.ndarray | Stream"]


@dataclass(frozen=True)
class Recipe:
    """A data set's cheap facts, and how its arrays are made when the cache has none.

    kind: image (C, H, W), vector (D,) or tokens (T,); shape: of one sample. classes: number of classes of the int64 targets, or
    None where targets are float32. version: changes whenever the arrays would. scale, offset: what the feed applies,
    `float32(x) * scale[c] + offset[c]`, one value per channel of images, one for vectors, none for tokens.
    load: gives `train_inputs`, `train_targets` and, where there is a test set, `test_inputs`, `test_targets`; inputs are uint8
    or float32 (n, C, H, W), float32 (n, D) or int32 (n, T); targets int64 or float32 (n, *target_shape).
    ring: the number of training samples where it follows the batch size, else None; `version` does not tell it.
    count: how many training samples the set counts as where the feed takes those of `load` again and again, else None.
    """

    kind: str
    shape: tuple[int, ...]
    classes: int | None
    version: str
    scale: list[float]
    offset: list[float]
    load: Callable[[], Arrays]
    target_shape: tuple[int, ...] = ()
    ring: int | None = None
    count: int | None = None
