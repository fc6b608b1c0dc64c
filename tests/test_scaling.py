"""Speed-up, efficiency and communication: of a sweep through the front door, and by hand."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

from conftest import QUICK, Train
from crosstrain import scaling

#: cells of a sweep that have more replicas than CPUs
MANY = ["framework=fake", "framework.step_ms=10", "data=synthetic", "device=cpu", "threads=1", "device.oversubscribe=true",
        "batch_size=32", *QUICK]  # fmt: skip


@pytest.mark.parametrize(("kind", "shares"), [pytest.param("weak", 1, marks=pytest.mark.long), ("strong", 4)])
def test_a_sweep_gets_its_speed_up_whatever_comes_first(train: Train, kind: str, shares: int) -> None:
    """Sleeping takes as long with any batch: weak scaling is perfect, strong scaling gives no speed-up."""
    result = train("-m", *MANY, f"scaling={kind}", "replicas=4,1,2")
    runs = {run.data.params["replicas"]: run.data for run in result.runs}
    rate = {replicas: run.metrics["samples_per_s"] for replicas, run in runs.items()}
    for replicas in ("1", "2", "4"):
        metrics, n = runs[replicas].metrics, int(replicas)
        assert metrics["speedup"] == pytest.approx(rate[replicas] / rate["1"], rel=1e-2)
        assert metrics["efficiency"] == pytest.approx(metrics["speedup"] / n, rel=1e-2)
    assert len({run.tags["base_key"] for run in runs.values()}) == 1
    assert runs["1"].tags["cell_key"] == runs["4"].tags["base_key"]
    # the iteration without reduction is that of one replica with its share of the batch: only weak scaling has measured it here
    assert ("communication_pct" in runs["4"].metrics) == (kind == "weak")
    assert "efficiency" in result.out and "100 %" in result.out
    alone = train(*MANY, f"scaling={kind}", "replicas=1", f"batch_size={32 // shares}").runs[-1].data
    again = train(*MANY, f"scaling={kind}", "replicas=4")
    metrics = again.runs[-1].data.metrics
    # an earlier command's run is a base, too; the newest one where there are several
    base = rate["1"] if kind == "strong" else alone.metrics["samples_per_s"]
    assert metrics["speedup"] == pytest.approx(metrics["samples_per_s"] / base, rel=1e-2)
    t1 = alone.metrics["step_ms"]
    assert metrics["communication_pct"] == pytest.approx(max(0, 100 * (1 - t1 / metrics["step_ms"])), abs=1)


@dataclass
class Run:
    metrics: dict[str, float]
    tags: dict[str, str] = field(default_factory=dict)


class Store:
    """Published runs by their cell."""

    def __init__(self, **cells: list[Run]) -> None:
        self.cells = cells

    def published_of_cell(self, key: str) -> list[Run]:
        return self.cells.get(key, [])


def row(**changes: Any) -> dict[str, Any]:
    return {"replicas": 4, "samples_per_s": 300.0, "step_ms": 40.0, "cell_key": "own", "base_key": "one", "alone_key": "part", **changes}


def test_by_hand() -> None:
    newer, older = Run({"samples_per_s": 100.0}), Run({"samples_per_s": 50.0})
    store: Any = Store(one=[newer, older], part=[Run({"step_ms": 30.0})])
    assert scaling.metrics(store, row(), "s") == {"speedup": 3.0, "efficiency": 0.75, "communication_pct": 25.0}
    store = Store(one=[newer, older])
    older.tags["sweep"] = "s"
    assert scaling.metrics(store, row(), "s") == {"speedup": 6.0, "efficiency": 1.5}, "the sweep's own base is the base"
    repeats: Any = Store(one=[Run({"samples_per_s": rate}, {"sweep": "s"}) for rate in (90.0, 100.0, 500.0)])
    assert scaling.metrics(repeats, row(), "s")["speedup"] == 3.0, "the median of repeats"
    faster: Any = Store(part=[Run({"step_ms": 50.0})])
    assert scaling.metrics(faster, row(), "s") == {"communication_pct": 0.0}


@pytest.mark.parametrize("changes", [{"samples_per_s": None, "step_ms": None}, {"base_key": "", "alone_key": ""}, {"base_key": "none"}])
def test_without_numbers_or_base_there_is_none(changes: dict[str, Any]) -> None:
    store: Any = Store(one=[Run({"samples_per_s": 100.0})])
    assert scaling.metrics(store, row(**changes), "s") == {}


def test_one_device_is_its_own_base_only_where_it_is_the_base() -> None:
    store: Any = Store()
    assert scaling.metrics(store, row(replicas=1, base_key="own"), "s") == {"speedup": 1.0, "efficiency": 1.0}
    assert scaling.metrics(store, row(replicas=1), "s") == {}, "wrapped: its base is the unwrapped one"


def test_the_base_is_the_same_for_all_numbers_of_replicas(train: Train) -> None:
    """Also where threads are shared out, and for any framework setting that both have."""
    result = train("-m", "framework=fake", "data=synthetic", "device=cpu", *QUICK, "replicas=1,2", "precision=fp32", "seed=3")
    tags = [run.data.tags for run in result.runs]
    assert tags[0]["base_key"] == tags[1]["base_key"] == tags[0]["cell_key"] != tags[1]["cell_key"]
    for a, b in itertools.pairwise(tags):
        assert a["run_key"] != b["run_key"]
