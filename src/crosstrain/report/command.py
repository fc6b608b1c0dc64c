"""`crosstrain report`: the report of a sweep, as files and as a run of MLflow; also made by itself at the end of a sweep."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from crosstrain import progress
from crosstrain.errors import ConfigError
from crosstrain.report.cells import measured
from crosstrain.tracking.series import RunRecord
from crosstrain.tracking.store import TrackedRun, Tracker
from crosstrain.tracking.view import store_arguments, tracker_of


def add_command(commands: Any) -> None:
    parser = commands.add_parser("report", parents=[store_arguments()], help="tables and figures of a sweep, as files and in the store")
    parser.add_argument("sweep", nargs="*", help="names of sweeps, as in `crosstrain list` (default: the newest)")
    parser.add_argument("--study", help="all runs of this study instead")
    parser.add_argument("--all", action="store_true", help="all runs of the experiment instead")
    parser.add_argument("--to", type=Path, metavar="DIR", help="write the files here")
    parser.add_argument("--no-upload", action="store_true", help="do not add a report run to the store")
    parser.set_defaults(function=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.no_upload and arguments.to is None:
        raise ConfigError("--no-upload: without --to DIR nothing would be kept")
    tracker = tracker_of(arguments)
    tracker.connect()
    title, runs = _chosen(arguments, tracker)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.to or Path(temporary)
        try:
            files = _write(title, runs, tracker, folder)
        except OSError as error:
            raise ConfigError(f"--to {folder}: {error.strerror}") from error
        if arguments.to is not None:
            progress.say(f"{arguments.to}: {len(files)} files; read {files[0].name} or open {files[1].name}")
        if not arguments.no_upload:
            sweeps = sorted({run.tags.get("sweep", "") for run in runs})
            run_id = _upload(files, runs, tracker, sweeps[0] if len(sweeps) == 1 else title)
            progress.say(f"report run {run_id} is in the store; {tracker.ui_command} shows it")
    return 0


def _chosen(arguments: argparse.Namespace, tracker: Tracker) -> tuple[str, list[TrackedRun]]:
    """(title, runs) of what was asked for. Raises ConfigError where there is nothing."""
    if arguments.all or arguments.study:
        runs = tracker.runs("tags.study = '{}'".format(arguments.study.replace("'", "")) if arguments.study else "")
        title = f"Study {arguments.study}" if arguments.study else f"All runs of experiment {tracker.experiment}"
    else:
        sweeps = arguments.sweep or [tracker.newest_sweep() or ""]
        runs = [run for sweep in sweeps for run in tracker.runs_of_sweep(sweep.replace("'", ""))]
        title = "Sweep " + ", ".join(sweeps)
    runs = measured(runs)
    if not runs:
        what = arguments.study or " ".join(arguments.sweep) or "the experiment"
        raise ConfigError(f"{what}: there are no runs; crosstrain list shows what is in the store")
    return title, runs


def _upload(files: list[Path], runs: list[TrackedRun], tracker: Tracker, sweep: str) -> str:
    """Add these files as a run with kind=report. Returns its id."""
    now = int(1000 * time.time())
    tags = {"kind": "report", "sweep": sweep, "study": next((run.tags["study"] for run in runs if run.tags.get("study")), "")}
    name = f"report {sweep}"
    run_id = tracker.start(name, {}, tags, now)
    # pictures beside report.md, which names them
    artifacts = [(path, "tables" if path.suffix in (".csv", ".tex") else "") for path in files]
    tracker.finish(run_id, RunRecord(name, {}, tags, {}, {}, "FINISHED", now, int(1000 * time.time()), artifacts))
    return run_id


def of_sweep(tracker: Tracker, sweep: str, folder: Path) -> Path:
    """At the end of a sweep: its report in `folder`/report and in the store. Returns report.html. Raises TrackingError, OSError."""
    runs = tracker.runs_of_sweep(sweep)
    files = _write(f"Sweep {sweep}", runs, tracker, folder / "report")
    _upload(files, runs, tracker, sweep)
    return files[1]


def _write(title: str, runs: list[TrackedRun], tracker: Tracker, folder: Path) -> list[Path]:
    # matplotlib costs a second
    from crosstrain.report import build

    with progress.working("writing the report"):
        return build.write(build.of_runs(title, runs, tracker), folder)
