"""Speed-up, efficiency and the share of communication: one run of several replicas against runs of one replica in the store."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from statistics import median
from typing import Any

from crosstrain.tracking import Tracker


def fill(tracking: Tracker, rows: Iterable[dict[str, Any]], sweep: str, have: Container[str] = ()) -> None:
    """Add what is known now to the runs in the store, and to their rows of outcomes.jsonl in memory. Raises TrackingError.

    `have`: metrics that the store has already and keeps as they are.
    """
    for row in rows:
        found = metrics(tracking, row, sweep)
        new = {key: float(f"{value:.4g}") for key, value in found.items() if key not in have}
        if new:
            tracking.log_metrics(row["mlflow_run_id"], new)
        row.update(found)


def metrics(tracking: Tracker, row: Mapping[str, Any], sweep: str) -> dict[str, float]:
    """speedup, efficiency (fraction) and communication_pct of a row of outcomes.jsonl, as far as the runs they refer to are there.

    speedup = samples/s over those of the same cell with one device, unwrapped; efficiency = speedup / replicas.
    communication_pct = 100 · (1 - t₁/t), t₁ the iteration of one device alone with a replica's share of the batch: what an iteration
    without reduction takes, so also the waiting of a rank for a slower one. Not below 0.
    Raises TrackingError.
    """
    replicas, rate, step_ms = row["replicas"], row["samples_per_s"], row["step_ms"]
    if rate is None or not row["base_key"]:
        return {}
    if replicas == 1:
        return {"speedup": 1.0, "efficiency": 1.0} if row["cell_key"] == row["base_key"] else {}
    found: dict[str, float] = {}
    base = _one_device(tracking, row["base_key"], sweep, "samples_per_s")
    if base:
        found |= {"speedup": rate / base, "efficiency": rate / base / replicas}
    alone = _one_device(tracking, row["alone_key"], sweep, "step_ms")
    if alone:
        found["communication_pct"] = max(0.0, 100 * (1 - alone / step_ms))
    return found


def _one_device(tracking: Tracker, cell_key: str, sweep: str, metric: str) -> float | None:
    """The median over the sweep's repeats of that cell; where the sweep has none, the newest run's; None where there is none."""
    runs = [run for run in tracking.published_of_cell(cell_key) if metric in run.metrics]
    own = [run for run in runs if run.tags.get("sweep") == sweep] or runs[:1]
    return median(run.metrics[metric] for run in own) if own else None
