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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from crosstrain import (
    ceilings,
    devices,
    guard,
    largest_batch,
    launch,
    leases,
    measured,
    outcomes,
    prepare,
    processes,
    progress,
    publish,
    runspec,
    scaling,
)
from crosstrain.errors import ConfigError, OutcomeError, TrackingError
from crosstrain.outcomes import Outcome
from crosstrain.runspec import RunSpec
from crosstrain.system_samples import SystemSampler
from crosstrain.tracking import RunRecord, Tracker, journal
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
    batch_search: str = ""
    """of batch_size=max: what was tried"""
    untracked: str = ""
    """why it did not get into the store when it began"""
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
    made = _tracker(tracking["uri"], tracking["experiment"], Path.cwd())
    checked_trackers[made.shown_uri, made.experiment] = made
    return made


#: those that this process has checked, by what a run folder says of its store
checked_trackers: dict[tuple[str, str], Tracker] = {}


def check_store(tracking: dict[str, Any]) -> None:
    """Before the first run. Raises TrackingError when the store can not be used, unless tracking.required=false: then says so."""
    if tracking["name"] == "journal":
        return
    try:
        tracker(tracking)
    except TrackingError as error:
        if tracking["required"]:
            raise
        progress.say(f"warning: {error}; the runs are kept in their folders (tracking.required=false)")


#: s, for which a store that was away is not asked again by the same process
AWAY_S = 60.0
_away: dict[str, tuple[float, TrackingError]] = {}


def opened(tracking: dict[str, Any]) -> Tracker:
    """The tracker, also in a process that has not checked the store before. Raises TrackingError."""
    if tracking["name"] == "journal":
        raise TrackingError("tracking=journal asks no store")
    key = json.dumps(tracking, sort_keys=True)
    since, known = _away.get(key, (-math.inf, TrackingError()))
    if time.monotonic() - since < AWAY_S:
        raise known
    try:
        return tracker(tracking)
    except TrackingError as error:
        _away[key] = time.monotonic(), error
        raise


def ui_lines() -> list[str]:
    """How to see the runs of this command."""
    return [f"see them: {command}" for command in sorted({tracking.where_to_look for tracking, _ in stored_runs()})]


def stored_runs() -> list[tuple[Tracker, dict[str, Any]]]:
    """The runs of this command that are in a store, and their rows of outcomes.jsonl. Other processes may have done them."""
    folder = progress.sweep.folder
    if folder is None or not (folder / outcomes.FILE).is_file():
        return []
    found = []
    for row in outcomes.read(folder):
        where = journal.stored(Path(row["folder"]))
        if where is not None and where.complete and (where.uri, where.experiment) in checked_trackers:
            found.append((checked_trackers[where.uri, where.experiment], row))
    return found


def fill_scaling() -> dict[str, dict[str, Any]]:
    """At the end of a command: speed-up and efficiency of its runs, into the store. Returns the rows by MLflow run id."""
    runs = stored_runs()
    try:
        for tracking, row in runs:
            scaling.fill(tracking, [row], progress.sweep.folder.name if progress.sweep.folder else "")
    except TrackingError as error:
        progress.say(f"  speed-up not tracked: {error}")
    return {row["mlflow_run_id"]: row for _, row in runs}


def report() -> None:
    """At the end of a sweep of several runs: its report, into the sweep's folder and the store it was tracked in."""
    from crosstrain.report import command as reports

    folder, runs = progress.sweep.folder, stored_runs()
    trackers = {id(tracking): tracking for tracking, row in runs if row["reported"]}
    if folder is None or len(runs) < 2:
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
        launch.check(spec.launcher, spec.hosts, sweep_folder)
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
            (folder / outcomes.SKIPPED).touch()
            progress.sweep.done += 1
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
    with progress.RunLine(spec.name) as line:
        line.update("preparing")
        if spec.batch_size == "max":
            largest_batch.find(state, line, lease, attend)
            spec = state.spec
        ready = state.ready = prepare.prepare(spec, lambda text: progress.say(f"  {text}"))
        spec = state.spec = prepare.placed(spec, ready.place)
        state.keys = prepare.keys(spec, ready)
        if spec.skip_finished and finished(state):
            progress.say(f"{spec.name}: skipped, an ok run with the same key exists")
            return None
        with lease(ready.place, line) as (gpus, cpus):
            state.run_json = prepare.run_json(spec, ready, state.run_id, state.folder, [gpu.uuid for gpu in gpus], cpus)
            (state.folder / "run.json").write_text(json.dumps(state.run_json, indent=1) + "\n")
            state.start_s = time.time()
            begin_tracking(state)
            kills = oom_kills()
            ended = attend(state, line, gpus)
            state.end_s = time.time()
            return conclude(state, ended, oom_kills() - kills)


