"""The tracking store: real SQLite files, a real `mlflow server`, real dead drivers and deaf servers."""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from crosstrain.errors import ConfigError, CrosstrainError, TrackingError
from crosstrain.tracking import RunRecord, Series, Tracker, driver_identity, is_alive, preflight, store, view
from crosstrain.tracking.series import BUCKETS, COMPLETE_POINTS, thin
from servers import free_port

SOURCES = str(Path(store.__file__).parents[2])
NOW = 1_800_000_000_000


@pytest.fixture(autouse=True)
def no_user_settings(monkeypatch):
    for key in [key for key in os.environ if key.startswith("MLFLOW_")]:
        monkeypatch.delenv(key)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory) -> Path:
    """A database with MLflow's schema, made once because that takes seconds."""
    folder = tmp_path_factory.mktemp("template")
    preflight.prepare_environment()
    preflight.create_sqlite(folder / "mlflow.db", str(folder / "artifacts"))
    return folder / "mlflow.db"


@pytest.fixture
def tracker(tmp_path, empty_database) -> Tracker:
    (tmp_path / "mlruns").mkdir()
    shutil.copy(empty_database, tmp_path / "mlruns" / "mlflow.db")
    tracker = Tracker(None, None, tmp_path)
    tracker.preflight()
    return tracker


