"""From the data group of the configuration to the files a worker opens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import get_method

from crosstrain.data import cache
from crosstrain.data.fit import FITS, fitted, words
from crosstrain.data.recipe import Arrays, Recipe, Request, Target
from crosstrain.errors import ConfigError, OutcomeError

PLACEMENTS = ("device", "host")


@dataclass(frozen=True)
class Split:
    """Paths of the .npy files of one split and its number of samples; targets None = the target is the input.

    `count` may be more than the files hold: sample i is then sample i modulo that.
    """

    inputs: Path
    targets: Path | None
    count: int

    def as_json(self) -> dict[str, str | int | None]:
        return {"inputs": str(self.inputs), "targets": None if self.targets is None else str(self.targets), "samples": self.count}


@dataclass(frozen=True)
class DataSet:
    """A data set, ready for one network. `shape` is that of one stored sample.

    `key` changes with the content, but not with the number of batches in a ring of synthetic ones: runs are compared by it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    classes: int | None
    train: Split
    test: Split | None
    scale: list[float]
    offset: list[float]
    key: str
    placement: str

    def as_json(self) -> dict[str, Any]:
        """The `data` of run.json."""
        return {
            "name": self.name,
            "placement": self.placement,
            "train": self.train.as_json(),
            "test": None if self.test is None else self.test.as_json(),
            "scale": self.scale,
            "offset": self.offset,
        }


def check(config: Mapping[str, Any]) -> Callable[[Request], Recipe]:
    """The function named by `data._target_`. Raises ConfigError for every bad value of the data group; reads no data."""
    for key, allowed in (("placement", (None, *PLACEMENTS)), ("fit", FITS)):
        if config[key] not in allowed:
            choices = ", ".join("null" if value is None else value for value in allowed)
            raise ConfigError(f"data.{key}={config[key]}: allowed are {choices}")
    samples = config["samples"]
    if samples is not None and (not isinstance(samples, int) or isinstance(samples, bool) or samples < 1):
        raise ConfigError(f"data.samples={samples}: a number of training samples from 1 up, or null for all")
    target = config["_target_"]
    if target is None:
        raise ConfigError(f"data={config['name']} names no function (data._target_ is null)")
    try:
        return get_method(target)
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(f"data._target_={target}: can not be imported: {reason}") from error


def prepare(
    config: Mapping[str, Any],
    spec_json: Mapping[str, Any],
    seed: int,
    data_dir: Path | None,
    report: Callable[[str], None],
    batch_global: int,
) -> DataSet:
    """Find or make the data set `config` (the data group) asks for, for the network `spec_json`, in the user cache.

    seed: of synthetic data. data_dir: a folder with the user's files, searched first. report: gets progress, one line each.
    Raises OutcomeError `data_missing` (can not be had, disk full) or `unsupported` (does not fit the network or the batch),
    ConfigError for a bad value of the group.
    """
    function = check(config)
    name, samples = config["name"], config["samples"]
    recipe = function(Request(spec_json, batch_global, seed, samples, data_dir, config, report))
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"data._target_={config['_target_']}: must give a crosstrain.data.Recipe, gave {type(recipe).__name__}")
    target = Target.of(spec_json)
    _check_target(name, recipe, spec_json["name"], target)
    network_input = spec_json["input"]
    recipe = replace(recipe, load=partial(_first, recipe.load, samples))
    recipe = fitted(name, recipe, spec_json["name"], network_input["kind"], tuple(network_input["shape"]), config["fit"])

    identity = [config["_target_"], recipe.version, recipe.shape, samples]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
    folder, arrays = cache.stored(f"{name}-{key}" + (f"-{recipe.ring}" if recipe.ring else ""), recipe.load, report)
    train = _split(folder, arrays, "train", target)
    assert train is not None
    train = replace(train, count=recipe.count or train.count)
    if train.count < batch_global:
        raise OutcomeError(
            "unsupported",
            f"batch_size: a global batch of {batch_global}, but {name} has {train.count} training samples",
            f"batch_size={train.count} or less" + (", or a larger data.samples" if samples else ""),
        )
    test = _split(folder, arrays, "test", target)
    placement = config["placement"] or ("device" if name == "synthetic" else "host")
    return DataSet(
        name, recipe.kind, recipe.shape, recipe.classes, train, test, recipe.scale, recipe.offset, key, placement
    )


def _check_target(name: str, recipe: Recipe, network: str, target: Target) -> None:
    """Raise OutcomeError `unsupported` when the data has not the targets that the network's loss needs."""
    if target.kind == "input":
        return
    wants = f"{target.classes} classes" if target.kind == "class" else words("vector", target.shape)
    gives = f"{recipe.classes} classes" if recipe.classes is not None else words("vector", recipe.target_shape)
    fits = (recipe.classes is not None) == (target.kind == "class") and recipe.target_shape == target.shape
    if not fits or (target.classes or 0) < (recipe.classes or 0):
        each = f" for each of {words('tokens', target.shape)}" if target.kind == "class" and target.shape else ""
        raise OutcomeError(
            "unsupported",
            f"{network} learns {wants}{each}; {name} has targets of {gives}",
            "choose other data (data=synthetic always fits)",
        )


def _first(load: Callable[[], Arrays], samples: int | None) -> Arrays:
    """The arrays with only the first `samples` of the training set (who gives a Stream has heeded `Request.samples`)."""
    arrays = load()
    if samples is None:
        return arrays
    return {
        name: array[:samples] if name.startswith("train_") and isinstance(array, np.ndarray) else array
        for name, array in arrays.items()
    }


def _split(folder: Path, arrays: Mapping[str, np.ndarray], split: str, target: Target) -> Split | None:
    inputs, targets = f"{split}_inputs", f"{split}_targets"
    if inputs not in arrays:
        return None
    has_targets = target.kind != "input"
    return Split(folder / f"{inputs}.npy", folder / f"{targets}.npy" if has_targets else None, len(arrays[inputs]))
