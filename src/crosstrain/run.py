"""One run, in order: prepare, lease, start the ranks, watch them, stop what is left, compute, track. Never takes a sweep down."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from crosstrain import devices, guard, launch, leases, measured, outcomes, prepare, processes, progress, publish, runspec, scaling
from crosstrain.errors import ConfigError, OutcomeError, TrackingError
from crosstrain.outcomes import Outcome
from crosstrain.runspec import RunSpec
from crosstrain.system_samples import SystemSampler
from crosstrain.tracking import Tracker
from crosstrain.watch import Ended, Watch

log = logging.getLogger(__name__)


@dataclass
class State:
    """What is known of a run so far; what its record is made of at the end."""

    spec: RunSpec
    folder: Path
    sweep: str
    overrides: str
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    start_s: float = field(default_factory=time.time)
    ready: prepare.Prepared | None = None
    keys: dict[str, str] = field(default_factory=dict)
    run_json: dict[str, Any] = field(default_factory=dict)
    mlflow_run_id: str = ""
    sampler: SystemSampler | None = None
    measured: measured.Measured | None = None
    end_s: float = 0.0


@functools.cache
def _tracker(uri: str | None, experiment: str | None, start_dir: Path) -> Tracker:
    made = Tracker(uri, experiment, start_dir)
    with progress.working("creating the tracking store" if made.is_new else "checking the tracking store"):
        made.preflight()
    return made


def tracker(tracking: dict[str, Any]) -> Tracker:
    """The tracker of a `tracking` group, its store checked once per process. Raises TrackingError."""
    return _tracker(tracking["uri"], tracking["experiment"], Path.cwd())


def ui_lines() -> list[str]:
    """How to see the runs of this command."""
    return [f"see them: {command}" for command in sorted(_used_ui_commands)]


_used_ui_commands: set[str] = set()
#: the runs of this command that are in a store
_stored: list[tuple[Tracker, dict[str, Any]]] = []


def fill_scaling() -> dict[str, dict[str, Any]]:
    """At the end of a command: speed-up and efficiency of its runs, into the store. Returns the rows by MLflow run id."""
    try:
        for tracking, row in _stored:
            scaling.fill(tracking, [row], progress.sweep.folder.name if progress.sweep.folder else "")
    except TrackingError as error:
        progress.say(f"  speed-up not tracked: {error}")
    return {row["mlflow_run_id"]: row for _, row in _stored}


def report() -> None:
    """At the end of a sweep of several runs: its report, into the sweep's folder and the store it was tracked in."""
    from crosstrain.report import command as reports

    folder = progress.sweep.folder
    trackers = {id(tracking): tracking for tracking, row in _stored if row["reported"]}
    if folder is None or len(_stored) < 2:
        return
    for tracking in trackers.values():
        try:
            page = reports.of_sweep(tracking, folder.name, folder)
            progress.say(f"report: {page}")
        except (TrackingError, OSError) as error:
            log.exception("the report failed")
            progress.say(f"  no report: {error}; `crosstrain report {folder.name}` tries again")


def run(config: DictConfig) -> float:
    """Do one run. Returns its median step time in ms, inf when it is not ok; raises nothing but KeyboardInterrupt.

    Called by Hydra (the folders come from its runtime configuration). The outcome is appended to the sweep's outcomes.jsonl.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir).absolute()
    sweep_folder = Path(hydra.sweep.dir).absolute() if hydra.mode == RunMode.MULTIRUN else folder
    progress.sweep.folder = sweep_folder
    try:
        spec = runspec.from_config(config)
    except ConfigError as error:  # only under a sweeper that does not check first
        progress.say(f"error: {error}")
        outcome = Outcome("crashed", "", str(error))
        outcomes.append(sweep_folder, outcomes.row("", outcome, False, {}, "", folder, list(hydra.overrides.task), {}, 1))
        return math.inf
    state = State(spec, folder, sweep_folder.name, " ".join(hydra.overrides.task))
    stopped: KeyboardInterrupt | None = None
    try:
        ended = execute(state)
        if ended is None:
            progress.sweep.total -= 1
            return math.inf
        outcome = ended
    except OutcomeError as error:
        outcome = Outcome(error.outcome, "", error.message, error.hint)
    except KeyboardInterrupt as error:
        stopped = error
        outcome = Outcome("interrupted", "", "stopped by the user" if type(error) is KeyboardInterrupt else "stopped by SIGTERM")
    except Exception as error:
        log.exception("the driver failed")
        outcome = Outcome("crashed", "driver", f"{type(error).__name__}: {error}".splitlines()[0], f"traceback in {folder}/train.log")
    with signals_held():
        row = close(state, outcome, sweep_folder)
    if stopped is not None:
        raise stopped
    return row["step_ms"] if row["ok"] and row["step_ms"] is not None else math.inf


def execute(state: State) -> Outcome | None:
    """Prepare, lease, start, watch, compute. None: skipped, because an ok run with the same key exists."""
    spec = state.spec
    tracking = tracker(spec.tracking)
    with progress.RunLine(spec.name) as line:
        line.update("preparing")
        ready = state.ready = prepare.prepare(spec, lambda text: progress.say(f"  {text}"))
        spec = state.spec = prepare.placed(spec, ready.place)
        state.keys = prepare.keys(spec, ready)
        if spec.skip_finished and state.keys["run_key"] in tracking.finished_keys(spec.measure["strict"]):
            progress.say(f"{spec.name}: skipped, an ok run with the same key exists")
            return None
        with lease(ready.place, line) as (gpus, cpus):
            state.run_json = prepare.run_json(spec, ready, state.run_id, state.folder, [gpu.uuid for gpu in gpus], cpus)
            (state.folder / "run.json").write_text(json.dumps(state.run_json, indent=1) + "\n")
            state.start_s = time.time()
            state.mlflow_run_id = begin_tracking(state, tracking)
            kills = oom_kills()
            ended = attend(state, line, gpus)
            state.end_s = time.time()
            return conclude(state, ended, oom_kills() - kills)


def begin_tracking(state: State, tracking: Tracker) -> str:
    """Create the RUNNING run. A param can not be changed later, so what is not known yet is left out."""
    known = {key: value for key, value in publish.params(state).items() if value}
    return tracking.start(state.spec.name, known, publish.tags(state), int(1000 * state.start_s))


@contextlib.contextmanager
def lease(place: prepare.Place, line: progress.RunLine) -> Iterator[tuple[list[Any], list[int] | None]]:
    """The GPUs or CPUs of this run, for it alone among crosstrain's runs. Waits for them."""

    def wait(text: str) -> None:
        line.update("waiting")
        progress.say(f"  {text}")

    if place.kind == "gpu":
        with leases.lease_gpus(place.gpus, place.copies, wait) as gpus:
            yield gpus, None
    else:
        cpus_here = len(devices.logical_cpus())
        with leases.lease_cpus(min(cpus_here, place.threads * place.copies), wait) as cpus:
            yield [], cpus if place.pinned else None