def finished(state: State) -> bool:
    """Whether a run with the same key needs no repetition, by the store and by the journals of runs that are not there yet."""
    spec, keys = state.spec, set()
    strict = spec.measure["strict"]
    folders = _journals(Path.cwd())
    try:
        keys = opened(spec.tracking).finished_keys(strict)
        folders = journal.waiting(folders)
    except TrackingError as error:
        if spec.tracking["name"] != "journal":
            progress.say(f"  skip_finished goes by the run folders in outputs/ only: {error}")
    outcomes_ok = [name for name in outcomes.KINDS if Outcome(name).ok(strict)]
    return state.keys["run_key"] in keys | journal.finished_keys(folders, outcomes_ok)


@functools.cache
def _journals(start_dir: Path) -> list[Path]:
    """The run folders that were there when this command began."""
    return journal.find([start_dir / "outputs"])


def begin_tracking(state: State) -> None:
    """Journal first, then the RUNNING run in the store. Trouble with the store never keeps a run from being measured."""
    tracking = state.spec.tracking
    record = publish.begun(state)
    record.save(state.folder)
    meant = Tracker(tracking["uri"], tracking["experiment"], Path.cwd())
    journal.Stored(meant.shown_uri, meant.experiment).save(state.folder)
    try:
        state.mlflow_run_id = opened(tracking).start(record.name, record.params, record.tags, record.start_ms)
        journal.Stored(meant.shown_uri, meant.experiment, state.mlflow_run_id).save(state.folder)
    except TrackingError as error:
        log.exception("the run did not get into the store when it began")
        state.untracked = str(error)
        if tracking["name"] != "journal":
            progress.say(f"  not tracked yet: {error}")


def finish_tracking(state: State, record: RunRecord) -> None:
    """Journal the run that has ended, then the store; while that is away it waits in its folder for `crosstrain sync`."""
    record.save(state.folder)
    where = journal.stored(state.folder)
    assert where is not None
    try:
        tracking = opened(state.spec.tracking)
        with journal.held(state.folder):
            found = None if state.mlflow_run_id else tracking.of_journal(state.run_id)  # an answer that was lost
            state.mlflow_run_id = state.mlflow_run_id or (
                found[0] if found else tracking.start(record.name, record.params, record.tags, record.start_ms)
            )
            tracking.finish(state.mlflow_run_id, record)
            replace(where, run_id=state.mlflow_run_id, complete=True).save(state.folder)
    except TrackingError as error:
        if str(error) != state.untracked:
            log.exception("tracking failed")
            progress.say(f"  not tracked yet: {error}")


@contextlib.contextmanager
def lease(place: prepare.Place, line: progress.RunLine) -> Iterator[tuple[list[Any], list[int] | None]]:
    """The GPUs or CPUs of this run on this machine, for it alone among crosstrain's runs. Waits for them.

    A run on several machines takes all that this one has: so the other machines, where nobody leases, have one run at a time, too.
    """
    several = place.nodes > 1

    def wait(text: str) -> None:
        line.update("waiting")
        progress.say(f"  {text}")

    if place.kind == "gpu":
        with leases.lease_gpus(place.gpus, len(place.gpus) if several else place.copies, wait) as gpus:
            yield gpus[: place.copies_here], None
    else:
        cpus_here = len(devices.logical_cpus())
        with leases.lease_cpus(cpus_here if several else min(cpus_here, place.threads * place.copies), wait) as cpus:
            yield [], cpus if place.pinned and not several else None  # on several machines Slurm pins


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
                launch.stop(run)
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
    assert state.ready is not None
    peak = ceilings.peak_tflops(state.ready.place, state.spec.precision)
    state.measured = measured.compute(files, ended, state.sampler, state.spec, state.run_json, peak)
    return state.measured.outcome


def close(state: State, outcome: Outcome, sweep_folder: Path) -> dict[str, Any]:
    """Track the run, print its line, add it to outcomes.jsonl. Tracking trouble costs the tracking, not the run."""
    spec = state.spec
    state.end_s = state.end_s or time.time()
    strict = spec.measure["strict"]
    metrics = state.measured.metrics if state.measured is not None and outcome.kind.numbers else {}
    try:
        if journal.stored(state.folder) is None:  # it never got so far
            begin_tracking(state)
        finish_tracking(state, publish.record(state, outcome, metrics))
    except Exception as error:  # whatever it is: the run has its outcome, and the sweep goes on
        log.exception("tracking failed")
        progress.say(f"  not tracked: {type(error).__name__}: {error} (everything is in {state.folder})")
    overrides = list(HydraConfig.get().overrides.task)
    row = outcomes.row(
        spec.name, outcome, strict, metrics, state.mlflow_run_id, state.folder, overrides, state.keys, spec.copies
    )  # fmt: skip
    row |= {"reason": outcome.reason, "reported": spec.tracking["report"]}
    outcomes.append(sweep_folder, row)
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


