"""What the tests of several machines ask alike, whoever starts the ranks: Slurm (test_slurm.py) or mpirun over ssh (test_hosts.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import Result
from crosstrain import samples
from crosstrain_worker.record import BLOCK, TRAIN


def ranks_of(row: dict[str, Any]) -> list[np.ndarray]:
    folder = Path(row["folder"])
    world = json.loads((folder / "run.json").read_text())["world_size"]
    return [samples.read(folder / f"samples.{rank}.bin") for rank in range(world)]


def losses_of(row: dict[str, Any]) -> np.ndarray:
    """Of every training iteration, the mean over the ranks."""
    return np.mean([rows["loss"][rows["phase"] == TRAIN] for rows in ranks_of(row)], axis=0)


def assert_total_throughput(sweep: Result) -> None:
    """Of the runs after the first: a step takes as long as on the slowest rank, and is one of the global batch of 64."""
    for row in sweep.outcomes[1:]:
        blocks = [(rows["duration"] / rows["size"])[rows["phase"] == BLOCK] for rows in ranks_of(row)]
        step_s = float(np.median(np.max(blocks, axis=0)))
        assert row["step_ms"] == pytest.approx(1000 * step_s, rel=1e-6)
        assert row["samples_per_s"] == pytest.approx(64 / step_s, rel=1e-6)


def assert_trained_alike(sweep: Result) -> None:
    """The first run has one replica, the others several of the same global batch."""
    one, *others = map(losses_of, sweep.outcomes)
    assert len(one) == 22 and one[-1] < 0.7 * one[0]
    for two in others:
        # the same sums in another order: rounding grows from step to step
        np.testing.assert_allclose(two[:8], one[:8], rtol=1e-4)
        np.testing.assert_allclose(two, one, rtol=1e-2)
