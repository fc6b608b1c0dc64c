"""Real servers of a team for tests: MLflow's, PostgreSQL. Each on a free port, each ended with its test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import ROOT, needs, wait_for

SCRIPT = ROOT / "launchers" / "mlflow_server.sh"
POSTGRESQL = "apt-get install --no-install-recommends postgresql"
#: s; MLflow's server takes 10 to 60 to come up
START_S = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """`mlflow server` on a port of this machine, with a database and a folder of its own."""

    command: list[str]
    port: int
    folder: Path
    env: dict[str, str]
    prefix: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.prefix}"

    def start(self) -> None:
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **self.env}
            )
        wait_for(self._answers, START_S, f"mlflow server, see {self.folder}/server.log")

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (self.folder / "server.log").read_text()[-3000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2):
            return True
        time.sleep(0.2)
        return False

    def stop(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            self.process.wait(60)
            with contextlib.suppress(ProcessLookupError):  # workers that outlive it
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process = None


@contextlib.contextmanager
def on_sqlite(folder: Path) -> Iterator[Server]:
    """A plain server, not started yet."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/server.db", "--workers", "1"]
    env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = Server([*command, "--artifacts-destination", f"{folder}/artifacts", "--port", str(port)], port, folder, env)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def of_a_team(folder: Path, database: str, **settings: str) -> Iterator[Server]:
    """What launchers/mlflow_server.sh starts, with these of its variables."""
    port = free_port()
    env = {"DATABASE": database, "PORT": str(port), "WORKERS": "1", "PYTHON": sys.executable, **settings}
    server = Server(["sh", str(SCRIPT), str(folder / "team")], port, folder, env, settings.get("PREFIX", ""))
    try:
        server.start()
        yield server
    finally:
        server.stop(signal.SIGTERM)


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """A new PostgreSQL with an empty database `mlflow`; the URI for SQLAlchemy. Debian's own cluster is left alone."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not programs:
        needs("apt", POSTGRESQL)
    folder = Path(tempfile.mkdtemp(prefix="crosstrain-postgresql-"))
    user: dict[str, Any] = {"cwd": folder}
    if os.getuid() == 0:  # it does not run as root
        shutil.chown(folder, "postgres", "postgres")
        user |= {"user": "postgres", "group": "postgres", "extra_groups": []}
    (folder / "password").write_text("secret")
    (folder / "password").chmod(0o644)
    here, port = programs[-1].parent, free_port()
    options = ["-U", "mlflow", "-A", "scram-sha-256", "--pwfile", "password", "-E", "UTF8", "--no-sync"]
    made = subprocess.run([here / "initdb", "-D", "data", *options], capture_output=True, text=True, **user)
    assert made.returncode == 0, made.stderr
    with open(folder / "log", "wb") as log:
        command = [here / "postgres", "-D", "data", "-p", str(port), "-k", str(folder), "-h", "127.0.0.1", "-F"]
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **user)
    try:
        wait_for(lambda: _create(port), 120, f"PostgreSQL: {(folder / 'log').read_text()}")
        yield f"postgresql+psycopg2://mlflow:secret@127.0.0.1:{port}/mlflow"
    finally:
        server.send_signal(signal.SIGINT)  # its fast shutdown
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _create(port: int) -> bool:
    import psycopg2

    try:
        connection = psycopg2.connect(host="127.0.0.1", port=port, user="mlflow", password="secret", dbname="postgres")
    except psycopg2.OperationalError:
        return False
    connection.autocommit = True
    with contextlib.closing(connection):
        connection.cursor().execute("CREATE DATABASE mlflow")
    return True
