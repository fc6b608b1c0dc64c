"""From rows to numbers: the summary metrics, whether the clock can be trusted, and when one side may be called faster.

Nothing is rounded here, and a number that is not known is left out, never 0 or NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crosstrain_worker.record import BLOCK, ITERATION
from crosstrain_worker.steady import median_interval

RESAMPLES = 2000
CLOCK_TOLERANCE = 0.02  # iterations + gaps against the wall time
CLOCK_FLOOR_S = 1e-3  # the loop's own few lines before the first and behind the last row
READBACK_LIMIT = 0.02  # of the block
READBACK_FLOOR_S = 1e-3  # fixed cost of a few small copies and a wake-up; 2 % of a block of 50 ms
MIN_REPEATS = 5  # 5 against 5 is the least that can reach p < 0.01 (2/252)
P_LIMIT = 0.01
EFFECT_LIMIT = 0.02


def summarise(rows: np.ndarray, batch_global: int, steady_start: int | None = None) -> dict[str, float]:
    """The timing metrics of a run, with the tracking schema's names.

    rows: merged samples (dtype samples.ROW). steady_start: index, among the rows of the iteration pass, of the first steady one;
    None takes the last half, which is what the search for a steady state compares with.

    The headline comes from the block pass: step_ms is the median over blocks of duration / size, samples_per_s = 1000 batch_global
    / step_ms, samples_per_s_total all samples of the pass over the time its blocks took. Without a block pass the steady iterations
    take its place. The iteration pass gives step_sync_ms and the distribution. An interval needs 6 values.
    """
    blocks = rows[rows["phase"] == BLOCK]
    iterations = rows[rows["phase"] == ITERATION]
    steady = iterations[len(iterations) // 2 if steady_start is None else steady_start :]
    metrics = {**headline(blocks if len(blocks) else steady, batch_global), **distribution(steady)}
    if len(blocks) and len(steady):
        metrics["sync_ratio"] = metrics["step_sync_ms"] / metrics["step_ms"]
    waited = steady if len(steady) else blocks
    if len(waited):
        metrics["data_wait_pct"] = 100 * float(waited["data_wait"].sum() / waited["duration"].sum())
    return metrics


def headline(rows: np.ndarray, batch_global: int) -> dict[str, float]:
    """step_ms, its 95 % interval (moving-block bootstrap), samples_per_s, samples_per_s_total; empty without rows."""
    if not len(rows):
        return {}
    low, step_ms, high = median_interval(1000 * rows["duration"] / rows["size"], resamples=RESAMPLES)
    metrics = {
        "step_ms": step_ms,
        "samples_per_s": 1000 * batch_global / step_ms,
        "samples_per_s_total": batch_global * float(rows["size"].sum() / rows["duration"].sum()),
    }
    if np.isfinite(low):
        metrics |= {"step_ms_low": low, "step_ms_high": high}
    return metrics


def distribution(rows: np.ndarray) -> dict[str, float]:
    """step_sync_ms (median), percentiles, maximum and the count of outliers (above Q3 + 3 IQR, kept in all the others)."""
    if not len(rows):
        return {}
    ms = 1000 * rows["duration"] / rows["size"]
    p5, q1, median, q3, p95, p99 = (float(value) for value in np.percentile(ms, [5, 25, 50, 75, 95, 99]))
    return {
        "step_sync_ms": median,
        "step_ms_p5": p5,
        "step_ms_p95": p95,
        "step_ms_p99": p99,
        "step_ms_max": float(ms.max()),
        "outliers": float(np.count_nonzero(ms > q3 + 3 * (q3 - q1))),
    }


def achieved(flops_per_sample: float, samples_per_s: float, peak_tflops: float | None = None) -> dict[str, float]:
    """tflops (1e12 floating-point operations a second) and, with a measured peak, utilization_pct.

    flops_per_sample: of the task (training: forward and backward), from the spec. peak_tflops: matrix rate of all devices together.
    """
    tflops = flops_per_sample * samples_per_s / 1e12
    return {"tflops": tflops} | ({"utilization_pct": 100 * tflops / peak_tflops} if peak_tflops else {})


def clock_sanity(rows: np.ndarray, wall_s: float | None) -> str | None:
    """Why the clock of the iteration pass can not be trusted, or None.

    rows: ONE rank's rows (merged ones mix clocks). wall_s: the pass's time by another clock (time.monotonic). The durations and
    the gaps between them must add up to it within 2 % (or 1 ms). A gap is never negative: rows that overlap add up to more.
    """
    rows = rows[rows["phase"] == ITERATION]
    if not len(rows):
        return None if not wall_s else f"no rows for an iteration pass of {wall_s:.4g} s"
    start, duration = rows["start"], rows["duration"]
    if not (np.isfinite(start).all() and np.isfinite(duration).all() and (duration > 0).all()):
        return "an iteration has no positive, finite duration"
    if wall_s is None or not np.isfinite(wall_s):
        return "the wall time of the iteration pass is not known"
    gaps = np.maximum(start[1:] - (start + duration)[:-1], 0).sum()
    total = float(duration.sum() + gaps)
    if abs(total - wall_s) <= max(CLOCK_TOLERANCE * wall_s, CLOCK_FLOOR_S):
        return None
    return f"iterations and gaps add up to {total:.4g} s, the wall time was {wall_s:.4g} s (more than 2 % apart)"


def readback_sanity(fractions: Sequence[float], block_s: Sequence[float] | None = None) -> str | None:
    """Why the blocks' sync can not be trusted, or None.

    fractions: per block, the time of the host read-back behind its sync over the block's duration; block_s: the blocks' durations
    in seconds. A sync that does not wait leaves the work to the read-back, in every block: the median decides, so that one
    pre-empted read-back does not. It must stay below 2 % or, as the copies themselves cost something in very short blocks, below
    1 ms.
    """
    if not len(fractions):
        return None
    part = np.asarray(fractions, float)
    if not (np.isfinite(part).all() and (part >= 0).all()):
        return "a read-back has no finite duration"
    median = float(np.median(part))
    if median < READBACK_LIMIT:
        return None
    if block_s is not None and float(np.median(part * np.asarray(block_s, float))) < READBACK_FLOOR_S:
        return None
    return f"sync() does not wait: reading back after it took {100 * median:.3g} % of a block, must be below 2 %"


@dataclass(frozen=True)
class Comparison:
    """A against B. ratio: B's step time over A's (above 1: A is faster), with its 95 % interval (None with one repeat a side).

    p: two-sided Mann-Whitney, None when not tested. faster: "a", "b" or None. verdict: one line.
    """

    ratio: float
    low: float | None
    high: float | None
    p: float | None
    faster: str | None
    verdict: str


def compare(a: Sequence[float], b: Sequence[float], name_a: str = "A", name_b: str = "B") -> Comparison:
    """Whether A is faster than B. a, b: the step times of repeats, one median per process (any unit, the same on both sides).

    "Faster" needs 5 repeats a side, Mann-Whitney p < 0.01 and an effect above 2 %. Raises ValueError for an empty side or a
    step time that is not positive and finite.
    """
    side_a, side_b = np.asarray(a, float), np.asarray(b, float)
    for side in (side_a, side_b):
        if not len(side) or not (np.isfinite(side).all() and (side > 0).all()):
            raise ValueError("step times must be positive and finite, at least one a side")
    ratio = float(np.median(side_b) / np.median(side_a))
    low, high = _ratio_interval(side_a, side_b)
    if min(len(side_a), len(side_b)) < MIN_REPEATS:
        return Comparison(ratio, low, high, None, None, "not tested (needs repeat=1,…,5)")
    p = _mann_whitney(side_a, side_b)
    effect = max(ratio, 1 / ratio) - 1
    faster = None
    if p < P_LIMIT and effect > EFFECT_LIMIT:
        faster = "a" if ratio > 1 else "b"
    if faster is None:
        words = f"no difference shown between {name_a} and {name_b}"
    else:
        words = f"{name_a} is faster than {name_b}" if faster == "a" else f"{name_b} is faster than {name_a}"
    return Comparison(ratio, low, high, p, faster, f"{words} (p = {p:.2g}, {100 * effect:.2g} %)")


def _mann_whitney(a: np.ndarray, b: np.ndarray) -> float:
    from scipy.stats import mannwhitneyu

    # Exact where it is cheap, also with ties (conservative): the normal approximation can not reach p < 0.01 with 5 against 5.
    method = "exact" if max(len(a), len(b)) <= 20 else "auto"
    return float(mannwhitneyu(a, b, alternative="two-sided", method=method).pvalue)


def _ratio_interval(a: np.ndarray, b: np.ndarray, seed: int = 0) -> tuple[float | None, float | None]:
    """95 % percentile bootstrap interval of median(b) / median(a), each side resampled by itself (Efron 1979)."""
    if min(len(a), len(b)) < 2:
        return None, None
    random = np.random.default_rng(seed)
    medians = [np.median(random.choice(side, (RESAMPLES, len(side))), axis=1) for side in (a, b)]
    low, high = np.percentile(medians[1] / medians[0], [2.5, 97.5])
    return float(low), float(high)