@pytest.fixture
def processes():
    """Start Python code in a process of its own; all are killed at the end."""
    started: list[subprocess.Popen] = []

    def start(*command: str, **options) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": SOURCES, "MLFLOW_DISABLE_TELEMETRY": "true", **options.pop("env", {})}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
        started.append(subprocess.Popen([sys.executable, *command], env=environment, start_new_session=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def series(n: int, value=lambda i: float(i)) -> Series:
    steps = np.arange(n)
    return Series(steps, np.array([value(i) for i in steps]), NOW + steps)


def record(outcome: str = "ok", **changes) -> RunRecord:
    status = {"ok": "FINISHED", "unstable": "FINISHED", "contaminated": "FINISHED", "interrupted": "KILLED"}
    fields = {
        "name": "lenet-fake-1gpu",
        "params": {"network": "lenet"},
        "tags": {"kind": "run", "outcome": outcome},
        "metrics": {"step_ms": 10.0},
        "series": {},
        "status": status.get(outcome, "FAILED"),
        "start_ms": NOW,
        "end_ms": NOW + 60_000,
    }
    return RunRecord(**{**fields, **changes})


def refusal(uri: str, start_dir: Path) -> str:
    """The one line that the preflight says, which must come within 15 s (plus what importing MLflow may cost here)."""
    import mlflow.tracking  # noqa: F401

    begin = time.monotonic()
    with pytest.raises(TrackingError) as caught:
        Tracker(uri, None, start_dir).preflight()
    assert time.monotonic() - begin < 17
    line = str(caught.value)
    assert "\n" not in line and len(line) < 500
    return line


# -- plain data --------------------------------------------------------------------------------------------------------------
def test_importing_the_package_does_not_import_mlflow(processes):
    process = processes("-c", "import sys, crosstrain.tracking.view; sys.exit('mlflow' in sys.modules)")
    assert process.wait() == 0


def test_a_short_series_stays_complete():
    points = thin("iter/ms", series(COMPLETE_POINTS))
    assert list(points) == ["iter/ms"]
    assert points["iter/ms"].steps.tolist() == list(range(COMPLETE_POINTS))


def test_a_long_series_keeps_its_spike_and_its_level():
    points = thin("iter/ms", series(20_000, lambda i: 500.0 if i == 12_345 else 10.0 + (i % 2)))
    assert set(points) == {"iter/ms", "iter/ms_min", "iter/ms_max"}
    assert all(len(p.steps) == BUCKETS for p in points.values())
    assert points["iter/ms_max"].values.max() == 500.0
    assert points["iter/ms"].values.max() <= 11.0 and points["iter/ms_min"].values.tolist() == [10.0] * BUCKETS
    bucket = int(points["iter/ms_max"].values.argmax())
    assert points["iter/ms_max"].steps[bucket] <= 12_345 < points["iter/ms_max"].steps[bucket + 1]
    assert points["iter/ms"].times_ms[0] == NOW and points["iter/ms"].steps[0] == 0


def test_points_that_are_not_finite_are_left_out():
    points = thin("iter/loss", series(4, lambda i: [1.0, math.nan, math.inf, 2.0][i]))
    assert points["iter/loss"].steps.tolist() == [0, 3]
    assert thin("iter/loss", series(3, lambda i: math.nan)) == {}


def test_series_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="one length"):
        Series(np.arange(3), np.zeros(2), np.arange(3))


def test_the_journal_reads_back_after_the_folder_was_moved(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "samples.csv").write_text("1")
    elsewhere = tmp_path / "plot.png"
    before = record(
        metrics={"step_ms": 1 / 3, "loss": math.nan},
        series={"iter/ms": series(5), "iter/loss": series(2000)},
        artifacts=[(folder / "samples.csv", "samples"), (elsewhere, "")],
    )
    before.save(folder)
    moved = folder.rename(tmp_path / "moved")
    after = RunRecord.load(moved)
    assert after.metrics["step_ms"] == 1 / 3 and math.isnan(after.metrics["loss"])
    assert after.artifacts == [(moved / "samples.csv", "samples"), (elsewhere, "")]
    assert (after.params, after.tags, after.status, after.end_ms) == (before.params, before.tags, before.status, before.end_ms)
    for key in before.series:
        np.testing.assert_array_equal(after.series[key].values, before.series[key].values)
        np.testing.assert_array_equal(after.series[key].times_ms, before.series[key].times_ms)
    with pytest.raises(FileNotFoundError):
        RunRecord.load(tmp_path)


# -- who drives ------------------------------------------------------------------------------------------------------------------
def test_a_driver_is_alive_until_it_ends(processes):
    process = processes("-c", "import time; time.sleep(60)")
    identity = driver_identity(process.pid)
    assert is_alive(identity) and is_alive(driver_identity())
    process.kill()
    for _ in range(100):  # first a zombie, which is dead as well
        if not is_alive(identity):
            break
        time.sleep(0.05)
    assert not is_alive(identity)


def test_a_reused_pid_and_another_boot_are_dead_and_doubt_is_alive():
    mine = json.loads(driver_identity())
    assert not is_alive(json.dumps({**mine, "start": mine["start"] - 1}))
    assert not is_alive(json.dumps({**mine, "boot": "another"}))
    assert is_alive(json.dumps({**mine, "namespace": "pid:[1]", "pid": 2**30}))
    assert is_alive("") and is_alive("{}") and is_alive("[1]")


# -- which store ------------------------------------------------------------------------------------------------------------------
def test_configuration_before_environment_before_default(tmp_path, monkeypatch):
    default = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    assert Tracker(None, None, tmp_path).uri == default and Tracker("", "", tmp_path).experiment == "crosstrain"
    assert Tracker(None, None, tmp_path).ui_command == "crosstrain ui"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://team:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    of_environment = Tracker(None, None, tmp_path)
    assert (of_environment.uri, of_environment.experiment) == ("http://team:5000", "theirs")
    assert of_environment.ui_command == "crosstrain ui --uri 'http://team:5000' --experiment 'theirs'"
    assert Tracker("http://own:1", "mine", tmp_path).uri == "http://own:1"
    assert Tracker("http://own:1", "mine", tmp_path).experiment == "mine"


def test_a_relative_sqlite_path_is_meant_from_the_start_directory(tmp_path):
    assert Tracker("sqlite:///a/b.db", None, tmp_path).uri == f"sqlite:///{tmp_path}/a/b.db"
    assert Tracker("sqlite:////a/b.db", None, tmp_path).uri == "sqlite:////a/b.db"


def test_user_settings_survive_the_preflight(tmp_path, monkeypatch, tracker):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    Tracker(None, None, tmp_path).preflight()
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"


# -- a run ----------------------------------------------------------------------------------------------------------------------
def test_a_run_arrives_whole(tracker, tmp_path):
    (tmp_path / "samples.csv").write_text("iteration,ms\n")
    run_id = tracker.start("lenet-fake-1gpu", {"network": "lenet", "gpus": "1"}, {"sweep": "s1"}, NOW)
    running = tracker.client.get_run(run_id)
    assert running.info.status == "RUNNING" and running.info.run_name == "lenet-fake-1gpu"
    assert running.info.start_time == NOW and running.data.params == {"network": "lenet", "gpus": "1"}
    assert is_alive(running.data.tags["driver"]) and running.data.tags["host"] == socket.gethostname()
    assert running.data.tags["mlflow.source.type"] == "LOCAL" and running.data.tags["mlflow.user"]

    result = record(
        params={"network": "lenet", "device_name": "none"},
        metrics={"step_ms": 12.5, "accuracy": math.nan, "loss": math.inf, "speedup": None},
        series={"iter/ms": series(3000), "iter/loss": series(3, lambda i: [1.0, math.nan, -math.inf][i])},
        artifacts=[(tmp_path / "samples.csv", "samples")],
    )
    tracker.finish(run_id, result)
    run = tracker.client.get_run(run_id)
    assert (run.info.status, run.info.end_time) == ("FINISHED", NOW + 60_000)
    assert run.data.params == {"network": "lenet", "gpus": "1", "device_name": "none"}
    assert run.data.metrics["step_ms"] == 12.5
    assert not {"accuracy", "loss", "speedup"} & set(run.data.metrics)
    assert run.data.tags["outcome"] == "ok" and run.data.tags["sweep"] == "s1"
    assert len(tracker.client.get_metric_history(run_id, "iter/ms_max")) == BUCKETS
    assert [m.step for m in tracker.client.get_metric_history(run_id, "iter/loss")] == [0]
    assert [a.path for a in tracker.client.list_artifacts(run_id, "samples")] == ["samples/samples.csv"]
    assert (tmp_path / "mlruns/artifacts/crosstrain" / run_id / "artifacts/samples/samples.csv").exists()
    with contextlib.closing(sqlite3.connect(tmp_path / "mlruns/mlflow.db")) as connection:
        assert connection.execute("SELECT count(*) FROM metrics WHERE is_nan OR abs(value) > 1e300").fetchone() == (0,)


def test_a_second_upload_changes_nothing_and_the_first_may_have_broken_off(tracker, tmp_path):
    late = tmp_path / "late.txt"
    result = record(series={"iter/ms": series(2500)}, artifacts=[(late, "")])
    run_id = tracker.start("x", {}, {}, NOW)
    with pytest.raises(TrackingError, match=r"late\.txt"):
        tracker.finish(run_id, result)
    assert tracker.client.get_run(run_id).info.status == "FINISHED"
    assert tracker.client.list_artifacts(run_id) == []
    late.write_text("here")
    for _ in range(2):
        tracker.finish(run_id, result)
        assert len(tracker.client.get_metric_history(run_id, "iter/ms")) == BUCKETS
        assert len(tracker.client.get_metric_history(run_id, "step_ms")) == 1
        assert [a.path for a in tracker.client.list_artifacts(run_id)] == ["late.txt"]


def test_mlflows_limits_are_kept(tracker):
    params = {f"framework.option_{i}": "v" for i in range(150)} | {"a=b,c": "x" * 9000}
    tags = {f"t{i}": "v" for i in range(150)} | {"overrides": "y" * 9000}
    run_id = tracker.start("x", params, {}, NOW)
    tracker.finish(run_id, record(params=params, tags=tags, metrics={f"m{i}": 1.0 for i in range(1200)}))
    data = tracker.client.get_run(run_id).data
    assert len(data.params) == 151 and data.params["a_b_c"] == "x" * 6000
    assert data.tags["t149"] == "v" and data.tags["overrides"] == "y" * 8000
    assert len(data.metrics) == 1200


def test_a_param_that_changed_is_told_as_a_tag(tracker):
    run_id = tracker.start("x", {"framework_version": "unknown"}, {}, NOW)
    tracker.finish(run_id, record(params={"framework_version": "2.13.0"}))
    data = tracker.client.get_run(run_id).data
    assert data.params["framework_version"] == "unknown" and data.tags["param_now.framework_version"] == "2.13.0"


def test_finished_keys(tracker, monkeypatch):
    monkeypatch.setattr(store, "_PAGE", 2)
    ids = {}
    for outcome in ("ok", "unstable", "contaminated", "crashed", "interrupted"):
        for index in range(3):
            key = f"{outcome}{index}"
            ids[key] = tracker.start(key, {}, {"run_key": key, "sweep": f"s{index}"}, NOW + index)
            tracker.finish(ids[key], record(outcome))
    tracker.client.delete_run(ids["ok2"])
    running = tracker.start("half", {}, {"run_key": "half", "outcome": "ok"}, NOW)
    published = {"ok0", "ok1"} | {f"{outcome}{i}" for outcome in ("unstable", "contaminated") for i in range(3)}
    assert tracker.finished_keys() == published
    assert tracker.finished_keys(strict=True) == {"ok0", "ok1"}
    assert {run.tags["run_key"] for run in tracker.runs_of_sweep("s1")} == {key for key in ids if key.endswith("1")}
    assert tracker.find_run("run_key", "half") == running and tracker.find_run("run_key", "nowhere") is None
    assert len(tracker.latest_runs(5)) == 5


def test_metrics_and_tags_that_are_known_later(tracker):
    run_id = tracker.start("x", {}, {"sweep": "s"}, NOW)
    tracker.finish(run_id, record())
    tracker.log_metrics(run_id, {"speedup": 1.9, "efficiency": math.nan})
    tracker.set_tag(run_id, "base_key", "abc")
    (run,) = tracker.runs_of_sweep("s")
    assert run.metrics == {"step_ms": 10.0, "speedup": 1.9} and run.tags["base_key"] == "abc" and run.status == "FINISHED"


# -- dead drivers, many drivers ------------------------------------------------------------------------------------------------
DRIVER = textwrap.dedent("""
    import sys, time, pathlib
    from crosstrain.tracking import Tracker
    tracker = Tracker(None, None, pathlib.Path(sys.argv[1]))
    tracker.preflight()
    run_id = tracker.start(sys.argv[2], {"network": "lenet"}, {"kind": "run"}, int(time.time() * 1000))
    print(run_id, flush=True)
    if sys.argv[3] == "finish":
        from crosstrain.tracking import RunRecord
        tracker.finish(run_id, RunRecord(sys.argv[2], {}, {"outcome": "ok"}, {"step_ms": 1.0}, {}, "FINISHED", 0, 1))
    else:
        time.sleep(600)
""")


def test_runs_of_dead_drivers_are_closed_and_others_left_alone(tracker, tmp_path, processes):
    drivers = [processes("-c", DRIVER, str(tmp_path), name, "wait") for name in ("dead", "alive")]
    dead, alive = (driver.stdout.readline().strip() for driver in drivers)
    foreign = tracker.start("foreign", {}, {"host": "another", "driver": json.dumps({"boot": "other"})}, NOW)
    drivers[0].kill()
    drivers[0].wait()
    next_start = Tracker(None, None, tmp_path)
    next_start.preflight()
    run = tracker.client.get_run(dead)
    assert run.info.status == "KILLED" and run.info.end_time
    assert run.data.tags["outcome"] == "interrupted" and "driver" in run.data.tags["outcome_reason"]
    for other in (alive, foreign):
        assert tracker.client.get_run(other).info.status == "RUNNING"
    # the journal of a run that was closed this way still wins
    next_start.finish(dead, record())
    run = tracker.client.get_run(dead)
    assert (run.info.status, run.data.tags["outcome"], run.data.tags["outcome_reason"]) == ("FINISHED", "ok", "")


def test_four_drivers_at_once_on_a_fresh_checkout(tmp_path, processes):
    drivers = [processes("-c", DRIVER, str(tmp_path), f"run{i}", "finish") for i in range(4)]
    words = [driver.communicate(timeout=240)[0] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0] * 4, words
    tracker = Tracker(None, None, tmp_path)
    tracker.connect()
    assert sorted((run.name, run.status) for run in tracker.latest_runs(10)) == [(f"run{i}", "FINISHED") for i in range(4)]
    assert [line for line in "".join(words).splitlines() if len(line) != 32] == []  # no log noise beside the run ids


def test_a_kill_while_the_store_is_created_leaves_no_broken_store(tmp_path, processes):
    driver = processes("-c", DRIVER, str(tmp_path), "x", "wait")
    end = time.monotonic() + 60
    while not list((tmp_path / "mlruns").glob("*.new")) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.3)
    driver.kill()
    driver.wait()
    assert not (tmp_path / "mlruns/mlflow.db").exists()
    Tracker(None, None, tmp_path).preflight()


