"""Every way a run can end, through the front door, with the fake framework's faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import (
    PUBLISHED,
    QUICK,
    TRAIN,
    Result,
    Train,
    run_folder_in_phase,
    run_train,
    store,
    stored_runs,
    wait_for,
    workers_of,
)

FAKE = ["framework=fake", "framework.step_ms=1", "data=synthetic", *QUICK]

#: fault -> (outcome, MLflow status, a part of the reason)
FAULTS = {
    "raise": ("crashed", "FAILED", "RuntimeError: asked to raise in phase iteration"),
    "nan_loss": ("diverged", "FAILED", "the loss became nan"),
    "kill": ("crashed", "FAILED", "died by SIGKILL"),
    "segv": ("crashed", "FAILED", "died by SIGSEGV"),
    "exit": ("crashed", "FAILED", "exit code 0) without a result"),
    "silent": ("crashed", "FAILED", "exit code 0) without a result"),
    "device_oom": ("device_oom", "FAILED", "CUDA out of memory"),
    "stderr": ("crashed", "FAILED", "asked to raise after 10 MB"),
    "truncate": ("crashed", "FAILED", "truncated"),
    "grandchild": ("crashed", "FAILED", "with a grandchild left behind"),
    "no_sync": ("invalid", "FAILED", "sync() does not wait"),
    "still": ("not_training", "FAILED", "no parameter changed"),
    "unsupported": ("unsupported", "FAILED", "asked to be unsupported"),
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One sweep over all faults, an undisturbed cell first and last."""
    folder = tmp_path_factory.mktemp("faulty")
    faults = ",".join(["none", *FAULTS])
    return run_train(folder, "-m", *FAKE, f"framework.fault={faults}", "repeat=1", "framework.fault_iteration=2")


def cell(result: Result, fault: str) -> int:
    return ["none", *FAULTS].index(fault)


@pytest.mark.parametrize("fault", FAULTS)
def test_outcome_reason_and_status(faulty: Result, fault: str) -> None:
    outcome, status, reason = FAULTS[fault]
    row = faulty.outcomes[cell(faulty, fault)]
    assert row["outcome"] == outcome, row
    assert reason in row["reason"]
    assert row["ok"] is False
    run = store(faulty.folder).get_run(row["mlflow_run_id"])
    assert run.info.status == status
    assert run.data.tags["outcome"] == outcome
    assert reason in run.data.tags["outcome_reason"]
    assert run.info.end_time >= run.info.start_time


@pytest.mark.parametrize("fault", FAULTS)
def test_no_number_is_published_for_a_bad_run(faulty: Result, fault: str) -> None:
    row = faulty.outcomes[cell(faulty, fault)]
    assert row["step_ms"] is None
    assert store(faulty.folder).get_run(row["mlflow_run_id"]).data.metrics == {}


def test_the_sweep_goes_on_and_the_exit_code_tells(faulty: Result) -> None:
    assert faulty.code == 1
    assert len(faulty.outcomes) == 1 + len(FAULTS)
    assert faulty.outcomes[0]["outcome"] in PUBLISHED
    assert "Traceback" not in faulty.out + faulty.err


def test_samples_and_logs_of_a_killed_run_are_kept(faulty: Result) -> None:
    run_id = faulty.outcomes[cell(faulty, "kill")]["mlflow_run_id"]
    names = {file.path for file in store(faulty.folder).list_artifacts(run_id)}
    assert {"run.json", "samples.parquet", "environment.json", "logs", "config"} <= names


def test_traceback_is_in_the_log(faulty: Result) -> None:
    folder = Path(faulty.outcomes[cell(faulty, "raise")]["folder"])
    assert "RuntimeError: asked to raise" in (folder / "worker.0.err").read_text()


def test_long_stderr_is_shortened_in_the_store(faulty: Result) -> None:
    row = faulty.outcomes[cell(faulty, "stderr")]
    assert (Path(row["folder"]) / "worker.0.err").stat().st_size > 10 * 2**20 - 100_000
    files = store(faulty.folder).list_artifacts(row["mlflow_run_id"], "logs")
    assert all(file.file_size < 2_000_000 for file in files)


