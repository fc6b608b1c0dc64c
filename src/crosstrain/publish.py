"""What the store gets of a run: params, tags, summary metrics, series and artifacts, by the names of docs/tracking.md."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import OmegaConf

from crosstrain import certificates, devices, measured, progress, samples
from crosstrain.config import OWN_KEYS
from crosstrain.outcomes import Outcome
from crosstrain.progress import number
from crosstrain.runspec import RunSpec, config_dirs
from crosstrain.tracking import RunRecord, Series, view
from crosstrain.tracking.identity import own_tags
from crosstrain.tracking.preflight import shown as without_password
from crosstrain_worker.record import ITERATION, TRAIN

if TYPE_CHECKING:
    from crosstrain.run import State

log = logging.getLogger(__name__)
#: the status of a record whose run has not ended, or whose driver could not say so
RUNNING = "RUNNING"
#: of `framework.*`: what other params tell, and what is no choice
TOLD = ("name", "python", "version", "compile", "memory_format", "replicas_per_rank", "started_by")
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
        "device": place.kind if place else _device_asked(spec),
        "device_name": place.device_name if place else "",
        "gpus": (place.copies if place.kind == "gpu" else 0) if place else spec.gpus or ("" if spec.device == "auto" else 0),
        "replicas": spec.copies,
        "parallelism": spec.parallelism,
        "scaling": spec.scaling,
        "batch_global": spec.batch_global if numeric else "max",
        "batch_per_replica": spec.batch_per_replica if numeric else "max",
        "precision": spec.precision,
        "compile": framework["compile"],
        "memory_format": framework["memory_format"],
        "framework_settings": framework_settings(framework),
        "threads": place.threads if place else spec.threads or "",
        "optimizer": optimizer["name"],
        "learning_rate": optimizer["learning_rate"],
        "momentum": optimizer["momentum"],
        "weight_decay": optimizer["weight_decay"],
        "epochs": spec.epochs,
        "target_accuracy": "" if spec.target_accuracy is None else spec.target_accuracy,
        "seed": spec.seed,
        "repeat": spec.repeat,
        "measure": spec.measure["name"],
        "study": spec.study,
        "effort": spec.effort,
        "parameters": spec.network.parameter_count,
        "model_gflops": number(spec.network.training_flops / 1e9),
    }
    return {key: str(value) for key, value in values.items()}


def _device_asked(spec: RunSpec) -> str:
    """Before a place is chosen; "" where that would have been found then."""
    return "gpu" if spec.gpus else "" if spec.device == "auto" else spec.device


def framework_settings(framework: Mapping[str, Any]) -> str:
    """Of `framework.*` what no param of its own tells and is not the framework's default: `lstm=scan env.OMP_DYNAMIC=true`."""
    usual = {one.name: one.default for kind in OWN_KEYS for one in fields(kind)}
    files = (folder / "framework" / f"{framework['name']}.yaml" for folder in config_dirs)
    if own := next((path for path in files if path.is_file()), None):
        usual |= dict(OmegaConf.load(own))
    chosen = {key: value for key, value in framework.items() if key not in TOLD and value != usual.get(key)}
    chosen |= {f"env.{name}": value for name, value in sorted(chosen.pop("env", {}).items())}
    return " ".join(key if value is True else f"{key}={'off' if value is False else value}" for key, value in chosen.items())


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
        "overrides": without_password(state.overrides)[:5000],
        "crosstrain_commit": commit(),
        "crosstrain_run_id": state.run_id,
        "nodes": str(state.ready.place.nodes if state.ready else state.spec.nodes or 1),
        **own_tags(),
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


def begun(state: State) -> RunRecord:
    """The record of a run that starts now. A param can not be changed later, so what is not known yet is left out."""
    known = {key: value for key, value in params(state).items() if value}
    start_ms = int(1000 * state.start_s)
    return RunRecord(state.spec.name, known, tags(state), {}, {}, RUNNING, start_ms, start_ms, files(state.folder))


def ended_with_its_driver(record: RunRecord, folder: Path) -> RunRecord:
    """The final record of a run whose driver died (kill -9, a power cut): `record` is that of its begin, `folder` has what it left."""
    run_json = folder / "run.json"
    made = []
    if run_json.is_file():
        made = raw_samples(folder, int(json.loads(run_json.read_text())["world_size"]))
    kept = files(folder)
    last = max((path.stat().st_mtime for path, _ in kept), default=record.start_ms / 1000)
    reason = "the driver process ended without closing this run"
    return replace(
        record,
        tags={**record.tags, "outcome": "interrupted", "outcome_reason": reason},
        status="KILLED",
        end_ms=max(record.start_ms, int(1000 * last)),
        artifacts=kept + [(path, "") for path in made],
    )


def record(state: State, outcome: Outcome, metrics: dict[str, float]) -> RunRecord:
    """Everything that the store gets of this run. Series only where numbers are published; samples and logs always."""
    final = {
        **tags(state),
        "outcome": outcome.name,
        "outcome_reason": outcome.reason[:5000],
        "outcome_phase": outcome.phase,
        "parity": _parity(state),
        view.ORDER: view.order(params(state)["network"], metrics.get("step_ms")),
    }
    if state.batch_search:
        final["batch_search"] = state.batch_search[:5000]
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
    folder, made = state.folder, []
    _environment(state)
    for make in (lambda: raw_samples(folder, int(state.run_json.get("world_size", 0))), lambda: _plot(state)):
        try:
            made += make()
        except Exception as error:  # a library that does not load here must not cost the numbers
            log.exception("an artifact could not be made")
            progress.say(f"  an artifact is missing: {type(error).__name__}: {error}")
    return files(folder) + [(path, "") for path in made]


def files(folder: Path) -> list[tuple[Path, str]]:
    """The artifacts among what a run folder has so far."""
    found = [(folder / name, "") for name in ("run.json", "environment.json")]
    found += [(_public(path), "config") for path in sorted((folder / ".hydra").glob("*.yaml"))]
    logs = [folder / "train.log", *sorted(folder.glob("worker.*.out")), *sorted(folder.glob("worker.*.err"))]
    logs += [folder / "launcher.out", folder / "launcher.err"]
    logs += sorted(folder.glob("events.*.jsonl")) + sorted(folder.glob("result.*.json"))
    found += [(_shortened(path), "logs") for path in logs if path.is_file() and path.stat().st_size]
    return [(path, to) for path, to in found if path.is_file()]


def _public(path: Path) -> Path:
    """The file itself, or a copy without the password that it holds in an address such as tracking.uri."""
    text = path.read_text()
    if without_password(text) == text:
        return path
    copy = path.parent / "without_password" / path.name
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(without_password(text))
    return copy


def raw_samples(folder: Path, world_size: int) -> list[Path]:
    """samples.parquet of all ranks' rows, those of broken files included as far as they are whole."""
    rows = []
    for rank in range(world_size):
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