def attend(state: State, line: progress.RunLine, gpus: list[Any]) -> Ended:
    """Start the ranks and watch them to their end. Whatever happens, afterwards no process of the run is left."""
    spec, run = state.spec, state.run_json
    assert state.ready is not None
    ranks: list[launch.Rank] = []
    with guard.start_guard(state.run_id):
        state.sampler = SystemSampler([], run["cpus"], gpus)
        try:
            ranks += launch.start(run, state.ready.environment, spec.framework["env"])
            state.sampler.watch([rank.pid for rank in ranks])
            watch = Watch(run, ranks, state.sampler, line, spec.measure["timeouts"], spec.timeout_s)
            return watch.until_done()
        finally:
            with signals_held():
                left = processes.stop_all(state.run_id, [rank.pid for rank in ranks], grace_s=2.0)
                for rank in ranks:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        rank.wait(1.0)
                if left:
                    log.error("processes that could not be stopped: %s", left)


def conclude(state: State, ended: Ended, kills: int) -> Outcome:
    """Read what the workers wrote and decide how the run ended."""
    files = measured.read(state.folder, state.run_json)
    failed = measured.failure(files, ended, kills)
    if failed is not None:
        return failed
    assert state.sampler is not None
    state.measured = measured.compute(files, ended, state.sampler, state.spec, state.run_json)
    return state.measured.outcome


def close(state: State, outcome: Outcome, sweep_folder: Path) -> dict[str, Any]:
    """Track the run, print its line, add it to outcomes.jsonl. Tracking trouble costs the tracking, not the run."""
    spec = state.spec
    state.end_s = state.end_s or time.time()
    strict = spec.measure["strict"]
    metrics = state.measured.metrics if state.measured is not None and outcome.kind.numbers else {}
    stored = False
    try:
        tracking = tracker(spec.tracking)
        _used_ui_commands.add(tracking.ui_command)
        if not state.mlflow_run_id:
            state.mlflow_run_id = begin_tracking(state, tracking)
        record = publish.record(state, outcome, metrics)
        record.save(state.folder)
        tracking.finish(state.mlflow_run_id, record)
        stored = True
    except Exception as error:  # whatever it is: the run has its outcome, and the sweep goes on
        log.exception("tracking failed")
        words = error if isinstance(error, TrackingError) else f"{type(error).__name__}: {error}"
        progress.say(f"  not tracked: {words} (everything is in {state.folder})")
    overrides = list(HydraConfig.get().overrides.task)
    row = outcomes.row(
        spec.name, outcome, strict, metrics, state.mlflow_run_id, state.folder, overrides, state.keys, spec.copies
    )  # fmt: skip
    row["reason"] = outcome.reason
    outcomes.append(sweep_folder, row)
    if stored:
        _stored.append((tracking, {**row, "reported": spec.tracking["report"]}))
    progress.sweep.done += 1
    progress.say(progress.result_line(row))
    log.info("outcome %s", json.dumps(row))
    return row


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block is done: cleaning up is short and must not be cut short."""
    held = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def oom_kills() -> int:
    """How many processes the kernel has killed for memory since boot (0 where it does not tell)."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as source:
        for line in source:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


