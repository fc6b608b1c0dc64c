"""Does a data set fit a network's input, and what must be done to it so that it does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from crosstrain.data.recipe import Arrays, Recipe, Stream
from crosstrain.errors import OutcomeError

FITS = ("none", "pad", "scale")
PART = 256  # images adapted at a time: 256 × 3 × 224 × 224 float32 are 154 MB

Adapt = Callable[[np.ndarray], np.ndarray]


def words(kind: str, shape: tuple[int, ...]) -> str:
    """`1×28×28 images`, `784 values`, `32 tokens`."""
    return "×".join(map(str, shape)) + {"image": " images", "vector": " values", "tokens": " tokens"}[kind]


def fitted(name: str, recipe: Recipe, network: str, kind: str, shape: tuple[int, ...], fit: str) -> Recipe:
    """The recipe for a network's input of this kind and shape; raises OutcomeError `unsupported` where the data can not fit.

    A vector input takes images of the same size as they are: the feed flattens them.
    """
    if (recipe.kind, recipe.shape) == (kind, shape):
        return recipe
    if kind == "vector" and recipe.kind != "tokens" and math.prod(recipe.shape) == math.prod(shape):
        return recipe
    ways = _ways(recipe, kind, shape)
    if fit in ways:
        return _adapted(recipe, shape, fit)
    message = f"{network} takes {words(kind, shape)}; {name} gives {words(recipe.kind, recipe.shape)}"
    if ways:
        raise OutcomeError("unsupported", message, " or ".join(f"data.fit={way}" for way in ways) + " adapts it")
    raise OutcomeError("unsupported", message, f"choose other data (data=synthetic always fits) or another network than {network}")


def _ways(recipe: Recipe, kind: str, shape: tuple[int, ...]) -> list[str]:
    """The values of data.fit that lead from the data's images to the network's."""
    if recipe.kind != "image" or kind != "image" or recipe.shape[0] not in (1, shape[0]):
        return []
    fits_inside = recipe.shape[1] <= shape[1] and recipe.shape[2] <= shape[2]
    return ["pad", "scale"] if fits_inside else ["scale"]


def _adapted(recipe: Recipe, shape: tuple[int, ...], fit: str) -> Recipe:
    resize = pad if fit == "pad" else scale
    channels = shape[0] // recipe.shape[0]

    def adapt(images: np.ndarray) -> np.ndarray:
        return np.repeat(resize(images, shape[1], shape[2]), channels, axis=1)

    def load() -> Arrays:
        return {key: _mapped(array, adapt, shape) if key.endswith("_inputs") else array for key, array in recipe.load().items()}

    return replace(
        recipe,
        shape=shape,
        version=f"{recipe.version} {fit} {shape}",
        scale=recipe.scale * channels,
        offset=recipe.offset * channels,
        load=load,
    )


def _mapped(array: np.ndarray | Stream, adapt: Adapt, shape: tuple[int, ...]) -> Stream:
    parts: Any
    if isinstance(array, Stream):
        parts = array.parts
    else:
        parts = (array[i : i + PART] for i in range(0, len(array), PART))
    return Stream((array.shape[0], *shape), array.dtype, (adapt(part) for part in parts))


def pad(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Zeros around (n, c, h, w), the images in the middle; an odd row or column of zeros goes below or right."""
    top, left = (height - images.shape[2]) // 2, (width - images.shape[3]) // 2
    bottom, right = height - images.shape[2] - top, width - images.shape[3] - left
    return np.pad(images, ((0, 0), (0, 0), (top, bottom), (left, right)))


def scale(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear to (n, c, height, width), pixel centres at half (as align_corners=False), without smoothing before shrinking.

    Integer images are rounded to the nearest value and keep their type.
    """
    rows, columns = _weights(images.shape[2], height), _weights(images.shape[3], width)
    result = rows @ images.astype(np.float32) @ columns.T
    if np.issubdtype(images.dtype, np.integer):
        result = np.rint(result)
    return result.astype(images.dtype)


def _weights(before: int, after: int) -> np.ndarray:
    """float32 (after, before): row i holds the two weights of linear interpolation at (i + 0.5) · before / after − 0.5."""
    position = np.clip((np.arange(after) + 0.5) * before / after - 0.5, 0, before - 1)
    low = np.floor(position).astype(int)
    high = np.minimum(low + 1, before - 1)
    weights = np.zeros((after, before), np.float32)
    np.add.at(weights, (np.arange(after), low), 1 - (position - low))
    np.add.at(weights, (np.arange(after), high), position - low)
    return weights
