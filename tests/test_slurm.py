"""launcher=slurm and sweeps through submitit, on a real Slurm with two nodes: the same results as on one machine, and the right ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slurm as clusters
from conftest import PUBLISHED, QUICK, ROOT, TRAIN, Result, run_folder_in_phase, run_train, store, stored_runs, wait_for, workers_of
from crosstrain import measured, paths, samples
from crosstrain.launch import slurm
from crosstrain.report import cells
from crosstrain.tracking.store import TrackedRun
from crosstrain.watch import Ended
from crosstrain_worker import agreement, machines
from crosstrain_worker.frameworks import base
from crosstrain_worker.record import BLOCK
from several import assert_total_throughput, assert_trained_alike, losses_of
from test_replicas import rank_pid

CPU = ["launcher=slurm", "device=cpu", "threads=1", "network=lenet"]
FAKE = ["framework=fake", "data=synthetic", *CPU]
#: in shorter ones the read-back behind each counts for too much
BLOCKS = ["measure.min_blocks=5", "measure.block_s=0.3"]
LONG = [*FAKE, "replicas=2", "framework.step_ms=10", "measure=smoke", "measure.iterations=1000000"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[clusters.Cluster]:
    running = clusters.start_cluster()
    yield running
    running.stop()
    wait_for(lambda: not running.processes(), 30, "nothing of Slurm is left")
    shutil.rmtree(running.folder)


# -- the same results ---------------------------------------------------------------------------------------------------------


def with_environments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache with the environments of the user's and leases of its own."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "environments").symlink_to(paths.cache_dir("environments"))
    return {"CROSSTRAIN_CACHE": str(folder)}


@pytest.fixture(scope="module")
def sweep(cluster: clusters.Cluster, tmp_path_factory: pytest.TempPathFactory, framework_python: Callable[[str], Path]) -> Result:
    """LeNet on the digits in PyTorch: one replica, two of them on two nodes, and these with Horovod."""
    framework_python("torch")
    framework_python("torch-horovod")
    cells = 'hydra.sweeper.cells=[{parallelism: native, replicas: "1,2"}, {parallelism: horovod, replicas: 2}]'
    return cluster.train(
        tmp_path_factory.mktemp("sweep"), "-m", cells, "framework=torch", "data=digits", "batch_size=64", "epochs=1", *CPU, *QUICK,
        *BLOCKS, env=with_environments(tmp_path_factory),
    )  # fmt: skip


def test_two_nodes_are_one_published_run(sweep: Result) -> None:
    assert [row["outcome"] in PUBLISHED for row in sweep.outcomes] == [True] * 3, sweep
    assert sweep.code == 0
    runs = [store(sweep.folder).get_run(row["mlflow_run_id"]).data for row in sweep.outcomes]
    assert len(stored_runs(sweep.folder)) == 3
    assert [(run.params["replicas"], run.params["parallelism"]) for run in runs] == [("1", "native"), ("2", "native"), ("2", "horovod")]
    written = [json.loads((Path(row["folder"]) / "run.json").read_text()) for row in sweep.outcomes]
    assert [(run["nodes"], run["world_size"]) for run in written] == [(1, 1), (2, 2), (2, 2)]
    assert [row["run"].endswith("-2nodes") for row in sweep.outcomes] == [False, True, True]
    assert all(row["efficiency"] is not None for row in read_table(sweep))


def read_table(result: Result) -> list[Any]:
    """The metrics of the runs in the store."""
    return [{"efficiency": run.data.metrics.get("efficiency")} for run in stored_runs(result.folder)]


def test_throughput_is_that_of_all_nodes(sweep: Result) -> None:
    assert_total_throughput(sweep)


def test_two_nodes_train_as_one_replica(sweep: Result) -> None:
    assert_trained_alike(sweep)


def test_each_frameworks_own_way_reaches_over_nodes(
    cluster: clusters.Cluster,
    sweep: Result,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    framework_python: Callable[[str], Path],
) -> None:
    """JAX, MXNet, TensorFlow, Paddle and CNTK train what PyTorch alone does. Those that are there."""
    combined = []
    for name in ("jax", "mxnet", "paddle", "tensorflow", "cntk"):
        with contextlib.suppress(pytest.skip.Exception):
            framework_python(name)
            combined.append(f"{{framework: {name}}}")
    result = cluster.train(
        tmp_path, "-m", f"hydra.sweeper.cells=[{', '.join(combined)}]", "data=digits", "batch_size=64", "epochs=1", "replicas=2",
        *CPU, *QUICK, *BLOCKS, env=with_environments(tmp_path_factory),
    )  # fmt: skip
    # `invalid`: on a loaded machine short blocks can not be trusted, which is no matter here
    assert combined and [row["outcome"] in (*PUBLISHED, "invalid") for row in result.outcomes] == [True] * len(combined), result
    alone = losses_of(sweep.outcomes[0])
    for row in result.outcomes:
        np.testing.assert_allclose(losses_of(row)[:8], alone[:8], rtol=1e-3)
        told = [json.loads((Path(row["folder"]) / f"events.{rank}.jsonl").read_text().splitlines()[0]) for rank in range(2)]
        assert told[1]["host"] == "n2" != told[0]["host"]


def test_the_sbatch_file_runs_and_goes_on(cluster: clusters.Cluster, tmp_path: Path, cache: Path) -> None:
    own = {"PYTHON": sys.executable, "TRAIN": str(TRAIN)}
    command = ["sbatch", "--parsable", str(ROOT / "launchers" / "slurm.sbatch"), *FAKE[:2], *CPU[1:], "replicas=2", *QUICK]
    for jobs in (1, 2):
        done = subprocess.run(command, cwd=tmp_path, env={**cluster.env, **own}, capture_output=True, text=True)
        job = done.stdout.strip()
        assert cluster.wait(job) == 0, (done, [path.read_text() for path in tmp_path.glob("crosstrain-*.out")])
        assert (tmp_path / f"crosstrain-{job}.out").is_file() and len(stored_runs(tmp_path)) == 1, jobs


# -- what is refused ----------------------------------------------------------------------------------------------------------


def refused(result: Result) -> str:
    """The one line with which nothing was started."""
    text = result.out + result.err
    assert result.code == 2 and text.count("\n") == 1 and text.startswith("error: launcher=slurm: "), result
    assert not (result.folder / "outputs").exists() and not (result.folder / "mlruns").exists()
    return text


def test_outside_of_a_job_nothing_starts(tmp_path: Path, cluster: clusters.Cluster) -> None:
    assert "SLURM_JOB_ID is not set" in refused(run_train(tmp_path, *FAKE, env={"SLURM_JOB_ID": "", **slurm_conf(cluster)}))
    allocated = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", **slurm_conf(cluster)}
    assert "not on one of its nodes" in refused(run_train(tmp_path, *FAKE, env=allocated))  # a shell of salloc on a login node


def slurm_conf(cluster: clusters.Cluster) -> dict[str, str]:
    return {"SLURM_CONF": cluster.env["SLURM_CONF"]}


def test_without_slurm_nothing_starts(tmp_path: Path) -> None:
    assert "there is no srun on PATH" in refused(run_train(tmp_path, *FAKE, env={"PATH": "/nowhere"}))


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--ntasks=2"], "more than once"), (["--ntasks=1", "--nodes=1", "--nodelist=n2"], "runs on n2; start it on the first node")],
)
def test_the_driver_is_one_process_on_the_first_node(options: list[str], words: str, cluster: clusters.Cluster, tmp_path: Path) -> None:
    step = ["salloc", "--quiet", "--nodes=2", "srun", *options, sys.executable, str(TRAIN), *FAKE]
    done = subprocess.run(step, cwd=tmp_path, env=cluster.env, capture_output=True, text=True, timeout=120)
    ours = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and ours and all(words in line for line in ours), done
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["results", "cache"])
def test_all_nodes_must_see_the_files(what: str, cluster: clusters.Cluster, tmp_path: Path, cache: Path) -> None:
    """n2 has another folder where n1 has this one."""
    own = cluster.hidden / what
    own.mkdir()
    env = {"CROSSTRAIN_CACHE": str(own if what == "cache" else cache)}
    result = cluster.train(own if what == "results" else tmp_path, *FAKE, env=env)
    assert f"node n2 does not see {own}" in refused(result)


def test_drivers_in_one_job_take_turns_as_steps_of_salloc(cluster: clusters.Cluster, tmp_path: Path, cache: Path) -> None:
    """Each of them would have both nodes: two runs never share a device."""
    train = f"{slurm.ONE_STEP} {sys.executable} {TRAIN} {' '.join([*FAKE, *QUICK])} replicas=2"
    both = f"{train} >1.out 2>&1 & {train} >2.out 2>&1; code=$?; wait $! && exit $code"
    done = subprocess.run(["salloc", "--quiet", "--nodes=2", "--cpus-per-task=2", "sh", "-c", both], cwd=tmp_path, env=cluster.env)
    said = [(tmp_path / name).read_text() for name in ("1.out", "2.out")]
    assert done.returncode == 0, said
    folders = [Path(run.parent) for run in tmp_path.glob("outputs/*/*/run.json")]
    assert len(folders) == 2 and [json.loads((folder / "run.json").read_text())["nodes"] for folder in folders] == [2, 2]
    times = [[json.loads(line)["t"] for line in (folder / "events.0.jsonl").read_text().splitlines()] for folder in folders]
    first, second = sorted(times)
    assert first[-1] < second[0], said


def test_what_an_allocation_can_not_do_is_one_cell(cluster: clusters.Cluster, tmp_path: Path, cache: Path) -> None:
    cells = "hydra.sweeper.cells=[{replicas: 3}, {replicas: 6}, {replicas: 2, launcher.nodes: 4}, {replicas: 2, threads: 2}]"
    result = cluster.train(tmp_path, "-m", cells, *FAKE, "scaling=weak", "batch_size=32", "framework.step_ms=20", *QUICK)
    uneven, many, nodes, last = result.outcomes
    assert [row["outcome"] for row in (uneven, many, nodes)] == ["unsupported"] * 3, result
    assert "3 replicas can not be spread evenly over 2 nodes (launcher.nodes=1)" in uneven["reason"]
    assert "asked for 3 x 1 threads on each of 2 nodes; this machine has 2 logical CPUs" in many["reason"]
    assert "launcher.nodes=4: the allocation has 2" in nodes["reason"]
    # CASES 1: the samples of all replicas; one on each node may have both CPUs there
    assert last["outcome"] in PUBLISHED and last["step_ms"] >= 19.5, result
    assert last["samples_per_s"] == pytest.approx(2 * 32 * 1000 / last["step_ms"], rel=1e-6)
    assert result.code == 1


def test_an_adapter_for_one_machine_says_so() -> None:
    run = {"network": {"ops": [], "parameters": [], "target": {"kind": "class"}}, "device": "cpu", "precision": "fp32", "replicas": 2,
           "world_size": 2, "nodes": 2, "framework": {"name": "it"}}  # fmt: skip
    adapter = base.Base(run)
    adapter.max_replicas = 2
    with pytest.raises(base.Unsupported, match="on one machine only, asked for 2"):
        adapter.check()
    adapter.several_machines = True
    adapter.check()
    reduced = base.Base({**run, "parallelism": "horovod"})
    reduced.max_replicas = 2
    reduced.check()


# -- faults -------------------------------------------------------------------------------------------------------------------


def test_a_rank_on_another_node_that_fails_is_the_reason(cluster: clusters.Cluster, tmp_path: Path, cache: Path) -> None:
    """And the next run has the devices."""
    cells = (
        "hydra.sweeper.cells=[{framework.fault: raise}, {framework.fault: grandchild}, {framework.fault: hang}, "
        "{framework.fault: device_oom}, {framework.fault: none}]"
    )
    result = cluster.train(tmp_path, "-m", cells, *FAKE, "replicas=2", "framework.fault_rank=1", "measure.timeouts.stall_s=5", *QUICK)
    raised, grandchild, hung, memory, after = result.outcomes
    assert (raised["outcome"], raised["phase"]) == ("crashed", "iteration"), result
    assert "rank 1: RuntimeError: asked to raise" in raised["reason"]
    assert grandchild["outcome"] == "crashed" and "with a grandchild left behind" in grandchild["reason"]
    assert hung["outcome"] == "timeout" and memory["outcome"] == "device_oom" and after["outcome"] in PUBLISHED, result
    assert [workers_of(Path(row["folder"])) for row in result.outcomes] == [[]] * 5
    assert [run.info.status for run in stored_runs(tmp_path)] == ["FAILED"] * 4 + ["FINISHED"]


@pytest.fixture
def running(cluster: clusters.Cluster, tmp_path: Path, cache: Path) -> Iterator[tuple[str, Path]]:
    """(job, run folder) of a run on both nodes that would go on for a long time."""
    job = cluster.submit(tmp_path, *LONG)
    folder = wait_for(lambda: run_folder_in_phase(tmp_path, "iteration"), 120, "the run")
    pids = [wait_for(lambda rank=rank: rank_pid(folder, rank), 60) for rank in range(2)]
    assert [node_of(pid) for pid in pids] == ["n1", "n2"]
    yield job, folder
    cluster.ask("scancel", job)
    cluster.wait(job)


def node_of(pid: int) -> str:
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(entry.partition(b"=")[2].decode() for entry in environ if entry.startswith(b"SLURMD_NODENAME="))


def test_a_killed_rank_ends_the_run(running: tuple[str, Path], cluster: clusters.Cluster, tmp_path: Path) -> None:
    job, folder = running
    os.kill(wait_for(lambda: rank_pid(folder, 1)), signal.SIGKILL)
    wait_for(lambda: not workers_of(folder), 15, "nothing of the run is left")
    assert cluster.wait(job) == 1
    row = Result(1, "", "", tmp_path).only
    assert (row["outcome"], row["phase"]) == ("crashed", "iteration")
    assert "rank 1: the worker died by SIGKILL" in row["reason"]


def test_a_cancelled_job_is_interrupted(running: tuple[str, Path], cluster: clusters.Cluster, tmp_path: Path) -> None:
    job, folder = running
    cluster.ask("scancel", job)
    wait_for(lambda: not workers_of(folder), 15, "nothing of the run is left")
    cluster.wait(job)
    row = Result(1, "", "", tmp_path).only
    assert row["outcome"] == "interrupted", (tmp_path / "job.out").read_text()
    assert [run.info.status for run in stored_runs(tmp_path)] == ["KILLED"]


def test_nothing_outlives_a_killed_driver(running: tuple[str, Path], cluster: clusters.Cluster, tmp_path: Path) -> None:
    job, folder = running
    driver = next(pid for pid in cluster.processes() if is_driver(pid, tmp_path))
    os.kill(driver, signal.SIGKILL)
    wait_for(lambda: not workers_of(folder), 15, "nothing of the run is left")
    assert cluster.wait(job) == 128 + signal.SIGKILL


def is_driver(pid: int, cwd: Path) -> bool:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return str(TRAIN).encode() in command[1:2] and Path(f"/proc/{pid}/cwd").resolve() == cwd.resolve()
    return False


# -- sweeps of jobs -----------------------------------------------------------------------------------------------------------


def submitit(cluster: clusters.Cluster, folder: Path, *arguments: str) -> Result:
    """train.py -m outside of any job, each cell as a job of its own with two nodes."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs environment: pip install crosstrain[slurm]")
    jobs = ["hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2", "hydra.launcher.cpus_per_task=1", "hydra.launcher.timeout_min=5"]
    return run_train(folder, "-m", *jobs, *arguments, env=slurm_conf(cluster))


