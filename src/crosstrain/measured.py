"""From the run folder's files to numbers and an outcome."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain import samples, statistics
from crosstrain.outcomes import Outcome, of_failed_rank
from crosstrain.runspec import RunSpec
from crosstrain.system_samples import SystemSampler
from crosstrain.watch import Ended
from crosstrain_worker.record import ITERATION, TRAIN

#: what Slurm says where a task on any node was killed for memory
SLURM_OOM_KILL = re.compile(r"Detected \d+ oom[_-]kill event")
#: percent of the measured time for which a clock may be held down without a word
THROTTLED_PCT = 5.0
STDERR_TAIL = 4000  # characters of the worker's stderr that an outcome carries


@dataclass
class Files:
    """What the ranks wrote; a broken samples file leaves its whole rows and a line in `broken`."""

    results: list[dict[str, Any] | None]
    rows: list[np.ndarray]
    broken: list[str]
    stderr: list[str]
    launcher: str = ""
    """what the program said that started the ranks"""


@dataclass
class Measured:
    outcome: Outcome
    metrics: dict[str, float]
    rows: np.ndarray
    """merged over the ranks (dtype samples.ROW)"""
    unix_minus_clock: float
    epochs: list[dict[str, Any]]
    facts: dict[str, Any] = field(default_factory=dict)
    """versions, effective settings, thread use, notes: for the environment artifact"""


def read(folder: Path, run: dict[str, Any]) -> Files:
    """Read all ranks' files; never raises for what a dying worker left behind."""
    files = Files([], [], [], [], tail_of(folder / "launcher.err"))
    for rank in range(run["world_size"]):
        try:
            result = json.loads((folder / f"result.{rank}.json").read_text())
        except (OSError, ValueError):
            result = None
        files.results.append(result)
        try:
            files.rows.append(samples.read(folder / f"samples.{rank}.bin"))
        except samples.SamplesError as error:
            files.rows.append(error.rows)
            files.broken.append(str(error))
        files.stderr.append(tail_of(folder / f"worker.{rank}.err") or files.launcher)
    return files


def tail_of(path: Path, characters: int = STDERR_TAIL) -> str:
    """The end of a text file, "" when there is none."""
    try:
        with open(path, "rb") as source:
            source.seek(max(0, path.stat().st_size - characters))
            return source.read().decode(errors="replace")
    except OSError:
        return ""


def failure(files: Files, ended: Ended, oom_kills: int) -> Outcome | None:
    """The outcome of a run that has no result, or None when every rank has one and says ok."""
    if ended.stopped is not None:
        stopped = ended.stopped
        return Outcome(stopped.name, stopped.phase, stopped.message, stopped.hint, files.stderr[0])
    failed: dict[int, Outcome] = {}
    oom_kills += len(SLURM_OOM_KILL.findall(files.launcher))
    for rank, result in enumerate(files.results):
        if result is None or result["status"] != "ok":
            returncode = ended.returncodes[rank]
            phase = result["phase"] if result else ended.phase
            failed[rank] = of_failed_rank(rank, returncode, result, phase, files.stderr[rank], oom_kills)
    if failed:
        worst = _cause(failed, ended)
        if files.broken and worst.name == "crashed":
            return Outcome("crashed", worst.phase, f"{worst.message}; {files.broken[0]}", worst.hint, worst.stderr)
        return worst
    if files.broken:
        return Outcome("crashed", ended.phase, files.broken[0], "", files.stderr[0])
    return None


def _cause(failed: dict[int, Outcome], ended: Ended) -> Outcome:
    """The outcome that explains the others: the other ranks lost this one, or were stopped because of it."""
    said = next((outcome for outcome in failed.values() if outcome.name not in ("crashed", "host_oom")), None)
    if said is not None:
        return said
    # Horovod's word for a rank that only lost another one; it may end before the one that it lost.
    own = {rank: outcome for rank, outcome in failed.items() if "HorovodInternalError" not in outcome.message}
    failed = own or failed
    # A signal first: a rank that only lost another one says so and exits.
    first = sorted((rank for rank in ended.first if rank in failed), key=lambda rank: (ended.returncodes[rank] or 0) >= 0)
    return failed[first[0]] if first else next(iter(failed.values()))


