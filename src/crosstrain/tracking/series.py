"""What is tracked of one run, as plain data, and how a long series is thinned for the charts."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

#: Up to this many points a series is logged complete: one log_batch call of MLflow takes 1000 metrics.
COMPLETE_POINTS = 1000
#: MLflow's charts show at most 320 sampled points of a series, so a longer one is thinned to that many.
BUCKETS = 320


@dataclass(frozen=True)
class Series:
    """One metric over the iterations (or over time): three arrays of one length n."""

    steps: np.ndarray
    """int64 (n,): the iteration, the epoch, or for `system/…` the index of the sample"""
    values: np.ndarray
    """float64 (n,)"""
    times_ms: np.ndarray
    """int64 (n,): unix time in ms"""

    def __post_init__(self) -> None:
        for name, kind in (("steps", np.int64), ("values", np.float64), ("times_ms", np.int64)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=kind))
        if not self.steps.shape == self.values.shape == self.times_ms.shape == (len(self.steps),):
            shapes = self.steps.shape, self.values.shape, self.times_ms.shape
            raise ValueError(f"steps, values and times_ms must be vectors of one length, got shapes {shapes}")


def thin(key: str, series: Series) -> dict[str, Series]:
    """The series to log for `key`, without its NaN and infinite points (MLflow can not show them).

    Up to COMPLETE_POINTS points: the series itself. Beyond, the points are cut into BUCKETS runs of consecutive points:
    `<key>` holds each bucket's median, `<key>_min` and `<key>_max` its extremes, so that a single spike survives. Step and
    time are those of the bucket's first point.
    """
    keep = np.isfinite(series.values)
    steps, values, times = series.steps[keep], series.values[keep], series.times_ms[keep]
    if len(values) <= COMPLETE_POINTS:
        return {key: Series(steps, values, times)} if len(values) else {}
    edges = np.linspace(0, len(values), BUCKETS + 1).astype(int)
    first = edges[:-1]
    medians = np.array([np.median(values[a:b]) for a, b in zip(first, edges[1:], strict=True)])
    envelope = {"": medians, "_min": np.minimum.reduceat(values, first), "_max": np.maximum.reduceat(values, first)}
    return {key + suffix: Series(steps[first], level, times[first]) for suffix, level in envelope.items()}


@dataclass
class RunRecord:
    """All that the store gets of one run."""

    name: str
    params: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, float]
    series: dict[str, Series]
    status: str
    """FINISHED, FAILED or KILLED"""
    start_ms: int
    end_ms: int
    """unix time in ms"""
    artifacts: list[tuple[Path, str]] = field(default_factory=list)
    """(local file, artifact folder; '' is the root)"""

    def save(self, folder: Path) -> None:
        """Write the journal, `tracking.json` and `tracking.npz`, into the run folder. Artifacts inside the folder stay relative."""
        arrays, keys = {}, []
        for index, (key, series) in enumerate(self.series.items()):
            keys.append(key)
            arrays.update({f"{index}.{f.name}": getattr(series, f.name) for f in dataclasses.fields(Series)})
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["series"] = keys
        plain["artifacts"] = [[_inside(path, folder), to] for path, to in self.artifacts]
        temporary = folder / "tracking.npz.part"
        with temporary.open("wb") as file:
            np.savez(file, **arrays)
        os.replace(temporary, folder / "tracking.npz")
        temporary = folder / "tracking.json.part"
        temporary.write_text(json.dumps(plain, indent=1) + "\n")
        os.replace(temporary, folder / "tracking.json")

    @classmethod
    def load(cls, folder: Path) -> RunRecord:
        """Read what `save` wrote, also after the run folder was moved. Raises FileNotFoundError when there is no journal."""
        plain = json.loads((folder / "tracking.json").read_text())
        with np.load(folder / "tracking.npz") as arrays:
            plain["series"] = {
                key: Series(*(arrays[f"{index}.{f.name}"] for f in dataclasses.fields(Series)))
                for index, key in enumerate(plain["series"])
            }
        plain["artifacts"] = [(folder / path, to) for path, to in plain["artifacts"]]
        return cls(**plain)


def _inside(path: Path, folder: Path) -> str:
    path = path.absolute()
    return str(path.relative_to(folder.absolute()) if path.is_relative_to(folder.absolute()) else path)
