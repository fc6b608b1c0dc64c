"""What the store gets of a run: params, tags, summary metrics, series and artifacts, by the names of docs/tracking.md."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from crosstrain import certificates, devices, measured, progress, samples
from crosstrain.outcomes import Outcome
from crosstrain.progress import number
from crosstrain.tracking import RunRecord, Series
from crosstrain_worker.record import ITERATION, TRAIN

if TYPE_CHECKING:
    from crosstrain.run import State

log = logging.getLogger(__name__)
LOG_HEAD, LOG_TAIL = 64_000, 1_000_000  # bytes of a worker's log that become an artifact


def params(state: State) -> dict[str, str]:
    """The same keys for every run; "" where a value is not known (the run never got so far)."""
    spec, ready = state.spec, state.ready
    place = ready.place if ready else None
    framework, optimizer = spec.framework, spec.optimizer
    numeric = spec.batch_size != "max"
    values = {
        "framework": framework["name"],
        "framework_version": _framework_version(state),
        "network": f"{spec.network.name} {spec.variant}".strip(),
        "data": spec.data["name"],
        "data_placement": ready.data_set.placement if ready else spec.data["placement"] or "",
        "task": spec.task,
        "device": place.kind if place else spec.device,
        "device_name": place.device_name if place else "",
        "gpus": (place.copies if place.kind == "gpu" else 0) if place else spec.gpus or 0,
        "replicas": spec.copies,
        "parallelism": spec.parallelism,
        "scaling": spec.scaling,
        "batch_global": spec.batch_global if numeric else "max",
        "batch_per_replica": spec.batch_per_replica if numeric else "max",
        "precision": spec.precision,
        "compile": framework["compile"],
        "memory_format": framework["memory_format"],
        "threads": place.threads if place else spec.threads or "",
        "optimizer": optimizer["name"],
        "learning_rate": optimizer["learning_rate"],
        "momentum": optimizer["momentum"],
        "weight_decay": optimizer["weight_decay"],
        "epochs": spec.epochs,
        "seed": spec.seed,
        "repeat": spec.repeat,
        "measure": spec.measure["name"],
        "study": spec.study,
        "effort": spec.effort,
        "parameters": spec.network.parameter_count,
        "model_gflops": number(spec.network.training_flops / 1e9),
    }
    return {key: str(value) for key, value in values.items()}


def _framework_version(state: State) -> str:
    """As the worker's framework says it; before that, what was asked for."""
    if state.measured is not None:
        return str(state.measured.facts["versions"].get("framework", ""))
    for line in _lines(state.folder / "events.0.jsonl"):
        if '"versions"' in line:
            return str(json.loads(line).get("framework", ""))
    return state.spec.framework["version"] or ""


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


def tags(state: State) -> dict[str, str]:
    """Tags known from the start."""
    return {
        "kind": "run",
        "sweep": state.sweep,
        "study": state.spec.study,
        "overrides": state.overrides[:5000],
        "crosstrain_commit": commit(),
        "crosstrain_run_id": state.run_id,
        **state.keys,
    }