# -- stores that can not be used ----------------------------------------------------------------------------------------------
def test_an_old_file_store_in_the_way_does_not_matter(tmp_path, monkeypatch):
    old = tmp_path / "mlruns" / "0" / "meta.yaml"
    old.parent.mkdir(parents=True)
    old.write_text("name: Default\n")
    monkeypatch.chdir(tmp_path)
    tracker = Tracker(None, None, tmp_path)
    assert tracker.is_new
    tracker.preflight()
    assert not tracker.is_new
    tracker.finish(tracker.start("x", {}, {}, NOW), record())
    assert [run.status for run in tracker.latest_runs(5)] == ["FINISHED"]
    assert sorted(path.name for path in (tmp_path / "mlruns").iterdir()) == ["0", "mlflow.db", "mlflow.db.lock"]
    assert [path.name for path in old.parent.iterdir()] == ["meta.yaml"]


@pytest.mark.parametrize("uri", ["./mlruns", "file:///data/mlruns", "mlruns"])
def test_a_file_store_is_refused_with_the_way_out(uri, tmp_path):
    folder = uri.removeprefix("file://")
    assert f"mlflow migrate-filestore --source {folder} --target sqlite:///{tmp_path}/mlruns/mlflow.db" in refusal(uri, tmp_path)


def test_addresses_that_name_no_store(tmp_path):
    assert "write sqlite:///runs/mlflow.db" in refusal("runs/mlflow.db", tmp_path)
    assert "unknown scheme ftp" in refusal("ftp://host/x", tmp_path)
    assert "names no file" in refusal("sqlite://", tmp_path)
    assert "names no file" in refusal("sqlite:///:memory:", tmp_path)
    assert "names no host" in refusal("http://", tmp_path)