def compute(
    files: Files, ended: Ended, sampler: SystemSampler, spec: RunSpec, run: dict[str, Any], peak_tflops: float | None = None
) -> Measured:
    """Numbers and outcome of a run whose ranks all ended well. `peak_tflops`: the measured matrix rate of its devices, if known."""
    results = [result for result in files.results if result is not None]
    first = results[0]
    merged = samples.merge(files.rows, one_clock=run.get("nodes", 1) == 1)
    offset = next((e["unix_minus_perf_counter"] for e in ended.events if e["event"] == "clock"), 0.0)
    steady_start = first["steady"]["start"]
    metrics = statistics.summarise(merged.rows, spec.batch_global, steady_start)
    metrics |= {key: first["phases"][key] for key in ("import_s", "build_s", "first_step_s", "warmup_s") if key in first["phases"]}
    epochs = _epochs(results)
    metrics |= _quality({**first, "epochs": epochs}, merged.rows, spec.network.answers_each_token)
    flops = {"training": spec.network.training_flops, "gradient": spec.network.training_flops, "forward": spec.network.forward_flops}
    metrics |= statistics.achieved(flops[spec.task], metrics["samples_per_s"], peak_tflops)
    peaks = [result["peak_memory_mb"] for result in results if result.get("peak_memory_mb") is not None]
    if peaks:
        metrics["peak_memory_mb"] = max(peaks)
    start, end = window(merged.rows, offset)
    metrics |= _device(sampler, start, end, run["device"])
    if (energy := energy_per_sample(sampler, merged.rows, offset, spec.batch_global)) is not None:
        metrics["energy_j_per_sample"] = energy
    cores_used = sum(result["threads"]["cpu_s"] / result["threads"]["wall_s"] for result in results)
    if run["device"] == "cpu":
        metrics["busy_pct"] = 100 * cores_used / (run["threads"] * run["replicas"])
    held_down = throttled(sampler, start, end)
    outcome = judge(results, files.rows, spec, run, sampler.contamination(start, end), cores_used, held_down)
    facts = {
        "versions": first["versions"],
        "effective": first["effective"],
        "threads": {**first["threads"], "cores_used": cores_used},
        "steady": first["steady"],
        "ci_missed": first["ci_missed"],
        "peak_tflops": peak_tflops,
        "notes": [note for note in (merged.note, first.get("deviations") or "") if note],
    }
    return Measured(outcome, metrics, merged.rows, offset, epochs, facts)


def _timed(rows: np.ndarray) -> np.ndarray:
    """The rows of the iteration pass and of the block pass."""
    return rows[(rows["phase"] >= ITERATION) & (rows["phase"] < TRAIN)]


def window(rows: np.ndarray, offset: float) -> tuple[float, float]:
    """Unix times of the first and the last moment of measuring (iteration pass to block pass)."""
    timed = _timed(rows)
    return float(timed["start"].min() + offset), float((timed["start"] + timed["duration"]).max() + offset)


