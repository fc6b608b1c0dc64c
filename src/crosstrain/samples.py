"""Read what the ranks wrote: samples.<rank>.bin (layout: docs/design.md, constants: crosstrain_worker.record)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from crosstrain.errors import CrosstrainError
from crosstrain_worker.record import HEADER, HEADER_SIZE, MAGIC, PHASES, ROW_SIZE

ROW = np.dtype(
    [(name, "<i4") for name in ("iteration", "phase", "size", "epoch")]
    + [(name, "<f8") for name in ("start", "duration", "data_wait", "loss", "accuracy")]
)


class SamplesError(CrosstrainError):
    """A samples file is missing or damaged. `rows` holds the rows that are whole (dtype ROW, perhaps none)."""

    def __init__(self, message: str, rows: np.ndarray) -> None:
        super().__init__(message)
        self.rows = rows


class Merged(NamedTuple):
    """rows: dtype ROW, one per piece of work of the whole run; note: one line when ranks had to be cut, else ""."""

    rows: np.ndarray
    note: str


def read(path: str | os.PathLike[str]) -> np.ndarray:
    """(rows,) of dtype ROW, in the order written. Also for a file still being written, or whose writer was killed:
    what lies behind the counted rows is room for more.

    Raises SamplesError (one line; its `rows` are the whole ones) when the file is missing, foreign or too short.
    """
    none = np.empty(0, ROW)
    try:
        with open(path, "rb") as source:
            size = os.fstat(source.fileno()).st_size
            header = source.read(HEADER_SIZE)
            if len(header) < HEADER_SIZE or header[: len(MAGIC)] != MAGIC:
                raise SamplesError(f"{path}: not a samples file ({size} bytes, no header {MAGIC.decode()}); 0 rows are whole", none)
            _, row_size, header_size, count = HEADER.unpack_from(header)
            if (row_size, header_size) != (ROW_SIZE, HEADER_SIZE) or count < 0:
                raise SamplesError(
                    f"{path}: bad header, row size {row_size}, header size {header_size}, {count} rows,"
                    f" expected {ROW_SIZE}, {HEADER_SIZE}; 0 rows are whole",
                    none,
                )
            rows = np.fromfile(source, ROW, min(count, (size - HEADER_SIZE) // ROW_SIZE))
    except OSError as error:
        raise SamplesError(f"{path}: can not be read ({error.strerror}); 0 rows are whole", none) from error
    if len(rows) < count:
        raise SamplesError(f"{path}: truncated, the header says {count} rows; {len(rows)} rows are whole", rows)
    return rows


def tail(path: str | os.PathLike[str]) -> tuple[int, np.void | None]:
    """(row count, last row or None) of a file that is being written: two small reads, for progress. Never raises for a bad file."""
    try:
        with open(path, "rb", buffering=0) as source:
            header = source.read(HEADER_SIZE)
            if len(header) < HEADER_SIZE or header[: len(MAGIC)] != MAGIC:
                return 0, None
            count = HEADER.unpack_from(header)[3]
            if count < 1:
                return 0, None
            source.seek(HEADER_SIZE + (count - 1) * ROW_SIZE)
            last = source.read(ROW_SIZE)
    except OSError:
        return 0, None
    return (count, np.frombuffer(last, ROW)[0]) if len(last) == ROW_SIZE else (0, None)


def merge(ranks: Sequence[np.ndarray], one_clock: bool = True) -> Merged:
    """One row per (phase, iteration) of all ranks: the run takes as long as its slowest rank.

    ranks: one array of dtype ROW per rank. duration and data_wait: maximum over ranks; start: minimum, without `one_clock` (several
    machines) rank 0's; loss and accuracy: mean over the ranks that know it (every rank has an equal share of the global batch). A
    phase in which ranks have different rows is cut to the prefix they have in common, and the note says so. The order is rank 0's.
    """
    if not ranks:
        return Merged(np.empty(0, ROW), "no rank wrote samples")
    if len(ranks) == 1:
        return Merged(ranks[0].copy(), "")
    kept, notes = [], []
    for phase in np.unique(np.concatenate([rows["phase"] for rows in ranks])):
        indices = [np.flatnonzero(rows["phase"] == phase) for rows in ranks]
        parts = [rows[index] for rows, index in zip(ranks, indices, strict=True)]
        common = _common_prefix(parts)
        if any(len(part) > common for part in parts):
            name = PHASES[phase] if 0 <= phase < len(PHASES) else str(phase)
            counts = ", ".join(str(len(part)) for part in parts)
            notes.append(f"phase {name}: the ranks have {counts} rows, the {common} they have in common are used")
        kept.append((indices[0][:common], _slowest([part[:common] for part in parts], one_clock)))
    order = np.argsort(np.concatenate([index for index, _ in kept]), kind="stable")
    return Merged(np.concatenate([rows for _, rows in kept])[order], "; ".join(notes))


def _common_prefix(parts: Sequence[np.ndarray]) -> int:
    """How many leading rows agree in iteration and size over all ranks."""
    length = min(len(part) for part in parts)
    same = np.ones(length, bool)
    for part in parts[1:]:
        for field in ("iteration", "size"):
            same &= part[field][:length] == parts[0][field][:length]
    return length if same.all() else int(np.argmin(same))


def _slowest(parts: Sequence[np.ndarray], one_clock: bool) -> np.ndarray:
    """The ranks' rows of one phase, all of one length, as one array."""
    merged = parts[0].copy()
    if one_clock:
        merged["start"] = np.min([part["start"] for part in parts], axis=0)
    for field in ("duration", "data_wait"):
        merged[field] = np.max([part[field] for part in parts], axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a row whose loss no rank knows stays NaN
        for field in ("loss", "accuracy"):
            merged[field] = np.nanmean([part[field] for part in parts], axis=0)
    return merged


def write_parquet(ranks: Sequence[np.ndarray], path: str | os.PathLike[str]) -> None:
    """All raw samples of all ranks as one table: the columns of ROW, and `rank` first. Seconds, fractions; unknown is NaN."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = [np.full(len(rows), rank, np.int32) for rank, rows in enumerate(ranks)]
    columns = {"rank": np.concatenate([np.empty(0, np.int32), *numbers])}
    for name in ROW.names or ():
        columns[name] = np.concatenate([np.empty(0, ROW[name]), *(rows[name] for rows in ranks)])
    pq.write_table(pa.table(columns), Path(path))