def test_sqlite_folder_missing_or_not_writable(tmp_path):
    assert f"the folder {tmp_path}/no/where does not exist" in refusal("sqlite:///no/where/mlflow.db", tmp_path)
    assert "/proc can not be written" in refusal("sqlite:////proc/mlflow.db", tmp_path)


def database_with(tmp_path: Path, template: Path, statement: str) -> str:
    shutil.copy(template, tmp_path / "x.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "x.db")) as connection:
        connection.execute(statement)
        connection.commit()
    return f"sqlite:///{tmp_path}/x.db"


def test_an_old_schema_names_the_upgrade_and_is_left_as_it_is(tmp_path, empty_database):
    uri = database_with(tmp_path, empty_database, "UPDATE alembic_version SET version_num = '90e64c465722'")
    # what an old schema lacks; MLflow itself would migrate it unasked
    with contextlib.closing(sqlite3.connect(tmp_path / "x.db")) as connection:
        connection.execute("DROP TABLE webhooks")
        connection.commit()
    before = (tmp_path / "x.db").read_bytes()
    assert f"`mlflow db upgrade {uri}`" in refusal(uri, tmp_path)
    assert (tmp_path / "x.db").read_bytes() == before


def test_corrupt_and_foreign_databases(tmp_path, empty_database):
    uri = f"sqlite:///{tmp_path}/x.db"
    (tmp_path / "x.db").write_text("no database at all")
    assert "corrupt" in refusal(uri, tmp_path)
    (tmp_path / "x.db").write_bytes(empty_database.read_bytes()[:5000])
    assert "corrupt" in refusal(uri, tmp_path)
    (tmp_path / "x.db").unlink()
    with contextlib.closing(sqlite3.connect(tmp_path / "x.db")) as connection:
        connection.execute("CREATE TABLE photographs (name TEXT)")
    assert "another program" in refusal(uri, tmp_path)


def test_a_database_that_stays_locked(tracker, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "ANSWER_S", 0.2)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlruns/mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert "database is locked" in refusal(tracker.uri, tmp_path)


def test_a_deleted_experiment_names_the_way_back(tracker, tmp_path):
    tracker.client.delete_experiment(tracker.experiment_id)
    assert f"mlflow experiments restore -x {tracker.experiment_id}" in refusal(tracker.uri, tmp_path)


def test_hosts_can_not_share_a_store_on_a_network_file_system(tracker, tmp_path, monkeypatch):
    recent = int(time.time() * 1000)
    foreign = tracker.start("x", {}, {"host": "node7"}, recent)
    tracker.preflight()  # on a local disk that run is somebody else's business
    monkeypatch.setattr(preflight, "NETWORK_FILE_SYSTEMS", {preflight.file_system(tmp_path)})
    assert "node7" in refusal(tracker.uri, tmp_path)
    tracker.client.set_terminated(foreign)
    tracker.start("forgotten", {}, {"host": "node8"}, recent - 2 * 24 * 3600 * 1000)
    tracker.preflight()


def test_the_file_system_is_that_of_the_innermost_mount():
    assert preflight.file_system(Path("/proc/self")) == "proc"


def test_a_missing_database_driver_is_named(tmp_path):
    line = refusal("postgresql://me:secret@127.0.0.1/mlflow", tmp_path)
    assert "pip install 'psycopg[binary]'" in line and "secret" not in line and "me:***@" in line


def test_a_view_that_can_not_be_written_fails_nothing(tracker, monkeypatch):
    monkeypatch.setattr(store, "view_tags", lambda: {"illegal\nkey": "x"})
    tracker.preflight()
    tracker.finish(tracker.start("x", {}, {}, NOW), record())


# -- servers --------------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def web_server(status: int, body: str):
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (401, "who are you", "MLFLOW_TRACKING_USERNAME"),
        (403, "no", "denies access (403)"),
        (403, "Invalid Host header - possible DNS rebinding attack detected", "--allowed-hosts 127.0.0.1:"),
        (404, "nothing here", "no MLflow server (404"),
        (200, "<html>log in please</html>", "no MLflow server (no JSON"),
        (500, "database gone", "HTTP 500"),
    ],
)
def test_what_a_server_answers_is_explained(status, body, expected, tmp_path):
    with web_server(status, body) as uri:
        assert expected in refusal(uri, tmp_path)


