"""A team's server as launchers/mlflow_server.sh starts it: PostgreSQL, artifacts through the server, a login, a path prefix."""

from __future__ import annotations

import http.server
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import servers
from conftest import PUBLISHED, QUICK, Train
from crosstrain.errors import TrackingError
from crosstrain.tracking import RunRecord, Series, Tracker
from servers import Server

PASSWORD = "a-password-of-admin"
FAKE = ["framework=fake", "data=synthetic", "device=cpu", "threads=1", *QUICK]


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with servers.postgresql() as uri:
        yield uri


@pytest.fixture(scope="module")
def team(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("team")
    with servers.of_a_team(folder, database, PREFIX="/ml", ADMIN_PASSWORD=PASSWORD, PERMISSION="READ", NAMES="lab") as server:
        yield server


def login(monkeypatch: pytest.MonkeyPatch, user: str, password: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)


def refusal(uri: str, folder: Path) -> str:
    with pytest.raises(TrackingError) as caught:
        Tracker(uri, None, folder).preflight()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


def test_a_run_arrives_with_its_artifacts_and_without_the_password(team: Server, train: Train, tmp_path: Path) -> None:
    uri = team.uri.replace("://", f"://admin:{PASSWORD}@")
    result = train(*FAKE, f"tracking.uri={uri}")
    assert result.code == 0 and result.only["outcome"] in PUBLISHED, result
    assert PASSWORD not in result.out + result.err
    assert not (tmp_path / "mlruns").exists()
    tracker = Tracker(uri, None, tmp_path)
    tracker.connect()
    (run,) = tracker.runs("tags.kind = 'run'")
    assert (run.run_id, run.status) == (result.only["mlflow_run_id"], "FINISHED")
    assert run.params["framework"] == "fake" and run.metrics["step_ms"] == pytest.approx(result.only["step_ms"], rel=1e-3)
    assert len(tracker.client.get_metric_history(run.run_id, "iter/ms")) == 6
    kept = [path for path in (team.folder / "team" / "artifacts").rglob("*") if path.is_file()]
    assert {"run.json", "samples.parquet", "config.yaml", "overrides.yaml"} <= {path.name for path in kept}
    assert [path for path in kept if PASSWORD.encode() in path.read_bytes()] == []
    assert "://admin:***@" in run.tags["overrides"]


def test_a_login_is_asked_for_and_checked(team: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "wants a login (401): set MLFLOW_TRACKING_USERNAME" in refusal(team.uri, tmp_path)
    assert "does not accept the login given to it (401)" in refusal(team.uri.replace("://", "://admin:wrong@"), tmp_path)
    login(monkeypatch, "admin", "wrong")
    assert "does not accept the login given to it (401)" in refusal(team.uri, tmp_path)


def test_a_user_who_may_only_read_is_told_before_the_first_run(team: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.server.auth.client import AuthServiceClient

    login(monkeypatch, "admin", PASSWORD)
    of_admin = Tracker(team.uri, "theirs", tmp_path)
    of_admin.preflight()
    users = AuthServiceClient(team.uri)
    users.create_user("bob", "a-password-of-bob")
    login(monkeypatch, "bob", "a-password-of-bob")
    bob = Tracker(team.uri, "theirs", tmp_path)
    with pytest.raises(TrackingError, match=r"denies access \(403\).*EDIT"):
        bob.preflight()
    login(monkeypatch, "admin", PASSWORD)
    users.grant_user_permission("bob", "experiment", of_admin.experiment_id, "EDIT")
    login(monkeypatch, "bob", "a-password-of-bob")
    bob.preflight()
    bob.start("his", {}, {}, 1)


def test_wrong_names_and_paths(team: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    login(monkeypatch, "admin", PASSWORD)
    assert "no MLflow server (404" in refusal(team.uri.removesuffix("/ml"), tmp_path)
    other_name = f"127.0.0.2:{team.port}"
    assert f"does not accept the name {other_name} (403 Invalid Host header)" in refusal(f"http://{other_name}/ml", tmp_path)


class _OldServer(http.server.BaseHTTPRequestHandler):
    """What MLflow 2.9.2 answers to the preflight; each run then failed at /api/2.0/mlflow/logged-models/search (404)."""

    def do_GET(self) -> None:
        body = b"2.9.2" if self.path == "/version" else b'{"experiments": []}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_server_that_is_too_old_is_told_before_the_first_run(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _OldServer) as old:
        threading.Thread(target=old.serve_forever, daemon=True).start()
        line = refusal(f"http://127.0.0.1:{old.server_port}", tmp_path)
        old.shutdown()
    assert "is MLflow 2.9.2" in line and "update it to 3.0 or newer" in line


def test_the_database_itself_can_be_the_store(team: Server, database: str, tmp_path: Path) -> None:
    del team  # which has made the tables
    wrong = refusal(database.replace("secret", "guessed"), tmp_path)
    assert "password authentication failed" in wrong and "guessed" not in wrong
    assert 'database "photographs" does not exist' in refusal(database.removesuffix("mlflow") + "photographs", tmp_path)
    tracker = Tracker(database, "direct", tmp_path)
    tracker.preflight()
    (tmp_path / "log.txt").write_text("words")
    steps = np.arange(1500)
    record = RunRecord(
        "lenet", {"network": "lenet", "study": ""}, {"outcome": "ok", "empty": ""}, {"step_ms": 1 / 3},
        {"iter/ms": Series(steps, steps / 7, 10**12 + steps)}, "FINISHED", 10**12, 10**12 + 5000, [(tmp_path / "log.txt", "logs")],
    )  # fmt: skip
    run_id = tracker.start(record.name, record.params, {}, record.start_ms)
    for _ in range(2):
        tracker.finish(run_id, record, again=True)
        proof = tracker.compare(run_id, record)
        assert proof.whole, proof.lacks()
        assert proof.wanted["points"] == 3 * 320 and len(tracker.client.get_metric_history(run_id, "iter/ms_max")) == 320


def test_the_script_says_how_it_is_used(tmp_path: Path) -> None:
    for arguments, env in (([], {"DATABASE": "postgresql://x"}), ([str(tmp_path / "made")], {})):
        done = subprocess.run(["sh", servers.SCRIPT, *arguments], env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("usage: DATABASE="), done
    assert list(tmp_path.iterdir()) == []
