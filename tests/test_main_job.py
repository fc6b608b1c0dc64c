"""The main job, end to end: real frameworks train real networks, and MLflow shows it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from conftest import PUBLISHED, QUICK, TRAIN, Result, Train, run_train, store, stored_runs

#: params of docs/tracking.md: every run has all of them
PARAMS = set(
    "framework framework_version network data data_placement task device device_name gpus replicas parallelism scaling "
    "batch_global batch_per_replica precision compile memory_format framework_settings threads optimizer learning_rate momentum "
    "weight_decay epochs target_accuracy seed repeat measure study effort parameters model_gflops".split()
)
TAGS = set("kind sweep study outcome outcome_reason parity run_key cell_key base_key overrides crosstrain_commit host driver".split())


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory, framework_python) -> Result:  # type: ignore[no-untyped-def]
    """Both frameworks on the default network and data, measured shortly, trained fully."""
    for name in ("torch", "mxnet"):
        framework_python(name)
    folder = tmp_path_factory.mktemp("main")
    return run_train(
        folder, "-m", "framework=torch,mxnet", "threads=1", "measure.min_s=1", "measure.max_s=8", "target_accuracy=0.9", timeout=500
    )


def test_both_train_to_more_than_95_percent(main_job: Result) -> None:
    assert main_job.code == 0, main_job
    assert [row["outcome"] in PUBLISHED for row in main_job.outcomes] == [True, True]
    for run in main_job.runs:
        assert run.data.metrics["accuracy"] > 0.95
        assert 0 < run.data.metrics["time_to_accuracy_s"] < 300


def test_both_frameworks_take_the_same_path(main_job: Result) -> None:
    """The same weights, the same batches in the same order, the same optimiser: the losses agree for a whole epoch."""
    client = store(main_job.folder)
    torch, mxnet = ([m.value for m in client.get_metric_history(run.info.run_id, "iter/loss")][:22] for run in main_job.runs)
    assert len(torch) == 22
    np.testing.assert_allclose(torch, mxnet, rtol=2e-3)


def test_every_run_has_the_whole_schema(main_job: Result) -> None:
    for run in main_job.runs:
        assert set(run.data.params) == PARAMS
        assert set(run.data.tags) >= TAGS
        assert run.data.tags["kind"] == "run"
        assert run.data.params["parameters"] == "431080"
        assert run.data.params["framework_version"] in ("2.13.0+cpu", "2.13.0", "1.9.1", "2.13.0+cu130")
        metrics = run.data.metrics
        for name in ("step_ms", "samples_per_s", "samples_per_s_total", "step_sync_ms", "step_ms_p5", "step_ms_p95", "step_ms_p99",
                     "step_ms_max", "outliers", "sync_ratio", "accuracy", "loss", "import_s", "build_s", "first_step_s", "warmup_s",
                     "data_wait_pct", "busy_pct", "device_memory_mb", "tflops"):  # fmt: skip
            assert math.isfinite(metrics[name]), name
        assert math.isclose(metrics["step_ms"] * metrics["samples_per_s"], 1000 * 64, rel_tol=2e-3)
        assert metrics["step_ms_p5"] <= metrics["step_sync_ms"] <= metrics["step_ms_p95"] <= metrics["step_ms_max"]


def test_series_are_complete_and_in_time(main_job: Result) -> None:
    client = store(main_job.folder)
    for run in main_job.runs:
        for key, n in (("iter/ms", 330), ("iter/loss", 330), ("iter/accuracy", 330), ("epoch/accuracy", 15), ("epoch/loss", 15)):
            history = client.get_metric_history(run.info.run_id, key)
            assert len(history) == n, key
            steps = [point.step for point in history]
            assert steps == sorted(steps)
            assert all(run.info.start_time <= point.timestamp <= run.info.end_time for point in history)
        assert client.get_metric_history(run.info.run_id, "system/cpu_utilization_percentage")


def test_raw_samples_are_an_artifact(main_job: Result) -> None:
    client = store(main_job.folder)
    for run in main_job.runs:
        table = pd.read_parquet(client.download_artifacts(run.info.run_id, "samples.parquet"))
        assert (table["phase"] == 5).sum() == 330
        assert (table["duration"] > 0).all()
        environment = json.loads(Path(client.download_artifacts(run.info.run_id, "environment.json")).read_text())
        assert environment["effective"]["threads"] == 1
        assert environment["threads"]["cores_used"] < 1.1  # METHOD 22: by work done


def test_it_ends_with_a_table_and_the_command_for_the_ui(main_job: Result) -> None:
    tail = main_job.out[-2000:]
    assert "lenet-torch" in tail and "lenet-mxnet" in tail
    assert "crosstrain ui" in tail
    assert "%" in tail
    assert "Traceback" not in main_job.out + main_job.err


def test_gpus_on_a_machine_without(train: Train) -> None:
    from crosstrain import devices

    if devices.visible_gpus():
        pytest.skip("this machine has GPUs")
    result = train("-m", "framework=torch,mxnet", "gpus=1,2,4")
    assert result.code == 1
    assert [row["outcome"] for row in result.outcomes] == ["unsupported"] * 6
    reasons = [f"asked for {n} GPU{'s' if n > 1 else ''}; this machine has 0" for n in (1, 2, 4)] * 2
    assert [row["message"] for row in result.outcomes] == reasons
    assert [run.info.status for run in result.runs] == ["FAILED"] * 6


def test_threads_are_swept_and_more_than_there_are_is_unsupported(train: Train, framework_python) -> None:  # type: ignore[no-untyped-def]
    framework_python("torch")
    cpus = len(os.sched_getaffinity(0))
    result = train("-m", "network=fcn_r", "batch_size=64", "device=cpu", f"threads=1,{cpus + 1}", *QUICK)
    first, second = result.outcomes
    assert first["outcome"] in PUBLISHED
    assert second["outcome"] == "unsupported"
    assert f"asked for {cpus + 1} threads; this machine has {cpus} logical CPUs" in second["message"]


@pytest.mark.long
@pytest.mark.parametrize("framework", ["torch", "mxnet"])
def test_tasks(train: Train, framework_python, framework: str) -> None:  # type: ignore[no-untyped-def]
    """gradient leaves out the update, forward the backward pass, too; training FLOPs are known for each."""
    framework_python(framework)
    result = train("-m", f"framework={framework}", "task=training,gradient,forward", "network=fcn_r", "batch_size=128", "threads=1",
                   "measure=smoke", "measure.iterations=12", "measure.warmup=4", "measure.block_s=0.3")  # fmt: skip
    assert [row["outcome"] in PUBLISHED for row in result.outcomes] == [True] * 3, result
    metrics = [run.data.metrics for run in result.runs]
    # how long each takes is the machine's affair; what each did is not
    training, gradient, forward = (m["tflops"] * 1e12 / m["samples_per_s"] for m in metrics)
    assert training == pytest.approx(gradient, rel=1e-3) and 2 < training / forward < 3, (training, gradient, forward)
    assert "accuracy" not in metrics[1] and "accuracy" not in metrics[2]


def test_divergence_is_an_outcome_and_no_nan_reaches_the_store(train: Train, framework_python) -> None:  # type: ignore[no-untyped-def]
    """CASES 12."""
    framework_python("torch")
    result = train("learning_rate=1e9", "threads=1", "network=alexnet_r", "batch_size=32", *QUICK, "measure.iterations=60")
    assert result.only["outcome"] == "diverged", result
    (run,) = result.runs
    assert (run.info.status, run.data.metrics) == ("FAILED", {})


@pytest.mark.long
def test_learning_rate_too_small_to_change_anything_is_not_training(train: Train, framework_python) -> None:  # type: ignore[no-untyped-def]
    framework_python("torch")
    result = train("learning_rate=1e-60", "threads=1", *QUICK)
    assert result.only["outcome"] == "not_training", result


@pytest.mark.parametrize(("replicas", "rate"), [(1, 3200), (2, 6400), pytest.param(4, 12800, marks=pytest.mark.long)])
def test_throughput_is_the_total_of_all_replicas(train: Train, replicas: int, rate: float) -> None:
    """CASES 1: 10 ms an iteration, 32 samples per replica."""
    result = train("framework=fake", "framework.step_ms=10", "device=cpu", f"replicas={replicas}", "threads=1", "data=synthetic",
                   "scaling=weak", "batch_size=32", "device.oversubscribe=true", "measure=smoke", "measure.iterations=30")  # fmt: skip
    assert result.only["outcome"] in PUBLISHED, result
    # never faster than it slept; that of one replica alone would be at most half of it
    assert 0.6 * rate < result.only["samples_per_s"] < 1.01 * rate
    (run,) = result.runs
    assert run.data.params["batch_global"] == str(32 * replicas)
    assert run.data.params["batch_per_replica"] == "32"


def test_an_old_file_store_in_the_folder_does_not_matter(train: Train, tmp_path: Path) -> None:
    """CASES 9."""
    (tmp_path / "mlruns" / "0").mkdir(parents=True)
    meta = "artifact_location: x\nexperiment_id: '0'\nlifecycle_stage: active\nname: Default\n"
    (tmp_path / "mlruns" / "0" / "meta.yaml").write_text(meta)
    result = train("framework=fake", "data=synthetic", *QUICK)
    assert result.code == 0, result
    assert len(result.runs) == 1


@pytest.mark.long
def test_four_drivers_at_once_on_a_fresh_store(start_train, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """CASES 10."""
    drivers = [start_train("framework=fake", "data=synthetic", "threads=1", *QUICK) for _ in range(4)]
    assert [driver.wait(180) for driver in drivers] == [0] * 4
    runs = stored_runs(tmp_path)
    assert [run.info.status for run in runs] == ["FINISHED"] * 4
    assert len({run.data.tags["sweep"] for run in runs}) == 4


@pytest.mark.long
def test_a_long_series_is_thinned_and_the_raw_one_kept(train: Train) -> None:
    result = train("framework=fake", "framework.step_ms=0.2", "data=synthetic", "measure=smoke", "measure.iterations=3000",
                   "measure.block_s=0.05")  # fmt: skip
    (run,) = result.runs
    client = store(result.folder)
    for key in ("iter/ms", "iter/ms_min", "iter/ms_max"):
        assert len(client.get_metric_history(run.info.run_id, key)) <= 1000
    table = pd.read_parquet(client.download_artifacts(run.info.run_id, "samples.parquet"))
    assert (table["phase"] == 3).sum() == 3000


def test_a_users_own_interpreter(train: Train, framework_python) -> None:  # type: ignore[no-untyped-def]
    python = framework_python("torch")
    result = train(f"framework.python={python}", "threads=1", "epochs=0", *QUICK)
    assert result.only["outcome"] in PUBLISHED
    missing = train("framework.python=/nowhere/python", "epochs=0", *QUICK)
    assert missing.only["outcome"] == "env_missing"
    assert "/nowhere/python" in missing.only["message"]


def test_missing_data_is_an_outcome_with_the_address(train: Train, tmp_path: Path) -> None:
    env = {"CROSSTRAIN_CACHE": str(tmp_path / "cache"), "CROSSTRAIN_DATA_MIRROR": "http://127.0.0.1:9"}
    result = train("framework=fake", "network=alexnet_r", "data=cifar10", *QUICK, env=env)
    assert result.only["outcome"] == "data_missing", result
    assert "cifar-10-binary.tar.gz" in result.only["reason"]
    assert result.code == 1


def test_data_that_does_not_fit_the_network_is_unsupported(train: Train) -> None:
    result = train("framework=fake", "network=alexnet_r", "data=digits", *QUICK)
    assert result.only["outcome"] == "unsupported", result
    assert "data.fit" in result.only["reason"]
    fitted = train("framework=fake", "network=alexnet_r", "data=digits", "data.fit=pad", "batch_size=64", *QUICK)
    assert fitted.only["outcome"] in PUBLISHED, fitted


def test_output_can_be_cut_off(tmp_path: Path) -> None:
    """`train.py … | head -1` must not end in a traceback."""
    arguments = " ".join(["framework=fake", "data=synthetic", *QUICK])
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} {TRAIN} {arguments} | head -1"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert "Traceback" not in done.stderr
