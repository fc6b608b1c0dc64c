"""The picture in a run's artifacts: every measured iteration, where the steady state starts, and the median."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from crosstrain.measured import Measured
from crosstrain.runspec import RunSpec
from crosstrain_worker.record import ITERATION


def iterations(result: Measured, spec: RunSpec, path: Path) -> Path:
    """Write the iteration pass of one run as a PNG: time over iteration, and its distribution. Returns `path`."""
    # Figure without pyplot: no display, no global state, and half the import time.
    from matplotlib.figure import Figure

    rows = result.rows[result.rows["phase"] == ITERATION]
    ms = 1000 * rows["duration"]
    start = result.facts["steady"]["start"]
    figure = Figure(figsize=(8, 3.2), dpi=100)
    # Fixed margins and one patch for the histogram: finding the layout and drawing 40 bars would double the time.
    figure.subplots_adjust(left=0.09, bottom=0.15, right=0.98, top=0.91, wspace=0.04)
    series, spread = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
    series.plot(rows["iteration"], ms, ".", markersize=3, color="#0072B2", rasterized=True)
    if start:
        series.axvspan(rows["iteration"][0], rows["iteration"][start], color="0.9", label="warm-up")
    series.axhline(result.metrics["step_sync_ms"], color="#D55E00", linewidth=1, label="median, one sync per iteration")
    series.axhline(result.metrics["step_ms"], color="black", linewidth=1, linestyle="--", label="block pass (headline)")
    series.set(xlabel="iteration", ylabel="ms", title=f"{spec.name}, batch {spec.batch_global}, {spec.precision}, {spec.task}")
    series.set_ylim(0, 1.15 * float(np.percentile(ms, 99.5)) if len(ms) > 20 else None)
    series.legend(fontsize=7, loc="lower right")
    spread.stairs(*np.histogram(ms[start or 0 :], bins=40), orientation="horizontal", fill=True, color="#0072B2")
    spread.set(xlabel="iterations")
    figure.savefig(path)
    return path
