"""launcher=mpi: ranks on two machines by mpirun over a real ssh. The same results as on one, and the right ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import PUBLISHED, QUICK, TRAIN, Result, run_folder_in_phase, run_train, stored_runs, wait_for, workers_of
from crosstrain import paths
from crosstrain_worker import machines
from hosts import FIRST, OTHER, Hosts, start_hosts
from several import assert_total_throughput, assert_trained_alike, ranks_of
from test_replicas import rank_pid

CPU = ["launcher=mpi", f"launcher.hosts=[{FIRST},{OTHER}]", "device=cpu", "threads=1", "network=lenet"]
FAKE = ["framework=fake", "data=synthetic", *CPU]
#: a store takes seconds to make
JOURNAL = ["tracking=journal"]


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    running = start_hosts()
    yield running
    running.stop()


def where(row: dict[str, Any]) -> list[str]:
    """The host of each rank, as it says itself."""
    folder = Path(row["folder"])
    return [json.loads((folder / f"events.{rank}.jsonl").read_text().splitlines()[0])["host"] for rank in range(len(ranks_of(row)))]


# -- the same results ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory, framework_python: Callable[[str], Path]) -> Result:
    """LeNet on the digits in PyTorch: one replica, two of them on two machines, and these with Horovod."""
    framework_python("torch")
    framework_python("torch-horovod")
    cache = tmp_path_factory.mktemp("cache")
    (cache / "environments").symlink_to(paths.cache_dir("environments"))
    cells = 'hydra.sweeper.cells=[{parallelism: native, replicas: "1,2"}, {parallelism: horovod, replicas: 2}]'
    return hosts.train(
        tmp_path_factory.mktemp("sweep"), "-m", cells, "framework=torch", "data=digits", "batch_size=64", "epochs=1", *CPU, *QUICK,
        "measure.min_blocks=5", "measure.block_s=0.3", env={"CROSSTRAIN_CACHE": str(cache)},
    )  # fmt: skip


def test_two_hosts_are_one_published_run(sweep: Result) -> None:
    assert [row["outcome"] in PUBLISHED for row in sweep.outcomes] == [True] * 3, sweep
    assert sweep.code == 0
    runs = {run.info.run_id: run.data for run in stored_runs(sweep.folder)}
    assert len(runs) == 3
    assert [runs[row["mlflow_run_id"]].params["replicas"] for row in sweep.outcomes] == ["1", "2", "2"]
    assert [runs[row["mlflow_run_id"]].metrics.get("efficiency", 0) > 0 for row in sweep.outcomes] == [True] * 3
    assert [where(row) for row in sweep.outcomes] == [[FIRST], [FIRST, OTHER], [FIRST, OTHER]]
    assert [row["run"].endswith("-2nodes") for row in sweep.outcomes] == [False, True, True]


def test_throughput_is_that_of_all_hosts(sweep: Result) -> None:
    assert_total_throughput(sweep)


def test_two_hosts_train_as_one_replica(sweep: Result) -> None:
    assert_trained_alike(sweep)


# -- faults -------------------------------------------------------------------------------------------------------------------


def test_a_rank_on_another_host_that_fails_is_the_reason(hosts: Hosts, tmp_path: Path, cache: Path) -> None:
    """And the next run has the devices, with two ranks on each host."""
    cells = (
        "hydra.sweeper.cells=[{framework.fault: raise, replicas: 2}, {framework.fault: grandchild, replicas: 2}, "
        "{framework.fault: none, replicas: 4}]"
    )
    result = hosts.train(tmp_path, "-m", cells, *FAKE, "framework.fault_rank=1", "device.oversubscribe=true", *JOURNAL, *QUICK)
    raised, grandchild, after = result.outcomes
    assert (raised["outcome"], raised["phase"]) == ("crashed", "iteration"), result
    assert "rank 1: RuntimeError: asked to raise" in raised["reason"]
    assert grandchild["outcome"] == "crashed" and "with a grandchild left behind" in grandchild["reason"]
    assert after["outcome"] in PUBLISHED, result
    assert where(after) == [FIRST, FIRST, OTHER, OTHER]
    assert [workers_of(Path(row["folder"])) for row in result.outcomes] == [[]] * 3
    wait_for(lambda: not hosts.processes(), 30, "nothing is left on either host")


@pytest.fixture
def running(hosts: Hosts, tmp_path: Path, cache: Path) -> Iterator[Path]:
    """The folder of a run on both hosts that would go on for a long time."""
    endless = ["replicas=2", "framework.step_ms=10", "measure=smoke", "measure.iterations=1000000"]
    started = hosts.start_train(tmp_path, *FAKE, *JOURNAL, *endless, "+framework.env.ODD='a b;\"$c\"'")
    folder = wait_for(lambda: run_folder_in_phase(tmp_path, "iteration"), 120, "the run")
    yield folder
    for pid in drivers(tmp_path):
        os.kill(pid, signal.SIGTERM)
    started.wait(60)


def drivers(cwd: Path) -> list[int]:
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_driver(pid, cwd)]


def is_driver(pid: int, cwd: Path) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return str(TRAIN).encode() in command[1:2] and Path(f"/proc/{pid}/cwd").resolve() == cwd.resolve()
    except OSError:
        return False


def environ_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text().rstrip("\0").split("\0")
    return dict(pair.split("=", 1) for pair in pairs)


def ancestors(pid: int) -> Iterator[int]:
    while (pid := int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])) > 1:
        yield pid


def test_a_killed_rank_ends_the_run(hosts: Hosts, running: Path, tmp_path: Path) -> None:
    pids = [wait_for(lambda rank=rank: rank_pid(running, rank), 60) for rank in range(2)]
    assert [hosts.host_of(pid) for pid in pids] == [FIRST, OTHER]
    # The one on the other host came by ssh, but all see the same environment: not what a login or mpirun sets.
    (daemon,) = (pid for pid in ancestors(pids[1]) if Path(f"/proc/{pid}/comm").read_text().strip() == "orted")
    assert environ_of(daemon)["SSH_CONNECTION"].startswith("10.77.0.1 ")
    first, other = (environ_of(pid) for pid in pids)
    assert (first.pop("OMPI_COMM_WORLD_RANK"), other.pop("OMPI_COMM_WORLD_RANK")) == ("0", "1")
    assert first == other and first["ODD"] == 'a b;"$c"' and first["PATH"] == os.environ["PATH"]
    assert not any(name.startswith(("OMPI_", "PMIX_", "SSH_")) for name in first)
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: not hosts.processes(), 60, "nothing is left on either host")
    row = Result(1, "", "", tmp_path).only
    assert (row["outcome"], row["phase"]) == ("crashed", "iteration")
    assert "rank 1: the worker died by SIGKILL" in row["reason"]


def test_nothing_outlives_a_killed_driver(hosts: Hosts, running: Path, tmp_path: Path) -> None:
    (driver,) = drivers(tmp_path)
    os.kill(driver, signal.SIGKILL)
    wait_for(lambda: not hosts.processes(), 60, "nothing is left on either host")


def test_a_process_that_left_its_rank_on_the_other_host_is_found(hosts: Hosts, running: Path, tmp_path: Path) -> None:
    """mpirun does not know of it."""
    rank = wait_for(lambda: rank_pid(running, 1), 60)
    run_id = json.loads((running / "run.json").read_text())["run_id"]
    inside = ["nsenter", f"--target={rank}", "--net", "--uts", "--mount", "--pid", "setsid", "--fork", "sleep", "1001"]
    subprocess.run(inside, env={**os.environ, "CROSSTRAIN_RUN_ID": run_id}, check=True)
    lost = set(workers_of(running))
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: not workers_of(running), 60, "nothing of the run is left")
    assert any(pid != rank for pid in lost)


# -- what is refused ----------------------------------------------------------------------------------------------------------


def refused(result: Result) -> str:
    """The one line with which nothing was started."""
    text = result.out + result.err
    assert result.code == 2 and text.count("\n") == 1 and text.startswith("error: launcher"), result
    assert not (result.folder / "outputs").exists() and not (result.folder / "mlruns").exists()
    return text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launcher=mpi"], "launcher=mpi: no hosts are given; say launcher.hosts=[NAME,NAME"),
        (["launcher.hosts=[a,b]"], "launcher.hosts=[a,b]: launcher=local takes no hosts; say launcher=mpi"),
        (["launcher=mpi", "launcher.hosts=[a,a]"], "must be a list that names each host once"),
        (["launcher=mpi", "launcher.hosts=[a,--x]"], "must be a list of host names or IPv4 addresses"),
        (["launcher=mpi", "launcher.hosts=[192.0.2.1,b]"], "must be the machine where train.py runs; 192.0.2.1 is another one"),
        (["launcher=mpi", "launcher.hosts=[localhost,b]"], "localhost is 127.0.0.1 here, which no other machine reaches"),
    ],
)
def test_hosts_that_can_not_be(arguments: list[str], words: str, tmp_path: Path) -> None:
    assert words in refused(run_train(tmp_path, "framework=fake", *arguments))


def test_without_mpirun_nothing_starts(hosts: Hosts, tmp_path: Path) -> None:
    text = refused(hosts.train(tmp_path, *FAKE, env={"PATH": str(hosts.folder / "nothing")}))
    assert "there is no mpirun on PATH; on all hosts: apt-get install openmpi-bin" in text


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("PubkeyAuthentication=no", "Permission denied"),
        ("UserKnownHostsFile=/dev/null", "Host key verification failed"),
        ("Port=9", "Connection refused"),
    ],
)
def test_ssh_must_reach_every_host_without_a_question(option: str, words: str, hosts: Hosts, tmp_path: Path) -> None:
    agent = {"OMPI_MCA_plm_rsh_agent": f"ssh -o {option} -F {hosts.folder}/ssh_config"}
    text = refused(hosts.train(tmp_path, *FAKE, env=agent))
    assert f"mpirun can not start anything on {OTHER}: " in text and words in text
    assert hosts.processes() == []


@pytest.mark.parametrize("what", ["results", "cache"])
def test_all_hosts_must_see_the_files(what: str, hosts: Hosts, tmp_path: Path, cache: Path) -> None:
    own = hosts.hidden / what
    own.mkdir()
    env = {"CROSSTRAIN_CACHE": str(own if what == "cache" else cache)}
    result = hosts.train(own if what == "results" else tmp_path, *FAKE, env=env)
    assert f"node {OTHER} does not see {own}" in refused(result)


def test_what_the_hosts_can_not_do_is_one_cell(hosts: Hosts, tmp_path: Path, cache: Path) -> None:
    cells = "hydra.sweeper.cells=[{replicas: 3}, {replicas: 2000}, {replicas: 2, launcher.nodes: 4}]"
    result = hosts.train(tmp_path, "-m", cells, *FAKE, "scaling=weak", "batch_size=32", *JOURNAL, *QUICK)
    assert [row["outcome"] for row in result.outcomes] == ["unsupported"] * 3, result
    uneven, many, nodes = (row["reason"] for row in result.outcomes)
    assert "3 replicas can not be spread evenly over 2 nodes (launcher.nodes=1)" in uneven
    assert "asked for 1000 x 1 threads on each of 2 nodes; this machine has" in many and "in this job" not in many
    assert "launcher.nodes=4: launcher.hosts has 2" in nodes


def test_gpus_of_the_other_hosts_are_their_first(monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"nodes": 2, "world_size": 4, "replicas": 4, "device": "gpu", "gpus": ["GPU-c", "GPU-d"], "hosts": ["a", "b"]}
    for rank, seen in ((1, "GPU-c,GPU-d"), (2, "0,1"), (3, "0,1")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        machines.choose_gpus(run, rank)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
    machines.choose_gpus({**run, "device": "cpu", "gpus": []}, 2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
