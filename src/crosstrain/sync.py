"""`crosstrain sync`: bring the runs whose folders are here into the tracking store, and prove that they are there."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from crosstrain import progress, publish, scaling
from crosstrain.errors import ConfigError, TrackingError
from crosstrain.tracking import RunRecord, Tracker, journal
from crosstrain.tracking.identity import host_name, is_alive
from crosstrain.tracking.proof import Proof

log = logging.getLogger(__name__)

#: s without any change in the folder of a run of another host, after which its driver counts as dead
QUIET_S = 3600.0


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "sync",
        help="upload runs that are not in the store yet, from their folders; proves that they are there",
        description="Bring the runs of these folders into the tracking store: what is missing there is uploaded, nothing twice, and what "
        "the store then has is compared with the folder, value by value. May be interrupted and repeated. "
        "Exit code: 0 all are there, 1 some run is not, 2 no such folder, 3 the store can not be used.",
    )
    parser.add_argument("folder", nargs="*", type=Path, help="folders of runs or sweeps, or any folder above them (default: outputs)")
    parser.add_argument("--uri", help="another store than the one that the runs were started with")
    parser.add_argument("--experiment", help="another experiment than the one that they were started with")
    parser.set_defaults(function=_run)


@dataclass
class Done:
    """What became of the runs: how many of each word, sums of what was compared, sweeps that got runs."""

    words: Counter[str] = field(default_factory=Counter)
    wanted: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    sweeps: Counter[str] = field(default_factory=Counter)
    new_in: set[str] = field(default_factory=set)

    def add(self, proof: Proof) -> None:
        self.wanted.update(proof.wanted)
        self.missing.update({kind: len(names) for kind, names in proof.missing.items()})


def _run(arguments: argparse.Namespace) -> int:
    asked = arguments.folder or [Path("outputs")]
    for folder in asked:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; name the folder of a run or of a sweep, or one above them")
    folders = journal.find(asked)
    if not folders:
        raise ConfigError(f"{' '.join(map(str, asked))}: no run folders in there ({journal.RECORD} is what they hold)")
    code = 0
    stores: dict[tuple[str, str], list[Path]] = {}
    for folder in folders:
        stores.setdefault(_store_of(folder, arguments), []).append(folder)
    for (uri, experiment), own in stores.items():
        try:
            code = max(code, _into(Tracker(uri, experiment, Path.cwd()), own))
        except TrackingError as error:
            if len(stores) == 1:
                raise
            progress.say(f"error: {error}")
            code = error.exit_code
    return code


def _store_of(folder: Path, arguments: argparse.Namespace) -> tuple[str, str]:
    """(URI, experiment) of the store that a run belongs to: what the command line says, else what the run was started with."""
    known = journal.stored(folder) or journal.Stored("", "")
    uri = arguments.uri or known.uri
    if ":***@" in uri:  # no password is ever written into a folder
        of_user = os.environ.get("MLFLOW_TRACKING_URI", "")
        if Tracker(of_user or None, None, Path.cwd()).shown_uri != uri:
            raise ConfigError(f"{folder} belongs into {uri}: name that store with its password, by --uri or MLFLOW_TRACKING_URI")
        uri = of_user
    tracker = Tracker(uri or None, arguments.experiment or known.experiment or None, Path.cwd())
    return tracker.uri, tracker.experiment


def _into(tracker: Tracker, folders: Sequence[Path]) -> int:
    """Bring these runs into one store. Returns the exit code; raises TrackingError when the store can not be used (any more)."""
    with progress.working("creating the tracking store" if tracker.is_new else "checking the tracking store"):
        tracker.preflight()
    done = Done()
    with _bar(len(folders)) as step:
        for folder in folders:
            line = _one(tracker, folder, done)
            progress.say(f"{_short(folder)}: {line}")
            step()
        for folder in folders:
            _fill_scaling(tracker, folder)
    return _summary(tracker, done)


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    """A progress bar on a terminal; the value counts a run as done."""
    bar = Progress(
        TextColumn("syncing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=progress.console, transient=True
    )
    with bar if progress.console.is_terminal else nullcontext():
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def _short(folder: Path) -> str:
    here = Path.cwd().resolve()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _one(tracker: Tracker, folder: Path, done: Done) -> str:
    """Bring one run into the store. Returns what became of it, in words. Raises TrackingError when the store went away."""
    try:
        with journal.held(folder) as mine:
            word, proof, reason = _bring(tracker, folder, done) if mine else ("busy", None, "another process is uploading this run")
    except (OSError, ValueError, KeyError, TypeError) as error:
        word, proof, reason = "failed", None, f"its journal can not be used: {type(error).__name__}: {error}"
    except TrackingError as error:
        tracker.preflight()  # raises when it is the store, not this run
        word, proof, reason = "failed", None, str(error)
    done.words[word] += 1
    if proof is not None:
        done.add(proof)
    said = [WORDS[word], proof.words() if proof else "", reason]
    return ": ".join(text for text in said if text)


#: what a run's line begins with
WORDS = {
    "uploaded": "uploaded",
    "completed": "completed",
    "there": "was there",
    "running": "left alone",
    "busy": "left alone",
    "deleted": "left alone",
    "failed": "NOT in the store",
}


def _bring(tracker: Tracker, folder: Path, done: Done) -> tuple[str, Proof | None, str]:
    """(what became of the run, what was compared, reason)."""
    record = RunRecord.load(folder)
    if record.status == publish.RUNNING:
        if _may_run(record, folder):
            return "running", None, f"still running on {record.tags.get('host', 'an unknown host')}"
        record = publish.ended_with_its_driver(record, folder)
        record.save(folder)
    known = tracker.of_journal(record.tags["crosstrain_run_id"])
    if known is not None and known[1]:
        return "deleted", None, f"deleted in the store (mlflow runs restore --run-id {known[0]})"
    word = "uploaded" if known is None else "completed"
    if known is None:
        # while it is uploaded the driver is this process; a store that closes runs of dead drivers must not close this one
        given = {key: value for key, value in record.tags.items() if key != "driver"}
        run_id = tracker.start(record.name, record.params, {**given, "host": host_name()}, record.start_ms)
    else:
        run_id = known[0]
    where = journal.Stored(tracker.shown_uri, tracker.experiment, run_id)
    proof, reason = tracker.compare(run_id, record), ""
    if proof.whole:
        word = "there"
    else:
        where.save(folder)
        try:
            tracker.finish(run_id, record, again=True)
        except TrackingError as error:
            reason = str(error)
        proof = tracker.compare(run_id, record)
    journal.Stored(where.uri, where.experiment, run_id, complete=proof.whole).save(folder)
    sweep = record.tags.get("sweep", "")
    done.sweeps[sweep] += 1
    if word != "there":
        done.new_in.add(sweep)
    return (word, proof, "") if proof.whole else ("failed", proof, reason or f"differs in {proof.lacks()}")


def missed(folders: Sequence[Path], trackers: Mapping[tuple[str, str], Tracker]) -> None:
    """At the end of a command: upload what its stores missed meanwhile, where they answer now. `trackers`: by (URI, experiment)."""
    brought = 0
    for folder in journal.waiting(folders):
        where = journal.stored(folder)
        tracker = trackers.get((where.uri, where.experiment)) if where else None
        if tracker is None:
            continue
        try:
            with journal.held(folder) as mine:
                word, proof, _ = _bring(tracker, folder, Done()) if mine else ("busy", None, "")
        except (TrackingError, OSError, ValueError, KeyError, TypeError):  # `crosstrain sync` tells
            log.exception("%s is still not in the store", folder)
            break
        brought += proof is not None and proof.whole and word != "there"
    if brought:
        progress.say(f"the store has now {brought} run{'s' * (brought > 1)} that it had missed")


def _may_run(record: RunRecord, folder: Path) -> bool:
    """Whether the driver of a run that has not ended may still live."""
    if record.tags.get("host") == host_name():
        return is_alive(record.tags.get("driver", ""))
    return time.time() - max(path.stat().st_mtime for path in folder.iterdir()) < QUIET_S


def _fill_scaling(tracker: Tracker, folder: Path) -> None:
    """Speed-up and efficiency, where the store does not have them yet; known only when the run of one device is there, too."""
    where = journal.stored(folder)
    if where is None or not where.complete:
        return
    record = RunRecord.load(folder)
    row = {
        "replicas": int(record.params["replicas"]),
        **{key: record.metrics.get(key) for key in ("samples_per_s", "step_ms")},
        **{key: record.tags.get(key, "") for key in ("cell_key", "base_key", "alone_key")},
        "mlflow_run_id": where.run_id,
    }
    if row["samples_per_s"] is None:
        return
    scaling.fill(tracker, [row], record.tags.get("sweep", ""), have=tracker.metrics_of(where.run_id))


def _summary(tracker: Tracker, done: Done) -> int:
    """The last lines: how many runs, what was compared, how to make the report. Returns the exit code."""
    total, failed = sum(done.words.values()), done.words["failed"] + done.words["busy"]
    counts = ", ".join(f"{done.words[word]} {text}" for word, text in COUNTED.items() if done.words[word])
    progress.say(f"{total} run{'s' * (total != 1)} in {tracker.shown_uri}, experiment {tracker.experiment}: {counts}")
    if done.wanted:
        total_proof = Proof(dict(done.wanted), {kind: [""] * done.missing[kind] for kind in done.wanted})
        progress.say(f"the store has of their journals: {total_proof.words()}")
    for sweep in sorted(done.new_in):
        if done.sweeps[sweep] > 1:
            store = tracker.ui_command.removeprefix("crosstrain ui")  # the options that name it
            progress.say(f"report: crosstrain report {shlex.quote(sweep)}{store}")
    progress.say(f"see them: {tracker.where_to_look}")
    return 1 if failed else 0


COUNTED = {
    "uploaded": "uploaded",
    "completed": "completed",
    "there": "were there",
    "running": "still running",
    "busy": "being uploaded by another process",
    "deleted": "deleted in the store",
    "failed": "NOT in the store",
}