def _epochs(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each epoch's facts: training loss and accuracy are means over the ranks (equal shares of every batch), the rest rank 0's."""
    epochs = []
    for ranks in zip(*(result.get("epochs") or [] for result in results), strict=True):
        means = {key: float(np.mean([one[key] for one in ranks])) for key in ("loss", "accuracy") if ranks[0][key] is not None}
        epochs.append({**ranks[0], **means})
    return epochs


def perplexity(epoch: dict[str, Any]) -> float | None:
    """Of a language model on the test set after this epoch: e to its mean loss per token (inf beyond floats)."""
    loss = epoch.get("test_loss")
    if loss is None:
        return None
    return math.exp(loss) if loss < 700 else math.inf


def _quality(result: dict[str, Any], rows: np.ndarray, language_model: bool) -> dict[str, float]:
    """accuracy, loss, perplexity: of the last epoch where epochs were trained, else the loss of the last measured iteration."""
    metrics: dict[str, float] = {}
    if result.get("epochs"):
        last = result["epochs"][-1]
        metrics["loss"] = last["loss"]
        if last.get("test_accuracy") is not None:
            metrics["accuracy"] = last["test_accuracy"]
        if language_model and (value := perplexity(last)) is not None:
            metrics["perplexity"] = value
        if result.get("time_to_accuracy_s") is not None:
            metrics["time_to_accuracy_s"] = result["time_to_accuracy_s"]
    else:
        losses = rows["loss"][np.isfinite(rows["loss"])]
        if len(losses):
            metrics["loss"] = float(losses[-1])
    return metrics


def _device(sampler: SystemSampler, start: float, end: float, device: str) -> dict[str, float]:
    """What the device did meanwhile. device_memory_mb: the rise on the GPU; on the CPU the workers' resident memory at its peak."""
    found = {
        "throttled_pct": sampler.throttled_pct(start, end),
        "sm_clock_mhz": sampler.sm_clock_mhz(start, end),
        "device_memory_mb": sampler.device_memory_delta_mb if device == "gpu" else sampler.peak_memory_mb,
    }
    return {key: value for key, value in found.items() if value is not None and math.isfinite(value)}


def energy_per_sample(sampler: SystemSampler, rows: np.ndarray, offset: float, batch_global: int) -> float | None:
    """Joules of all the run's GPUs per sample: what they used while both passes ran, over the samples of both passes (the iteration
    pass, with a sync each, does fewer in its time than the block pass). None: see SystemSampler.energy_j."""
    energy = sampler.energy_j(*window(rows, offset))
    return None if energy is None else energy / (batch_global * float(_timed(rows)["size"].sum()))


def throttled(sampler: SystemSampler, start: float, end: float) -> list[str]:
    """In words: for how much of the window a GPU's clock was held down, why, and the mean clock; [] up to THROTTLED_PCT, and where it is
    not known."""
    percent = sampler.throttled_pct(start, end)
    if percent is None or percent <= THROTTLED_PCT:
        return []
    reasons = sampler.throttle_reasons(start, end)
    named = ", ".join(sorted(reasons, key=lambda name: -reasons[name]))
    clock = sampler.sm_clock_mhz(start, end)
    mean = "" if clock is None else f", {clock:.0f} MHz on average"
    return [f"the GPU's clock was held down {percent:.0f} % of the time ({named}){mean}"]


def judge(
    results: list[dict[str, Any]],
    rows: list[np.ndarray],
    spec: RunSpec,
    run: dict[str, Any],
    contamination: str | None,
    cores_used: float,
    held_down: list[str],
) -> Outcome:
    """The outcome of a run whose ranks all ended well: can its clock be trusted, did it train, was it steady and undisturbed?

    `held_down`: of `throttled`.
    """
    for result, own in zip(results, rows, strict=True):
        blocks = own["duration"][own["phase"] == statistics.BLOCK]
        problem = statistics.readback_sanity(result["readback"], blocks) or statistics.clock_sanity(own, result.get("wall_s"))
        if problem:
            return Outcome("invalid", "done", problem)
        threads = result["effective"].get("threads", run["threads"])
        if threads != run["threads"]:
            return Outcome("invalid", "done", f"asked for threads={run['threads']}, the framework says {threads}")
    if spec.task == "training" and not all(result["parameters_changed"] for result in results):
        return Outcome("not_training", "done", "no parameter changed while training was measured")
    if not all(result["steady"]["found"] for result in results):
        reason = next(r["steady"]["reason"] for r in results if not r["steady"]["found"])
        return Outcome("unstable", "done", "; ".join([f"no steady state: {reason}", *held_down]), "measure=thorough looks longer")
    if contamination:
        return Outcome("contaminated", "done", "; ".join([contamination, *held_down]), "run it again on a quiet machine")
    return Outcome("ok", "done", "; ".join([*remarks(results, spec, run, cores_used), *held_down]))


def remarks(results: list[dict[str, Any]], spec: RunSpec, run: dict[str, Any], cores_used: float) -> list[str]:
    """What a reader of an ok run should know: an interval that stayed wide, threads that found no work."""
    found = []
    if any(result["ci_missed"] for result in results):
        found.append(f"the 95 % interval is wider than ±{100 * spec.measure['ci_target']:g} %: measure=thorough takes longer")
    asked = run["threads"] * run["replicas"] // run.get("nodes", 1)  # on this machine, as what was used
    # Verified by work done, not by a setting: that the framework accepted a number of threads does not mean that it used them.
    if run["device"] == "cpu" and asked > 1 and cores_used < 0.6 * asked:
        found.append(f"{asked} threads were asked for, the work of {cores_used:.1f} was done")
    return found
