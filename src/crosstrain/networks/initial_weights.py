"""The initial weights: one set per network and seed, the same for every framework, in the user cache."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from crosstrain import paths
from crosstrain.errors import CrosstrainError
from crosstrain.networks.spec import Spec

#: numbers drawn at a time; RandomState gives the same sequence in pieces as in one draw
_CHUNK = 1 << 20


def make(spec: Spec, seed: int) -> Path:
    """The flat float32 `.npy` of all parameters, then all states, in the spec's order; written once, then found again.

    Drawn from `numpy.random.RandomState(seed)` by each variable's `init`. Raises CrosstrainError when the disk is too full.
    """
    folder = paths.cache_dir("weights")
    path = folder / f"{spec.key()[:24]}-{seed}.npy"
    if path.exists():
        return path
    count = sum(v.size for v in spec.parameters + spec.states)
    _check_disk(folder, 4 * count)
    random = np.random.RandomState(seed)
    # Two drivers may write the same set at once: each into a file of its own, the last rename wins with equal content.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as out:
            header = {"descr": "<f4", "fortran_order": False, "shape": (count,)}
            np.lib.format.write_array_header_1_0(out, header)
            for variable in spec.parameters + spec.states:
                _write(out, random, variable.init, variable.size)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def split(spec: Spec, flat: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """{name: view of its shape} of all parameters and states, out of the flat array of `make`."""
    variables = spec.parameters + spec.states
    count = sum(v.size for v in variables)
    if flat.shape != (count,):
        raise CrosstrainError(f"weights of shape {flat.shape} do not fit network {spec.name}, which has {count} numbers")
    ends = np.cumsum([v.size for v in variables])[:-1]
    return {v.name: part.reshape(v.shape) for v, part in zip(variables, np.split(flat, ends), strict=True)}


def _write(out: BinaryIO, random: np.random.RandomState, init: Mapping[str, Any], count: int) -> None:
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        if init["kind"] == "uniform":
            values = init.get("centre", 0.0) + random.uniform(-init["bound"], init["bound"], size)
        elif init["kind"] == "normal":
            values = random.normal(0.0, init["std"], size)
        elif init["kind"] == "constant":
            values = np.full(size, init["value"])
        else:
            raise CrosstrainError(f"init {dict(init)}: kind must be uniform, normal or constant")
        out.write(values.astype("<f4").tobytes())


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + (64 << 20):  # leave the user some room
        raise CrosstrainError(
            f"initial weights need {needed / 1e6:.0f} MB in {folder}, only {free / 1e6:.0f} MB are free: "
            "free some or set CROSSTRAIN_CACHE to another disk"
        )