def test_a_sweep_of_jobs_is_one_sweep(cluster: clusters.Cluster, tmp_path: Path, cache: Path) -> None:
    several = "hydra.sweeper.cells=[{replicas: 1}, {replicas: 2}, {replicas: 2, framework.fault: raise}]"
    result = submitit(cluster, tmp_path, several, *FAKE, *QUICK[1:])
    assert result.code == 1 and len(result.outcomes) == 3, result
    rows = {(row["replicas"], "framework.fault=raise" in row["overrides"]): row for row in result.outcomes}
    assert rows[2, True]["outcome"] == "crashed", result
    assert rows[1, False]["outcome"] in PUBLISHED and rows[2, False]["outcome"] in PUBLISHED, result
    assert json.loads((Path(rows[2, False]["folder"]) / "run.json").read_text())["nodes"] == 2
    folder = Path(rows[1, False]["folder"]).parent
    assert (folder / "report" / "report.html").is_file() and len(list(folder.glob("0*"))) == 3
    runs = stored_runs(tmp_path)
    assert len(runs) == 3 and {run.data.tags["sweep"] for run in runs} == {folder.name}
    assert store(tmp_path).get_run(rows[2, False]["mlflow_run_id"]).data.metrics["efficiency"] > 0
    # what is done is left out, and does not count as missing
    again = submitit(cluster, tmp_path, "replicas=1,2", *FAKE, *QUICK[1:], "skip_finished=true")
    assert again.code == 0 and len(stored_runs(tmp_path)) == 3, again