def test_nobody_answers(tmp_path):
    assert "connection refused" in refusal(f"http://127.0.0.1:{free_port()}", tmp_path)
    assert "host name nosuchhost.invalid is unknown" in refusal("http://nosuchhost.invalid:5000", tmp_path)


def test_a_server_that_accepts_and_never_answers(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        assert "time-out" in refusal(f"http://127.0.0.1:{deaf.getsockname()[1]}", tmp_path)


def test_something_that_speaks_no_http(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def babble():
            connection, _ = listener.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            connection.close()

        threading.Thread(target=babble, daemon=True).start()
        assert "not HTTP" in refusal(f"http://127.0.0.1:{listener.getsockname()[1]}", tmp_path)


def test_an_action_that_hangs_is_given_up():
    begin = time.monotonic()
    with pytest.raises(TrackingError, match=r"no answer within 0\.2 s"):
        preflight.within(0.2, lambda: time.sleep(30), "the store")
    assert time.monotonic() - begin < 5
    assert preflight.within(5, lambda: 7, "the store") == 7
    with pytest.raises(ZeroDivisionError):
        preflight.within(5, lambda: 1 // 0, "the store")


def start_server(processes, folder: Path, port: int) -> subprocess.Popen:
    server = processes(
        "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/server.db", "--workers", "1",
        "--artifacts-destination", f"{folder}/artifacts", "--host", "0.0.0.0", "--port", str(port),
        "--allowed-hosts", f"127.0.0.1:{port}", stdout=subprocess.DEVNULL, cwd=folder,
    )  # fmt: skip
    end = time.monotonic() + 240
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return server
        time.sleep(0.2)
    raise AssertionError("mlflow server did not start")


@pytest.mark.long
def test_a_team_server_its_outage_and_its_return(tmp_path, empty_database, processes):
    shutil.copy(empty_database, tmp_path / "server.db")
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    server = start_server(processes, tmp_path, port)
    assert f"--allowed-hosts 127.0.0.2:{port}" in refusal(f"http://127.0.0.2:{port}", tmp_path)

    tracker = Tracker(uri, "team", tmp_path)
    tracker.preflight()
    (tmp_path / "samples.csv").write_text("1")
    result = record(series={"iter/ms": series(1500)}, artifacts=[(tmp_path / "samples.csv", "samples")])
    first = tracker.start("first", {"network": "lenet"}, {"run_key": "k1"}, NOW)
    tracker.finish(first, result)
    assert tracker.finished_keys() == {"k1"}
    assert [a.path for a in tracker.client.list_artifacts(first, "samples")] == ["samples/samples.csv"]
    assert tracker.ui_url() == tracker.where_to_look == view.page_url(uri, tracker.experiment_id)
    second = tracker.start("second", {}, {"run_key": "k2"}, NOW)

    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    begin = time.monotonic()
    with pytest.raises(TrackingError):
        tracker.finish(second, result)
    with pytest.raises(TrackingError, match="connection refused"):
        tracker.start("third", {}, {}, NOW)
    assert time.monotonic() - begin < 30

    start_server(processes, tmp_path, port)
    for _ in range(2):
        tracker.finish(second, result)
        assert len(tracker.client.get_metric_history(second, "iter/ms")) == BUCKETS
    assert tracker.finished_keys() == {"k1", "k2"}


# -- what people see --------------------------------------------------------------------------------------------------------------
def test_the_prepared_views_are_in_the_store(tracker):
    assert tracker.where_to_look == "crosstrain ui"
    network_link = tracker.ui_url("http://127.0.0.1:5000", "charts", network="lenet")
    tags = tracker.client.get_experiment(tracker.experiment_id).tags
    table = json.loads(tags["mlflow.sharedViewState.crosstrain-table"])
    assert table["orderByKey"] == "tags.`order`" and table["orderByAsc"] is True
    assert table["searchFilter"] == 'tags.kind = "run"'
    assert {"params.`network`", "metrics.`samples_per_s`", "tags.`outcome`"} <= set(table["selectedColumns"])
    charts = json.loads(tags["mlflow.sharedViewState.crosstrain-charts"])
    sections = {section["uuid"] for section in charts["compareRunSections"]}
    assert {chart["metricSectionId"] for chart in charts["compareRunCharts"]} <= sections
    assert len({chart["uuid"] for chart in charts["compareRunCharts"]}) == len(charts["compareRunCharts"])
    of_network = json.loads(tags["mlflow.sharedViewState.crosstrain-charts-lenet"])
    assert of_network["searchFilter"] == 'tags.kind = "run" and params.network = "lenet"'
    assert network_link.endswith(
        f"/#/experiments/{tracker.experiment_id}/runs?workflowType=machine_learning"
        "&viewStateShareKey=crosstrain-charts-lenet&compareRunsMode=CHART"
    )
    # the page asks the store with exactly this filter
    tracker.finish(tracker.start("x", {"network": "lenet"}, {"kind": "run"}, NOW), record())
    tracker.start("y", {"network": "alexnet"}, {"kind": "run"}, NOW)
    found = tracker.client.search_runs([tracker.experiment_id], of_network["searchFilter"], order_by=["metrics.`step_ms` ASC"])
    assert [run.info.run_name for run in found] == ["x"]


def test_a_link_names_no_view_that_is_not_there(tracker, monkeypatch):
    """MLflow would open another page than the runs'."""
    client = tracker.client
    for key in view.view_tags():
        client._tracking_client.store.delete_experiment_tag(tracker.experiment_id, key)
    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "_prepare_views", lambda self, tags: None)  # a server that lets others write them
        for name in ("table", "charts"):
            assert tracker.ui_url("http://team", name) == view.page_url("http://team", tracker.experiment_id, "")
    assert "viewStateShareKey=crosstrain-table" in tracker.ui_url("http://team")


def test_links_hold_no_password():
    assert view.page_url("https://me:secret@team/ml/", "3").startswith("https://team/ml/#/experiments/3/runs?")


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    view.add_command(parser.add_subparsers(required=True))
    arguments = parser.parse_args(words)
    return arguments.function(arguments)


def test_list_prints_the_last_runs(tracker, tmp_path, monkeypatch, capsys):
    for index, outcome in enumerate(("crashed", "ok")):
        metrics = {"step_ms": 12.3456, "samples_per_s": 5000.0} if outcome == "ok" else {}
        tracker.finish(tracker.start(f"run{index}", {}, {}, NOW + index), record(outcome, metrics=metrics))
    tracker.start("run2", {}, {}, NOW + 2)
    monkeypatch.chdir(tmp_path)
    assert command("list") == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [["run2", "running"], ["run1", "ok"], ["run0", "crashed"]]
    assert "12.35" in lines[1] and "5000" in lines[1]
    assert command("list", "-n", "1") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    with pytest.raises(ConfigError, match="--number 0"):
        command("list", "-n", "0")


def test_commands_without_a_store_create_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (["list"], ["ui", "--port", str(free_port())]):
        with pytest.raises(TrackingError, match="no tracking store at"):
            command(*words)
    assert list(tmp_path.iterdir()) == []


def test_ui_with_a_port_that_is_taken_or_none(tracker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(CrosstrainError, match=f"--port {port} can not be used"):
            command("ui", "--port", port)
    with pytest.raises(ConfigError, match="--port 70000"):
        command("ui", "--port", "70000")


def test_ui_opens_the_store_and_ends_with_ctrl_c(tracker, tmp_path, processes):
    run_id = tracker.start("x", {}, {}, NOW)
    tracker.finish(run_id, record())
    port = free_port()
    code = (
        "import sys, argparse; from crosstrain.tracking import view; p = argparse.ArgumentParser();"
        "view.add_command(p.add_subparsers()); a = p.parse_args(); sys.exit(a.function(a))"
    )
    page = processes("-c", code, "ui", "--port", str(port), cwd=tmp_path)
    words = []
    while not (words and "Ctrl-C" in words[-1]):
        words.append(page.stdout.readline())
        assert words[-1], words
    link = next(word for word in words if word.startswith("table:")).split()[1]
    assert link == tracker.ui_url(f"http://127.0.0.1:{port}")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/2.0/mlflow/runs/get?run_id={run_id}", timeout=30) as answer:
        assert json.load(answer)["run"]["info"]["run_name"] == "x"
    page.send_signal(signal.SIGINT)
    assert page.wait(30) == 0
    assert "Traceback" not in page.stdout.read()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