def test_a_deaf_grandchild_is_gone(faulty: Result) -> None:
    pid = int((Path(faulty.outcomes[cell(faulty, "grandchild")]["folder"]) / "grandchild.pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.long
def test_hang_in_each_phase_is_a_timeout(tmp_path: Path) -> None:
    phases = ["import", "build", "first_step", "iteration", "block", "train", "evaluate"]
    limits = [f"measure.timeouts.{name}=3" for name in ("import_s", "build_s", "first_step_s", "stall_s")]
    begin = time.monotonic()
    result = run_train(
        tmp_path, "-m", "framework=fake_hang", "framework.step_ms=1", *QUICK, *limits, "epochs=1", "data=digits",
        f"framework.fault_phase={','.join(phases)}",
    )  # fmt: skip
    assert [(row["outcome"], row["phase"]) for row in result.outcomes] == [("timeout", phase) for phase in phases]
    assert all("within 3 s" in row["reason"] and "measure.timeouts" in row["reason"] for row in result.outcomes)
    assert time.monotonic() - begin < 120


def test_timeout_s_ends_the_whole_run(train: Train) -> None:
    result = train(*FAKE, "measure.iterations=100000", "timeout_s=2")
    assert (result.only["outcome"], result.code) == ("timeout", 1)
    assert "timeout_s=2" in result.only["reason"]


@pytest.mark.long
def test_host_memory_limit_gives_host_oom(tmp_path: Path) -> None:
    """The worker inherits a real memory limit (as a batch system sets it) and really runs into it."""
    limit_kb = 8_000_000
    arguments = " ".join([*FAKE, "framework.fault=host_oom"])
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v {limit_kb}; exec {sys.executable} {TRAIN} {arguments}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    result = Result(done.returncode, done.stdout, done.stderr, tmp_path)
    assert result.only["outcome"] == "host_oom", result
    assert result.runs[0].info.status == "FAILED"


@pytest.mark.long
def test_drifting_step_time_is_unstable(train: Train) -> None:
    result = train("framework=fake", "framework.step_ms=10", "framework.fault=drift", "data=synthetic", "measure=standard",
                   "measure.min_s=1", "measure.max_s=4", "measure.block_s=0.1")  # fmt: skip
    assert result.only["outcome"] == "unstable", result
    assert result.only["ok"] is True
    assert result.code == 0
    assert result.runs[0].info.status == "FINISHED"
    strict = train("framework=fake", "framework.step_ms=10", "framework.fault=drift", "data=synthetic", "measure=standard",
                   "measure.min_s=1", "measure.max_s=4", "measure.block_s=0.1", "measure.strict=true")  # fmt: skip
    assert strict.code == 1


def test_a_failure_is_printed_at_once_and_the_rest_goes_on(train: Train) -> None:
    """CASES 4: the failing cell is told when it fails, not at the end, and the others are ok."""
    result = train("-m", "framework=fake_raise", "framework.fault_iteration=1000000,2,2000000", "data=synthetic", *QUICK)
    assert result.code == 1
    assert [row["outcome"] in PUBLISHED for row in result.outcomes] == [True, False, True]
    lines = result.out.splitlines()
    told = next(i for i, line in enumerate(lines) if "crashed: in phase iteration" in line)
    later = next(i for i, line in enumerate(lines) if "cell 3/3" in line)
    assert told < later


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_to_the_driver_stops_everything(start_train, tmp_path: Path, number: int, code: int) -> None:  # type: ignore[no-untyped-def]
    """CASES 7 and 13."""
    driver = start_train("-m", *FAKE, "measure.iterations=1000000", "repeat=1,2")
    folder = wait_for(lambda: run_folder_in_phase(tmp_path, "iteration"))
    driver.send_signal(number)
    assert driver.wait(20) == code
    assert workers_of(folder) == []
    (run,) = stored_runs(tmp_path)  # the second cell never started
    assert (run.info.status, run.data.tags["outcome"]) == ("KILLED", "interrupted")
    assert "Traceback" not in (tmp_path / "stdout.0").read_text()


def test_killed_driver_leaves_nothing_and_its_run_is_closed_later(start_train, tmp_path: Path, train: Train) -> None:  # type: ignore[no-untyped-def]
    """CASES 7 and 13: kill -9 of the driver, with a grandchild-free worker in mid-iteration."""
    driver = start_train(*FAKE, "measure.iterations=1000000")
    folder = wait_for(lambda: run_folder_in_phase(tmp_path, "iteration"))
    driver.kill()
    driver.wait()
    wait_for(lambda: not workers_of(folder), 15, "the guard stops the worker")
    assert [run.info.status for run in stored_runs(tmp_path)] == ["RUNNING"]
    result = train(*FAKE)
    old, new = result.runs
    assert (old.info.status, old.data.tags["outcome"]) == ("KILLED", "interrupted")
    assert new.data.tags["outcome"] in PUBLISHED


def test_one_failing_rank_ends_all(train: Train) -> None:
    """CASES 7: rank 1 raises at step 7 of a two-rank run; rank 0 does not wait for ever."""
    result = train(
        "framework=fake_raise", "framework.step_ms=1", "data=synthetic", "device=cpu", "replicas=2", "threads=1", *QUICK,
        "framework.fault_rank=1", "framework.fault_iteration=7", "measure.iterations=1000000", "device.oversubscribe=true",
    )  # fmt: skip
    assert result.only["outcome"] == "crashed"
    assert "rank 1: RuntimeError" in result.only["reason"]
    assert workers_of(Path(result.only["folder"])) == []


def test_returned_value_is_the_step_time(train: Train) -> None:
    result = train(*FAKE, "framework.step_ms=20", "measure.iterations=10", "measure.block_s=0.3")
    # never less than it slept; how much more is the machine's affair
    assert 20 <= result.only["step_ms"] < 60


def test_others_on_the_leased_cpus_contaminate(train: Train) -> None:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        result = train("framework=fake", "framework.step_ms=10", "data=synthetic", "measure=smoke", "measure.iterations=150")
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert result.only["outcome"] == "contaminated", result
    assert "of the leased CPUs" in result.only["reason"]
    assert (result.code, result.runs[0].info.status) == (0, "FINISHED")
    assert "step_ms" in result.runs[0].data.metrics


def test_a_library_that_does_not_load_costs_an_artifact_and_nothing_else(tmp_path: Path) -> None:
    """Found with a broken pyarrow: the whole sweep ended in its traceback, after the measuring."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "pyarrow.py").write_text("raise ImportError('libarrow.so: no such file')\n")
    result = run_train(tmp_path, "-m", *FAKE, "framework.step_ms=1,2", *QUICK, env={"PYTHONPATH": str(tmp_path / "broken")})
    assert result.code == 0, result
    assert "an artifact is missing: ImportError: libarrow.so: no such file" in result.out
    assert [run.info.status for run in result.runs] == ["FINISHED"] * 2 and all("step_ms" in run.data.metrics for run in result.runs)


def test_a_framework_that_can_not_be_imported_says_why(tmp_path: Path, framework_python) -> None:  # type: ignore[no-untyped-def]
    """MXNet without a library it is linked with: the adapter, asked whether that was memory, has no library to ask."""
    python = framework_python("mxnet")
    broken = tmp_path / "site"
    (broken / "mxnet").mkdir(parents=True)
    (broken / "mxnet" / "__init__.py").write_text("raise OSError('libopenblas.so.0: cannot open shared object file')\n")
    own = tmp_path / "python"
    own.write_text(f'#!/bin/sh\nPYTHONPATH={broken} exec {python} "$@"\n')
    own.chmod(0o755)
    row = run_train(tmp_path, "framework=mxnet", f"framework.python={own}", "device=cpu", *QUICK).only
    assert row["outcome"] in ("crashed", "env_missing") and "libopenblas.so.0" in row["reason"], row