# -- what the ranks tell each other -------------------------------------------------------------------------------------------


def links(folder: Path) -> list[agreement.Agreement]:
    run = {"folder": str(folder), "world_size": 3, "nodes": 3, "address": "127.0.0.1", "run_id": "0123456789abcdef" * 2}
    return [agreement.Agreement(str(folder), rank, 3, agreement.link(run, rank)) for rank in range(3)]


def test_decisions_go_over_the_network_and_to_those_alone_who_know_the_run(tmp_path: Path) -> None:
    ranks = links(tmp_path)
    host, port = (tmp_path / agreement.ADDRESS).read_text().split()
    found: dict[int, list[Any]] = {1: [], 2: []}

    def follow(rank: int) -> None:
        for what in ("iterations", "steady"):
            found[rank].append(ranks[rank].share(what, None))

    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"x" * 32)
        followers = [threading.Thread(target=follow, args=(rank,)) for rank in (1, 2)]
        for follower in followers:
            follower.start()
        assert ranks[0].share("iterations", lambda: 7) == 7
        ranks[0].share("steady", lambda: {"start": 3})
        for follower in followers:
            follower.join(20)
        assert found == {1: [7, {"start": 3}], 2: [7, {"start": 3}]}
        stranger.settimeout(20)
        assert stranger.recv(100) == b""