@cache
def commit() -> str:
    """The commit of the checkout crosstrain runs from, with + when it has changes; "" for an installed package."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=5)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return name.stdout.strip() + ("+" if changed.stdout.strip() else "") if name.returncode == 0 else ""


def record(state: State, outcome: Outcome, metrics: dict[str, float]) -> RunRecord:
    """Everything that the store gets of this run. Series only where numbers are published; samples and logs always."""
    final = {
        **tags(state),
        "outcome": outcome.name,
        "outcome_reason": outcome.reason[:5000],
        "outcome_phase": outcome.phase,
        "parity": _parity(state),
    }
    if outcome.stderr and not outcome.kind.ok:
        final["stderr"] = outcome.stderr[-2000:]
    publishes = state.measured is not None and outcome.kind.numbers
    return RunRecord(
        name=state.spec.name,
        params=params(state),
        tags=final,
        metrics={key: shown(value) for key, value in metrics.items() if np.isfinite(value)},
        series=series(state) if publishes else {},
        status=outcome.kind.status,
        start_ms=int(1000 * state.start_s),
        end_ms=int(1000 * state.end_s),
        artifacts=artifacts(state),
    )


def shown(value: float) -> float:
    """Four significant digits, whole numbers as they are: the tables of the UI show every digit they get."""
    return value if value == int(value) else float(f"{value:.4g}")


def _parity(state: State) -> str:
    """What the certificate of this framework and network says; a missing one is said, never hidden."""
    if state.ready is None:
        return certificates.NOT_PROVEN
    framework, version = state.spec.framework, _framework_version(state)
    # The ladder is climbed in fp32; other precisions compute the same network with other rounding.
    kind, parallelism = state.ready.place.kind, state.spec.parallelism
    return certificates.tag(certificates.find(framework, version, state.spec.network, "fp32", kind, parallelism))


def series(state: State) -> dict[str, Series]:
    """iter/… (the training iterations where epochs were trained, else the iteration pass), epoch/…, system/…."""
    result = state.measured
    assert result is not None
    rows = result.rows[result.rows["phase"] == (TRAIN if result.epochs else ITERATION)]
    times = (1000 * (rows["start"] + rows["duration"] + result.unix_minus_clock)).astype(np.int64)
    made = {}
    batch = state.spec.batch_global
    for key, values in (
        ("iter/ms", 1000 * rows["duration"]),
        ("iter/samples_per_s", batch / rows["duration"]),
        ("iter/loss", rows["loss"]),
        ("iter/accuracy", rows["accuracy"]),
    ):
        known = np.isfinite(values)
        if known.any():
            made[key] = Series(rows["iteration"][known].astype(np.int64), values[known], times[known])
    made |= _epochs(result, state.spec.network.answers_each_token)
    if state.sampler is not None:
        for key, (at, values) in state.sampler.series().items():
            made[key] = Series(np.arange(len(at)), np.asarray(values), np.asarray(at, np.int64))
    return made


def _epochs(result: measured.Measured, language_model: bool) -> dict[str, Series]:
    """epoch/loss (training), epoch/accuracy, epoch/test_loss and epoch/perplexity (test set), epoch/train_s; step = epoch from 1."""
    made = {}
    ends = {}
    trained = result.rows[result.rows["phase"] == TRAIN]
    for epoch in result.epochs:
        own = trained[trained["epoch"] == epoch["epoch"] - 1]
        ends[epoch["epoch"]] = 1000 * (own["start"][-1] + own["duration"][-1] + result.unix_minus_clock)
    sources = {"epoch/loss": "loss", "epoch/accuracy": "test_accuracy", "epoch/test_loss": "test_loss"}
    columns = {key: [epoch.get(source) for epoch in result.epochs] for key, source in sources.items()}
    # training alone, since its beginning: what accuracy over time is drawn against
    columns["epoch/train_s"] = list(itertools.accumulate(epoch["train_s"] for epoch in result.epochs))
    if language_model:
        columns["epoch/perplexity"] = [measured.perplexity(epoch) for epoch in result.epochs]
    for key, values in columns.items():
        known = [(e["epoch"], v) for e, v in zip(result.epochs, values, strict=True) if v is not None and np.isfinite(v)]
        if known:
            steps, numbers = map(np.array, zip(*known, strict=True))
            made[key] = Series(steps, numbers, np.array([ends[s] for s in steps]).astype(np.int64))
    return made


def artifacts(state: State) -> list[tuple[Path, str]]:
    """(file, artifact folder): run.json, configuration, raw samples, logs, environment, plot."""
    folder = state.folder
    _environment(state)
    files = [(folder / name, "") for name in ("run.json", "environment.json")]
    files += [(path, "config") for path in sorted((folder / ".hydra").glob("*.yaml"))]
    for make in (_raw_samples, _plot):
        try:
            files += [(path, "") for path in make(state)]
        except Exception as error:  # a library that does not load here must not cost the numbers
            log.exception("an artifact could not be made")
            progress.say(f"  an artifact is missing: {type(error).__name__}: {error}")
    logs = [folder / "train.log", *sorted(folder.glob("worker.*.out")), *sorted(folder.glob("worker.*.err"))]
    logs += sorted(folder.glob("launcher.*"))
    logs += sorted(folder.glob("events.*.jsonl")) + sorted(folder.glob("result.*.json"))
    files += [(_shortened(path), "logs") for path in logs if path.is_file() and path.stat().st_size]
    return [(path, to) for path, to in files if path.is_file()]


def _raw_samples(state: State) -> list[Path]:
    """samples.parquet of all ranks' rows, those of broken files included as far as they are whole."""
    rows, folder = [], state.folder
    for rank in range(int(state.run_json.get("world_size", 0))):
        try:
            rows.append(samples.read(folder / f"samples.{rank}.bin"))
        except samples.SamplesError as error:
            rows.append(error.rows)
    if not any(len(own) for own in rows):
        return []
    samples.write_parquet(rows, folder / "samples.parquet")
    return [folder / "samples.parquet"]


def _plot(state: State) -> list[Path]:
    if state.measured is None or not state.measured.outcome.kind.numbers:
        return []
    from crosstrain import plot

    return [plot.iterations(state.measured, state.spec, state.folder / "iterations.png")]


def _environment(state: State) -> None:
    facts: dict[str, Any] = {"machine": devices.describe_machine()}
    if state.ready is not None:
        facts["interpreter"] = str(state.ready.environment.python)
        facts["environment"] = state.ready.environment.key
    if state.measured is not None:
        facts |= state.measured.facts
    (state.folder / "environment.json").write_text(json.dumps(facts, indent=1, default=str) + "\n")


def _shortened(path: Path) -> Path:
    """The file itself, or for a long one a copy of its beginning and its end."""
    size = path.stat().st_size
    if size <= LOG_HEAD + LOG_TAIL:
        return path
    short = path.with_name(path.name + ".shortened")
    with open(path, "rb") as source, open(short, "wb") as out:
        out.write(source.read(LOG_HEAD))
        out.write(f"\n[… {size - LOG_HEAD - LOG_TAIL} bytes left out …]\n".encode())
        source.seek(size - LOG_TAIL)
        out.write(source.read())
    return short
