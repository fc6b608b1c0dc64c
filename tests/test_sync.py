"""Nothing is lost: `crosstrain sync` after a store that was away, a driver that was killed, an upload that broke off."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import servers
from conftest import PUBLISHED, QUICK, Train, run_folder_in_phase, stored_runs, wait_for, workers_of
from crosstrain import cli
from crosstrain.errors import TrackingError
from crosstrain.tracking import RunRecord, Series, Tracker, driver_identity, journal, preflight
from crosstrain.tracking.identity import host_name

FAKE = ["framework=fake", "data=synthetic", "device=cpu", "threads=1", *QUICK]
NOW = 1_700_000_000_000


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's schema, made once because that takes seconds."""
    folder = tmp_path_factory.mktemp("template")
    preflight.prepare_environment()
    preflight.create_sqlite(folder / "mlflow.db", str(folder / "artifacts"))
    return folder / "mlflow.db"


@pytest.fixture
def here(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A start directory with an empty default store."""
    for key in [key for key in os.environ if key.startswith("MLFLOW_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlruns").mkdir()
    shutil.copy(empty_database, tmp_path / "mlruns" / "mlflow.db")
    return tmp_path


def journalled(here: Path, name: str, **changes: Any) -> Path:
    """The folder of a run that never reached a store."""
    folder = here / "outputs" / "sweep" / name
    folder.mkdir(parents=True)
    (folder / "samples.csv").write_text("iteration,ms\n")
    (folder / "train.log").write_text("began\n")
    steps = np.arange(1500)
    fields = {
        "name": f"lenet-{name}",
        "params": {"network": "lenet", "replicas": "1"},
        "tags": {"kind": "run", "outcome": "ok", "sweep": "s", "crosstrain_run_id": name, "host": host_name(), "driver": driver_identity()},
        "metrics": {"step_ms": 10.0, "samples_per_s": 1 / 3},
        "series": {"iter/ms": Series(steps, steps / 7, NOW + steps), "epoch/loss": Series(steps[:3], steps[:3] / 3, NOW + steps[:3])},
        "status": "FINISHED",
        "start_ms": NOW,
        "end_ms": NOW + 60_000,
        "artifacts": [(folder / "samples.csv", "samples"), (folder / "train.log", "logs")],
    }
    RunRecord(**{**fields, **changes}).save(folder)
    return folder


Sync = Callable[..., tuple[int, str]]


@pytest.fixture
def sync(capsys: pytest.CaptureFixture[str]) -> Sync:
    def call(*arguments: object) -> tuple[int, str]:
        code = cli.main(["sync", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


def process(folder: Path, *arguments: str, code: str = "from crosstrain import cli; import sys; sys.exit(cli.main())") -> Any:
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, timeout=300)


WHOLE = "2/2 params, 2/2 metrics, 4/4 series, 963/963 points, 6/6 tags, 2/2 artifacts"


def test_a_journal_becomes_the_whole_run_and_twice_is_once(here: Path, sync: Sync) -> None:
    folder = journalled(here, "one")
    code, said = sync()
    assert code == 0 and f"outputs/sweep/one: uploaded: {WHOLE}" in said, said
    run_id = stored_runs(here)[0].info.run_id
    assert journal.stored(folder) == journal.Stored(f"sqlite:///{here}/mlruns/mlflow.db", "crosstrain", run_id, complete=True)
    with open(folder / "train.log", "a") as log:  # the driver's log grows
        log.write("ended\n")
    code, said = sync(folder)
    assert code == 0 and f"outputs/sweep/one: was there: {WHOLE}" in said, said
    (run,) = stored_runs(here)
    assert (run.info.run_name, run.info.status, run.info.start_time, run.info.end_time) == ("lenet-one", "FINISHED", NOW, NOW + 60_000)
    assert run.data.params == {"network": "lenet", "replicas": "1"} and run.data.metrics["samples_per_s"] == 1 / 3
    assert run.data.tags["outcome"] == "ok" and json.loads(run.data.tags["driver"])["pid"] == os.getpid()
    tracker = Tracker(None, None, here)
    history = tracker.client.get_metric_history(run.info.run_id, "epoch/loss")
    assert [(point.step, point.value, point.timestamp) for point in history] == [(i, i / 3, NOW + i) for i in range(3)]


SPOILED = {
    "a param": "DELETE FROM params WHERE key = 'network'",
    "a metric": "DELETE FROM latest_metrics WHERE key = 'step_ms'; DELETE FROM metrics WHERE key = 'step_ms'",
    "a tag": "UPDATE tags SET value = 'crashed' WHERE key = 'outcome'",
    "a point": "DELETE FROM metrics WHERE key = 'epoch/loss' AND step = 1",
    "the status": "UPDATE runs SET status = 'RUNNING'",
    "the end": "UPDATE runs SET end_time = NULL",
    "the start of an upload": "DELETE FROM tags WHERE key = 'tracked'",
}


@pytest.mark.parametrize("what", SPOILED)
def test_what_the_store_lacks_is_found_and_completed(here: Path, sync: Sync, what: str) -> None:
    journalled(here, "one")
    assert sync()[0] == 0
    with contextlib.closing(sqlite3.connect(here / "mlruns/mlflow.db")) as connection:
        for statement in SPOILED[what].split(";"):
            assert connection.execute(statement).rowcount == 1
        connection.commit()
    code, said = sync()
    word = "was there" if what == "the start of an upload" else "completed"
    assert code == 0 and f"{word}: {WHOLE}" in said, said
    assert len(stored_runs(here)) == 1


@pytest.mark.parametrize("how", ["gone", "shorter"])
def test_an_artifact_that_the_store_lacks_is_sent_again(here: Path, sync: Sync, how: str) -> None:
    folder = journalled(here, "one")
    sync()
    (there,) = (here / "mlruns/artifacts").rglob("samples.csv")
    there.unlink() if how == "gone" else there.write_text("iter")
    assert sync()[0] == 0 and there.read_text() == "iteration,ms\n"
    there.unlink()
    (folder / "samples.csv").unlink()
    code, said = sync()
    assert code == 1 and "NOT in the store: 2/2 params" in said and "1/2 artifacts" in said and "samples.csv" in said, said
    assert journal.waiting([folder]) == [folder]


def test_a_broken_journal_is_named_and_keeps_no_other_from_the_store(here: Path, sync: Sync) -> None:
    for index, damage in enumerate(["", "{}", '{"name": "half']):
        (journalled(here, f"broken{index}") / "tracking.json").write_text(damage)
    journalled(here, "whole")
    code, said = sync()
    assert code == 1 and said.count("its journal can not be used") == 3 and "1 uploaded, 3 NOT in the store" in said, said
    assert [run.info.run_name for run in stored_runs(here)] == ["lenet-whole"]


def test_a_run_that_was_deleted_on_purpose_stays_deleted(here: Path, sync: Sync) -> None:
    journalled(here, "one")
    sync()
    tracker = Tracker(None, None, here)
    tracker.client.delete_run(stored_runs(here)[0].info.run_id)
    code, said = sync()
    assert code == 0 and "left alone: deleted in the store" in said and stored_runs(here) == [], said


def test_only_one_process_uploads_a_run(here: Path, sync: Sync) -> None:
    folder = journalled(here, "one")
    with journal.held(folder) as mine:
        assert mine
        code, said = sync()
    assert code == 1 and "another process is uploading this run" in said and stored_runs(here) == [], said
    assert sync()[0] == 0


def test_folders_that_are_none(here: Path, sync: Sync) -> None:
    assert sync() == (2, "error: outputs: no such folder; name the folder of a run or of a sweep, or one above them\n")
    code, said = sync(here)
    assert code == 2 and "no run folders in there" in said


def test_a_store_with_a_password_is_named_again(here: Path, sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = journalled(here, "one")
    journal.Stored("http://me:***@127.0.0.1:9", "crosstrain").save(folder)
    code, said = sync()
    assert code == 2 and "name that store with its password" in said
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    code, said = sync()
    assert code == 3 and "connection refused" in said and "secret" not in said
    assert sync("--uri", f"sqlite:///{here}/mlruns/mlflow.db")[0] == 0


def test_an_unfinished_run_is_left_alone_until_its_driver_is_dead(here: Path, sync: Sync) -> None:
    folder = journalled(here, "one", status="RUNNING", series={}, metrics={})
    code, said = sync()
    assert code == 0 and f"left alone: still running on {host_name()}" in said and stored_runs(here) == []
    record = RunRecord.load(folder)
    # on another host only the time tells
    record.tags["host"] = "node7"
    record.save(folder)
    assert "still running on node7" in sync()[1]
    for path in folder.iterdir():
        os.utime(path, (1_700_000_100, 1_700_000_100))
    code, said = sync()
    assert code == 0 and "uploaded" in said, said
    (run,) = stored_runs(here)
    assert (run.info.status, run.data.tags["outcome"], run.data.tags["host"]) == ("KILLED", "interrupted", "node7")
    assert run.info.end_time == 1_700_000_100_000 and "without closing" in run.data.tags["outcome_reason"]


#: ends its own process at the n-th call of one of MLflow's methods, as a kill or Ctrl-C at that moment would
SUICIDE = textwrap.dedent("""
    import os, signal, sys
    from mlflow.tracking import MlflowClient
    name, number, how = sys.argv[1], int(sys.argv[2]), getattr(signal, sys.argv[3])
    original, calls = getattr(MlflowClient, name), []
    def wrapped(*arguments, **options):
        calls.append(name)
        if len(calls) == number:
            os.kill(os.getpid(), how)
        return original(*arguments, **options)
    setattr(MlflowClient, name, wrapped)
    from crosstrain import cli
    sys.exit(cli.main(["sync"]))
""")


@pytest.mark.parametrize("moment", [("log_batch", "1"), ("log_batch", "3"), ("log_artifact", "2"), ("set_terminated", "2")])
def test_a_sync_that_is_killed_is_finished_by_the_next(here: Path, sync: Sync, moment: tuple[str, str]) -> None:
    journalled(here, "one")
    journalled(here, "two")
    killed = process(here, *moment, "SIGKILL", code=SUICIDE)
    assert killed.returncode == -signal.SIGKILL, killed
    code, said = sync()
    assert code == 0 and said.count(WHOLE) == 2, said
    names = sorted((run.info.run_name, run.info.status) for run in stored_runs(here))
    assert names == [("lenet-one", "FINISHED"), ("lenet-two", "FINISHED")]


def test_ctrl_c_is_one_word_and_costs_nothing(here: Path, sync: Sync) -> None:
    journalled(here, "one")
    stopped = process(here, "log_artifact", "1", "SIGINT", code=SUICIDE)
    assert (stopped.returncode, stopped.stderr) == (130, "interrupted\n"), stopped
    assert sync()[0] == 0 and [run.info.status for run in stored_runs(here)] == ["FINISHED"]


def test_a_sweep_without_its_store(train: Train, tmp_path: Path) -> None:
    away = f"tracking.uri=http://127.0.0.1:{servers.free_port()}"
    refused = train(*FAKE, away)
    assert refused.code == 3 and refused.err.count("\n") == 1 and not (tmp_path / "outputs").exists(), refused
    cells = ["-m", *FAKE, "replicas=1,2", "framework.step_ms=1", away, "tracking.required=false", "tracking.report=true"]
    result = train(*cells)
    assert result.code == 0 and [row["outcome"] in PUBLISHED for row in result.outcomes] == [True, True], result
    (sweep,) = {Path(row["folder"]).parent for row in result.outcomes}
    assert f"2 runs are not in the store yet: crosstrain sync {sweep}" in result.out.splitlines(), result
    assert "warning: tracking server" in result.out and "Traceback" not in result.out + result.err
    again = train(*cells, "skip_finished=true")
    assert again.code == 0 and again.out.count("skipped, an ok run with the same key exists") == 2, again

    (tmp_path / "mlruns").mkdir()
    for word in ("2 uploaded", "2 were there"):
        done = process(tmp_path, "sync", str(sweep), "--uri", f"sqlite:///{tmp_path}/mlruns/mlflow.db")
        assert done.returncode == 0 and word in done.stdout, done
        assert (f"crosstrain report {sweep.name}" in done.stdout) == (word == "2 uploaded")
        one, two = sorted(stored_runs(tmp_path), key=lambda run: int(run.data.params["replicas"]))
        assert one.data.metrics["speedup"] == 1
        assert two.data.metrics["speedup"] == pytest.approx(
            two.data.metrics["samples_per_s"] / one.data.metrics["samples_per_s"], rel=2e-3
        )  # fmt: skip
    assert [run.data.tags["host"] for run in (one, two)] == [host_name()] * 2


@pytest.mark.long
def test_a_driver_that_was_killed_without_its_store(start_train: Callable[..., Any], tmp_path: Path) -> None:
    driver = start_train(*FAKE, "framework.step_ms=400", "measure.iterations=400", "tracking=journal")
    folder = wait_for(lambda: run_folder_in_phase(tmp_path, "iteration"), 120, "the iterations")
    busy = process(tmp_path, "sync")
    assert busy.returncode == 0 and "left alone: still running" in busy.stdout, busy
    driver.kill()
    driver.wait()
    wait_for(lambda: not workers_of(folder), what="end of the workers")
    assert process(tmp_path, "sync").returncode == 0
    (run,) = stored_runs(tmp_path)
    assert (run.info.status, run.data.tags["outcome"]) == ("KILLED", "interrupted")
    assert run.data.params["framework"] == "fake" and run.info.start_time < run.info.end_time
    kept = {path.name for path in (tmp_path / "mlruns/artifacts").rglob("*") if path.is_file()}
    assert {"run.json", "config.yaml", "samples.parquet", "events.0.jsonl"} <= kept


@pytest.mark.long
def test_a_server_that_dies_in_mid_sweep(start_train: Callable[..., Any], empty_database: Path, tmp_path: Path) -> None:
    shutil.copy(empty_database, tmp_path / "server.db")
    with servers.on_sqlite(tmp_path) as server:
        server.start()
        cells = ["framework.step_ms=1,250,2", "measure.iterations=20", f"tracking.uri={server.uri}", "tracking.report=true"]
        sweep = start_train("-m", *FAKE, *cells)

        def second() -> Any:
            events = tmp_path.glob("outputs/*/*/001-*/events.0.jsonl")
            return next((path.parent for path in events if '"name": "iteration"' in path.read_text()), None)

        wait_for(second, 120, "second cell")
        server.stop()
        assert sweep.wait(300) == 0, (tmp_path / "stdout.0").read_text()
        said = (tmp_path / "stdout.0").read_text()
        (outcomes,) = tmp_path.glob("outputs/*/*/outcomes.jsonl")
        rows = [json.loads(line) for line in outcomes.read_text().splitlines()]
        assert len(rows) == 3 and all(row["outcome"] in PUBLISHED for row in rows), said
        assert f"2 runs are not in the store yet: crosstrain sync {outcomes.parent}" in said and "Traceback" not in said

        server.start()
        tracker = Tracker(server.uri, None, tmp_path)
        tracker.connect()
        before = {run.run_id: run.status for run in tracker.runs("tags.kind = 'run'")}
        assert sorted(before.values()) == ["FINISHED", "RUNNING"]
        for words in ("1 uploaded, 1 completed, 1 were there", "3 were there"):
            done = process(tmp_path, "sync")
            assert done.returncode == 0 and words in done.stdout, done
        runs = tracker.runs("tags.kind = 'run'")
        assert len(runs) == 3 and set(before) < {run.run_id for run in runs} and {run.status for run in runs} == {"FINISHED"}
        assert {run.metrics["step_ms"] for run in runs} == {float(f"{row['step_ms']:.4g}") for row in rows}


def test_what_a_store_missed_is_brought_in_at_the_end_of_the_sweep(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from crosstrain.sync import missed

    tracker = Tracker(None, None, here)
    tracker.preflight()
    folders = [journalled(here, name) for name in ("one", "two", "elsewhere")]
    for folder in folders[:2]:
        journal.Stored(tracker.uri, tracker.experiment).save(folder)
    missed(folders, {(tracker.uri, tracker.experiment): tracker})
    assert journal.waiting(folders) == folders[2:] and "2 runs that it had missed" in capsys.readouterr().out
    assert sorted(run.info.run_name for run in stored_runs(here)) == ["lenet-one", "lenet-two"]


def test_jobs_of_a_sweep_do_not_share_a_file_over_the_network(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "NETWORK_FILE_SYSTEMS", {preflight.file_system(here)})
    Tracker(None, None, here).preflight()  # the command that starts them
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    with pytest.raises(TrackingError, match="this job keeps its run in its folder"):
        Tracker(None, None, here).preflight()