def test_without_rank_0_the_others_wait_to_be_stopped(tmp_path: Path) -> None:
    """A rank that gave up by itself might be taken for the cause."""
    ranks = links(tmp_path)
    follower = threading.Thread(target=lambda: ranks[1].share("iterations", None), daemon=True)
    follower.start()
    other = threading.Thread(target=lambda: ranks[2].share("iterations", None), daemon=True)
    other.start()
    ranks[0].link.send(b"")
    for line in ranks[0].link.lines:
        line.close()
    time.sleep(0.5)
    assert follower.is_alive() and other.is_alive()


def started(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_no_rank_leaves_before_all_have_come(tmp_path: Path) -> None:
    """MXNet's scheduler ended with rank 0 while its word that all had met was still on its way to another rank."""
    ranks = links(tmp_path)
    early = [started(ranks[rank].leave_together) for rank in (0, 1)]
    time.sleep(0.5)
    assert all(rank.is_alive() for rank in early)
    ranks[2].leave_together()
    for rank in early:
        rank.join(20)
    assert not any(rank.is_alive() for rank in early)


def test_a_rank_that_is_gone_keeps_nobody(tmp_path: Path) -> None:
    ranks = links(tmp_path)
    ranks[2].link.connect()
    ranks[2].link.socket.close()
    first = started(ranks[0].leave_together)
    ranks[1].leave_together()
    first.join(20)
    assert not first.is_alive()


def test_rank_0_is_the_last_to_end(tmp_path: Path) -> None:
    ranks = links(tmp_path)
    others = [started(ranks[rank].leave_together) for rank in (1, 2)]
    ranks[0].leave_together()
    for other in others:
        other.join(20)
    ranks[1].link.socket.close()
    first = started(ranks[0].stay_for_the_others)
    time.sleep(0.5)
    assert first.is_alive()
    ranks[2].link.socket.close()
    first.join(20)
    assert not first.is_alive()


def test_blocks_of_ranks() -> None:
    run = {"nodes": 2, "world_size": 6}
    assert [machines.local_rank(run, rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert machines.interface({"nodes": 2, "address": "127.0.0.1"}) == machines.interface({}) == "lo"


@pytest.mark.parametrize(
    ("device", "rank", "seen"), [("gpu", 1, "GPU-a,GPU-b"), ("gpu", 2, "4,5"), ("cpu", 1, ""), ("cpu", 2, "")]
)
def test_each_machine_has_gpus_of_its_own(device: str, rank: int, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    gpus = ["GPU-a", "GPU-b"] if device == "gpu" else []
    machines.choose_gpus({"nodes": 2, "world_size": 4, "device": device, "gpus": gpus}, rank)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    machines.choose_gpus({"world_size": 4, "device": device, "gpus": gpus}, rank)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-a"


def test_cpus_per_node_as_slurm_writes_them() -> None:
    assert slurm._expanded("72(x2),36") == [72, 72, 36]
    assert slurm._expanded("2") == [2]


# -- what is made of it ---------------------------------------------------------------------------------------------------------


def test_other_nodes_are_another_cell() -> None:
    def tracked(run_id: str, **tags: str) -> TrackedRun:
        params = {"framework": "torch", "network": "lenet", "replicas": "16", "gpus": "16", "repeat": run_id}
        return TrackedRun(run_id, "", "FINISHED", int(run_id), None, params, {"kind": "run", **tags}, {})

    found = cells.cells_of([tracked("1"), tracked("2", nodes="2"), tracked("3", nodes="1"), tracked("4", nodes="2")])
    assert [(cell.place, [run.run_id for run in cell.runs]) for cell in found] == [
        ("16 GPUs", ["1", "3"]),  # the first is of a time without the tag
        ("16 GPUs on 2 nodes", ["2", "4"]),
    ]


@pytest.mark.parametrize(
    ("said", "outcome"),
    [("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.", "host_oom"),
     ("srun: error: n2: task 1: Killed", "crashed")],
)  # fmt: skip
def test_a_rank_killed_for_memory_on_another_node(said: str, outcome: str) -> None:
    """There the kernel's own count is not this machine's."""
    nothing = np.empty(0, samples.ROW)
    files = measured.Files([{"status": "ok"}, None], [nothing, nothing], [], ["", ""], said)
    found = measured.failure(files, Ended([0, -signal.SIGKILL], "iteration", first=[1]), 0)
    assert found is not None and found.name == outcome


def test_clocks_of_several_machines_are_not_compared() -> None:
    ranks = [np.zeros(3, samples.ROW) for _ in range(2)]
    for rank, rows in enumerate(ranks):
        rows["phase"], rows["iteration"], rows["start"], rows["duration"] = BLOCK, range(3), 1000.0 - 900 * rank, 1.0 + rank
    assert list(samples.merge(ranks, one_clock=False).rows["start"]) == [1000.0] * 3
    assert list(samples.merge(ranks).rows["start"]) == [100.0] * 3
    assert list(samples.merge(ranks, one_clock=False).rows["duration"]) == [2.0] * 3
