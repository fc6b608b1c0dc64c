"""The .npy files of a data set: written once, by one process, completely or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from crosstrain.data.recipe import Arrays, Stream
from crosstrain.errors import OutcomeError
from crosstrain.paths import cache_dir

RINGS_KEPT_S = 24 * 3600  # synthetic data is made in seconds and may take gigabytes


@contextmanager
def locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` (made, and left there); says so when another process has it."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another run prepares {path.stem}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def require_disk(folder: Path, needed: int, what: str) -> None:
    """Raise OutcomeError `data_missing` when `folder` has not `needed` bytes (and 5 % more) free."""
    free = shutil.disk_usage(folder).free
    if free < needed * 1.05:
        raise OutcomeError(
            "data_missing",
            f"{what} needs {needed / 1e6:,.0f} MB in {folder}, which has {free / 1e6:,.0f} MB free",
            "free some space, or set CROSSTRAIN_CACHE to a folder on another disk",
        )


def open_all(folder: Path) -> dict[str, np.ndarray]:
    """{file's stem: mmapped array} of a complete folder; {} where there is none or where a file is damaged."""
    try:
        return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(folder.glob("*.npy"))}
    except (ValueError, EOFError, OSError):
        return {}


def stored(stem: str, load: Callable[[], Arrays], report: Callable[[str], None]) -> tuple[Path, dict[str, np.ndarray]]:
    """(folder, arrays) of the data set `stem` in the cache; `load` is called, and its arrays written, where they are not there.

    Raises OutcomeError `data_missing` when the disk is too full, and whatever `load` raises.
    """
    root = cache_dir("data")
    folder = root / stem
    with locked(root / f"{stem}.lock", report):
        arrays = open_all(folder)
        if not arrays:
            _write(folder, load(), report)
            arrays = open_all(folder)
        os.utime(folder)
    return folder, arrays


def _write(folder: Path, arrays: Arrays, report: Callable[[str], None]) -> None:
    """Write all files into a folder beside `folder`, then rename it. The caller holds the lock."""
    for leftover in (folder, *folder.parent.glob(f".{folder.name}.*")):  # of a writer that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    needed = sum(array.nbytes for array in arrays.values())
    require_disk(folder.parent, needed, folder.name)
    report(f"writing {folder.name}: {needed / 1e6:,.1f} MB")
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    unfinished.mkdir()
    try:
        for name, array in arrays.items():
            _write_one(unfinished / f"{name}.npy", array)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_one(path: Path, array: np.ndarray | Stream) -> None:
    if not isinstance(array, Stream):
        np.save(path, np.ascontiguousarray(array), allow_pickle=False)
        return
    file = np.lib.format.open_memmap(path, mode="w+", dtype=array.dtype, shape=array.shape)
    done = 0
    for part in array.parts:
        file[done : done + len(part)] = part
        done += len(part)
    if done != array.shape[0]:
        raise ValueError(f"{path.stem} got {done} samples, {array.shape[0]} were announced")
    file.flush()


def drop_old_rings(name: str) -> None:
    """Remove the folders of `name` that no run has asked for during a day (a running worker keeps the files it has opened)."""
    limit = time.time() - RINGS_KEPT_S
    for folder in cache_dir("data").glob(f"{name}-*"):
        with suppress(OSError):
            if folder.is_dir() and folder.stat().st_mtime < limit:
                shutil.rmtree(folder)
