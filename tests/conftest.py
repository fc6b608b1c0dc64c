"""Fixtures shared by all tests. Most tests go through the front door: a real `python train.py …` in a temporary folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "train.py"
#: Outcomes whose numbers are published; which of them it is depends on how quiet the machine is.
PUBLISHED = ("ok", "unstable", "contaminated")
#: Timing settings for runs that only have to work: fixed iterations and short blocks, three of them, as with one block a pre-empted
#: read-back would make the run invalid on a busy machine.
QUICK = ["tracking.report=false", "measure=smoke", "measure.iterations=6", "measure.warmup=2", "measure.block_s=0.02",
         "measure.min_blocks=3"]  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs deaf to SIGINT, and so would be all that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "long: takes long, and shorter tests look at most of the same; --require=time runs it")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        default="",
        help="a comma list of `apt`, `interpreter`, `environment`, `time`, or `all`: a test skipped for want of it fails instead, "
        "and those that take long run",
    )


def required(config: pytest.Config, kind: str) -> bool:
    """Does --require name this kind?"""
    return not {"all", kind}.isdisjoint(config.getoption("--require").split(","))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not required(config, "time"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="needs time: pytest --require=time"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Turn a skip for something installable into a failure where --require names its kind (reasons start `needs KIND: `)."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        kind = reason.removeprefix("needs ").split(":")[0]
        if reason.startswith("needs ") and required(item.config, kind):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid}: {reason} (required by --require)"
    return report


def needs(kind: str, command: str) -> None:
    """Skip this test: it wants something that `command` installs. kind: apt, interpreter or environment."""
    pytest.skip(f"needs {kind}: {command}")


@pytest.fixture(autouse=True, scope="session")
def _quiet_mlflow() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "CUDA_VISIBLE_DEVICES"):
            patch.delenv(name, raising=False)
        yield


@dataclass
class Result:
    """One finished `python train.py`."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def outcomes(self) -> list[dict[str, Any]]:
        """The rows of the newest outcomes.jsonl below the start directory."""
        files = sorted(self.folder.glob("outputs/*/*/outcomes.jsonl"), key=os.path.getmtime)
        return [json.loads(line) for line in files[-1].read_text().splitlines()] if files else []

    @property
    def only(self) -> dict[str, Any]:
        assert len(self.outcomes) == 1, self
        return self.outcomes[0]

    @property
    def runs(self) -> list[Any]:
        """All runs of the store below the start directory, oldest first."""
        return stored_runs(self.folder)

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def stored_runs(folder: Path) -> list[Any]:
    """The measured MLflow runs in <folder>/mlruns/mlflow.db, oldest first."""
    client = store(folder)
    found = client.search_runs([e.experiment_id for e in client.search_experiments()], order_by=["attributes.start_time ASC"])
    return [run for run in found if run.data.tags.get("kind") != "report"]


def store(folder: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{folder}/mlruns/mlflow.db")


Train = Callable[..., Result]


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(TRAIN), *arguments]


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user cache of this test alone: it waits for nobody's devices."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(folder))
    return folder


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """train(*overrides, cwd=tmp_path, env={}) -> Result, with a time limit."""
    return lambda *arguments, cwd=tmp_path, **options: run_train(cwd, *arguments, **options)


def run_train(cwd: Path, *arguments: str, env: dict[str, str] | None = None, timeout: float = 300) -> Result:
    done = subprocess.run(
        command(*arguments), cwd=cwd, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})}
    )
    return Result(done.returncode, done.stdout, done.stderr, cwd)


@pytest.fixture
def start_train(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """start_train(*overrides) -> Popen; whatever is still alive at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, cwd: Path = tmp_path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        out = open(cwd / f"stdout.{len(started)}", "w")  # noqa: SIM115
        process = subprocess.Popen(
            command(*arguments), cwd=cwd, stdout=out, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(env or {})}
        )
        out.close()
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(condition: Callable[[], Any], timeout: float = 60, what: str = "") -> Any:
    """The first true value of `condition()`; fails after `timeout` seconds."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"nothing within {timeout} s: {what or condition}")


def run_folder_in_phase(folder: Path, phase: str) -> Path | None:
    """The run folder below the start directory whose rank 0 has entered `phase`, or None."""
    for events in folder.glob("outputs/**/events.0.jsonl"):
        if f'"name": "{phase}"' in events.read_text():
            return events.parent
    return None


def workers_of(run_folder: Path) -> list[int]:
    """Pids of living processes of the run in this folder."""
    from crosstrain import processes

    return processes.processes_of(json.loads((run_folder / "run.json").read_text())["run_id"])


#: frameworks whose environment the tests make where it is missing; of the others they use what is there
MADE = ("torch", "mxnet")


@pytest.fixture(scope="session")
def framework_python() -> Callable[[str], Path]:
    """framework_python("torch") -> the interpreter of the managed CPU environment."""
    from crosstrain import environments
    from crosstrain.errors import OutcomeError

    def find(name: str) -> Path:
        key = environments.environment_key(name, "cpu", None)
        if name not in MADE and key not in [cached.key for cached in environments.list_environments()]:
            needs("environment", f"crosstrain env make {name}")
        try:
            return environments.find_or_make(name, "cpu", None, None, print).python
        except OutcomeError as error:
            needs("environment", f"crosstrain env make {name} ({error.message})")
            raise AssertionError from error

    return find
