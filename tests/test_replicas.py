"""Several replicas of one model: the same training as with one, all ranks in step, and an end for all when one is lost."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import contracts
from conftest import PUBLISHED, QUICK, TRAIN, Result, Train, run_folder_in_phase, run_train, store, wait_for, workers_of
from crosstrain import launch, parity, parity_replicas, samples
from crosstrain.environments import Environment
from crosstrain.networks import Network, Spec, initial_weights
from crosstrain.networks.reference import Reference
from crosstrain.networks.spec import classes, image, tokens
from crosstrain_worker.agreement import FILE, Agreement
from crosstrain_worker.frameworks import base, on_fake
from crosstrain_worker.record import BLOCK, ITERATION
from crosstrain_worker.record import TRAIN as TRAINED
from ladders import framework_json

TWO = ["device=cpu", "replicas=2", "threads=1", "device.oversubscribe=true"]
#: that can do it
FRAMEWORKS = [name for name in contracts.NAMES if 2 in contracts.OF[name].DEVICES]


# -- agreement -------------------------------------------------------------------------------------------------------------


def test_one_rank_decides_without_a_file(tmp_path: Path) -> None:
    alone = Agreement(str(tmp_path), 0, 1)
    assert alone.share("iterations", lambda a, b: a + b, 2, 3) == 5
    assert list(tmp_path.iterdir()) == []


def test_rank_0_decides_and_the_others_wait_for_it(tmp_path: Path) -> None:
    ranks = [Agreement(str(tmp_path), rank, 3) for rank in range(3)]
    asked: list[int] = []

    def decide(rank: int, value: Any) -> Any:
        asked.append(rank)
        return value

    found: dict[int, list[Any]] = {1: [], 2: []}

    def follow(rank: int) -> None:
        for what in ("iterations", "steady", "block"):
            found[rank].append(ranks[rank].share(what, decide, rank, None))

    followers = [threading.Thread(target=follow, args=(rank,)) for rank in (1, 2)]
    for follower in followers:
        follower.start()
    values = [12, {"start": 3, "reason": "steady – ok"}, 0]
    for what, value in zip(("iterations", "steady", "block"), values, strict=True):
        time.sleep(0.02)
        assert all(len(own) == len(asked) for own in found.values())  # nobody is ahead of rank 0
        assert ranks[0].share(what, decide, 0, value) == value
        wait_for(lambda: all(len(own) == len(asked) for own in found.values()), 5)
    for follower in followers:
        follower.join(5)
    assert found == {1: values, 2: values}
    assert asked == [0, 0, 0]


def test_a_decision_counts_when_its_line_is_whole(tmp_path: Path) -> None:
    follower = Agreement(str(tmp_path), 1, 2)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(follower.share("block", None)), daemon=True)
    thread.start()
    with open(tmp_path / FILE, "ab", buffering=0) as out:
        out.write(b'{"block": 12')
        time.sleep(0.05)
        assert found == []
        out.write(b'34}\n{"narrow": true}\n')
    thread.join(5)
    assert found == [1234]
    assert follower.share("narrow", None) is True


def test_ranks_out_of_step_are_told(tmp_path: Path) -> None:
    Agreement(str(tmp_path), 0, 2).share("block", lambda: 3)
    with pytest.raises(RuntimeError, match="rank 1 is out of step"):
        Agreement(str(tmp_path), 1, 2).share("iterations", None)


def rows_of(folder: Path) -> list[np.ndarray]:
    """Each rank's rows."""
    world = json.loads((folder / "run.json").read_text())["world_size"]
    return [samples.read(folder / f"samples.{rank}.bin") for rank in range(world)]


def test_all_ranks_do_what_rank_0_decides(train: Train) -> None:
    """The fake's ranks do not wait for each other, so by themselves they would stop at different moments."""
    result = train("framework=fake", "framework.step_ms=2", "data=synthetic", *TWO, "measure=standard", "measure.min_s=1",
                   "measure.max_s=3", "measure.block_s=0.05", "measure.min_iterations=20")  # fmt: skip
    assert result.only["outcome"] in PUBLISHED, result
    folder = Path(result.only["folder"])
    first, second = rows_of(folder)
    assert len(first) > 50
    for field in ("phase", "iteration", "size"):
        assert np.array_equal(first[field], second[field])
    decisions = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    counts = [decision["iterations"] for decision in decisions if "iterations" in decision]
    assert counts[-1] == 0 and sum(counts) + 1 == np.sum(first["phase"] == ITERATION)
    assert counts[:4] == [1, 1, 1, 1] and max(counts) > 10  # single ones first, then about 0.25 s together
    blocks = [decision["block"] for decision in decisions if "block" in decision]
    assert blocks == [*first["size"][first["phase"] == BLOCK], 0]
    results = [json.loads((folder / f"result.{rank}.json").read_text()) for rank in (0, 1)]
    assert results[0]["steady"] == results[1]["steady"] and results[0]["ci_missed"] == results[1]["ci_missed"]


def test_without_rank_0_nobody_waits_for_ever(train: Train) -> None:
    result = train("framework=fake_raise", "framework.step_ms=1", "data=synthetic", *TWO, "measure=standard", "framework.fault_iteration=3")
    assert result.only["outcome"] == "crashed"
    assert "RuntimeError: asked to raise" in result.only["reason"] and "rank 1" not in result.only["reason"]
    assert workers_of(Path(result.only["folder"])) == []


@pytest.mark.parametrize(("way", "ranks"), [("one", 2), ("all", 1)])
def test_how_many_ranks_is_the_frameworks_own_fact(way: str, ranks: int) -> None:
    run = {"network": language().to_json(), "device": "cpu", "precision": "fp32", "replicas": 2,
           "framework": {"name": "it", "fault": "none"}}  # fmt: skip
    right, wrong = (on_fake.Framework({**run, "world_size": world_size}) for world_size in (ranks, 3 - ranks))
    right.replicas_per_rank = wrong.replicas_per_rank = way
    right.ops = wrong.ops = {op["op"] for op in run["network"]["ops"]}
    base.Base.check(right)
    with pytest.raises(base.Unsupported, match=f"it needs {ranks} ranks for replicas=2, it got {3 - ranks}"):
        base.Base.check(wrong)


@pytest.mark.parametrize("name", contracts.NAMES)
def test_the_driver_and_the_adapter_agree_on_the_ranks(name: str) -> None:
    adapter = importlib.import_module(f"crosstrain_worker.frameworks.on_{name}").Framework
    assert adapter.replicas_per_rank == contracts.settings(name)["replicas_per_rank"]
    assert (adapter.max_replicas > 1) == (name in FRAMEWORKS)


# -- the same training -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FRAMEWORKS)
def sweep(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, framework_python: Callable[[str], Path]
) -> tuple[str, Result]:
    """(framework, LeNet on the digits with one replica and with two)."""
    framework_python(request.param)
    return request.param, run_train(
        tmp_path_factory.mktemp("replicas"), "-m", f"framework={request.param}", "replicas=1,2", "device=cpu", "threads=1",
        "network=lenet", "data=digits", "batch_size=64", "epochs=1", "device.oversubscribe=true", *QUICK, "measure.min_blocks=5",
        "measure.block_s=0.3",  # in a shorter one the read-back behind it counts for too much
    )  # fmt: skip


def folders_of(sweep: Result) -> list[Path]:
    return [Path(row["folder"]) for row in sweep.outcomes]


def test_each_cell_is_one_published_run(sweep: tuple[str, Result]) -> None:
    name, result = sweep
    assert [row["outcome"] in PUBLISHED for row in result.outcomes] == [True] * 2, result
    runs = [store(result.folder).get_run(row["mlflow_run_id"]) for row in result.outcomes]
    assert len(result.runs) == 2
    assert [run.data.params["replicas"] for run in runs] == ["1", "2"]
    assert [run.data.params["batch_per_replica"] for run in runs] == ["64", "32"]
    ranks = 2 if contracts.settings(name)["replicas_per_rank"] == "one" else 1
    assert [len(rows_of(folder)) for folder in folders_of(result)] == [1, ranks]


def test_throughput_is_that_of_all_replicas_and_of_the_slowest_rank(sweep: tuple[str, Result]) -> None:
    row = sweep[1].outcomes[1]
    ranks = rows_of(Path(row["folder"]))
    blocks = [(rows["duration"] / rows["size"])[rows["phase"] == BLOCK] for rows in ranks]
    step_s = float(np.median(np.max(blocks, axis=0)))
    assert row["step_ms"] == pytest.approx(1000 * step_s, rel=1e-6)
    assert row["samples_per_s"] == pytest.approx(64 / step_s, rel=1e-6)


def test_two_replicas_train_as_one(sweep: tuple[str, Result]) -> None:
    """The losses of every iteration, and what comes out on the test set, whose last batch is a smaller one."""
    result = sweep[1]
    losses, epochs = [], []
    for folder, row in zip(folders_of(result), result.outcomes, strict=True):
        merged = samples.merge(rows_of(folder)).rows
        losses.append(merged["loss"][merged["phase"] == TRAINED])
        run = store(result.folder).get_run(row["mlflow_run_id"])
        epochs.append([run.data.metrics[key] for key in ("epoch/loss", "epoch/test_loss", "epoch/accuracy")])
    assert len(losses[0]) == 22
    assert losses[0][-1] < 0.7 * losses[0][0]
    # the same sums in another order: rounding grows from step to step
    np.testing.assert_allclose(losses[1][:8], losses[0][:8], rtol=1e-4)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)
    np.testing.assert_allclose(epochs[1], epochs[0], rtol=1e-2)


def test_every_replica_has_a_device_of_its_own(sweep: tuple[str, Result]) -> None:
    name, result = sweep
    for replicas, folder in enumerate(folders_of(result), start=1):
        run = json.loads((folder / "run.json").read_text())
        results = [json.loads((folder / f"result.{rank}.json").read_text()) for rank in range(run["world_size"])]
        assert [found["effective"]["device"] for found in results] == [contracts.OF[name].DEVICES[replicas]] * run["world_size"]
        assert all(found["effective"]["threads"] == 1 and found["parameters_changed"] for found in results)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_separate_batch_statistics_are_declared(name: str) -> None:
    net = Network("normed", image(1, 4, 4), classes(2))
    net.add("batch_norm", "bn")
    net.add("flatten", "flat")
    net.add("linear", "fc", out=2)
    adapter = importlib.import_module(f"crosstrain_worker.frameworks.on_{name}").Framework
    run = {"network": net.finish().to_json(), "device": "cpu", "precision": "fp32", "threads": 1, "world_size": 1, "replicas": 1}
    run["framework"] = contracts.settings(name)
    words = "statistics are each replica's own"
    assert words not in adapter(run).deviations.get("bn", "")
    found = adapter({**run, "replicas": 2}).deviations
    assert set(found) == {"bn"} and words in found["bn"]


# -- level 9 of the parity ladder ------------------------------------------------------------------------------------------


def language() -> Spec:
    """Nearly every way in which parameters reach a loss: shared, through time, with a second bias that is frozen."""
    net = Network("language", tokens(6), classes(20))
    net.add("embedding", "embed", vocabulary=20, width=8)
    net.add("lstm", "lstm1", hidden=8)
    net.add("dropout", "drop", rate=0.5)
    net.add("attention", "attend", heads=2, causal=True)
    net.add("tied_linear", "head", tied="embed", transpose=False)
    return net.finish()


class Replicas:
    """Data parallelism written down with two references. `wrong` names what it does wrong."""

    def __init__(self, spec: Spec, run: dict[str, Any], wrong: str, clip_norm: float | None) -> None:
        weights = initial_weights.split(spec, np.load(run["weights"]))
        self.wrong, self.rule = wrong, {**run["optimizer"], "clip_norm": clip_norm}
        self.replicas = [Reference(spec, {k: v.copy() for k, v in weights.items()}, self.rule) for _ in range(2)]

    def step(self, halves: list[tuple[Any, Any]]) -> list[float]:
        found = [replica.gradients(*half) for replica, half in zip(self.replicas, halves, strict=True)]
        gradients = [dict(own) for _, own in found]
        if self.wrong == "clipped before the reduction" and self.rule["clip_norm"] is not None:
            for own in gradients:
                norm = np.sqrt(sum(float(np.vdot(g, g)) for g in own.values()))
                own.update({name: g * min(1.0, self.rule["clip_norm"] / norm) for name, g in own.items()})
        share = 1.0 if self.wrong == "added, not averaged" else 0.5
        mean = {name: share * (gradients[0][name] + gradients[1][name]) for name in gradients[0]}
        for index, replica in enumerate(self.replicas):
            own = gradients[index] if self.wrong == "not reduced" else mean
            if self.wrong == "one replica forgotten" and index == 1:
                continue
            replica._backward = lambda *_, own=own: (0.0, {k: v.copy() for k, v in own.items()}, {})  # type: ignore[method-assign]
            replica.step(None, None)  # type: ignore[arg-type]
            del replica._backward  # type: ignore[misc]
        return [loss for loss, _ in found]


def ranks_of(spec: Spec, run: dict[str, Any], wrong: str = "") -> list[dict[str, np.ndarray]]:
    """What two ranks of one replica each would write."""
    inputs, targets = (np.load(run["data"]["train"][key]) for key in ("inputs", "targets"))
    found: list[dict[str, np.ndarray]] = [{}, {}]
    for clipping, norm in (("clipped", run["optimizer"]["clip_norm"]), ("unclipped", None)):
        both = Replicas(spec.with_attributes("dropout", rate=0.0), run, wrong, norm)
        traces: list[list[float]] = []
        for step in range(5):
            at = 8 * (step % 4)
            traces.append(both.step([(inputs[at + i : at + i + 4], targets[at + i : at + i + 4]) for i in (0, 4)]))
        for rank, replica in enumerate(both.replicas):
            found[rank][f"{clipping}/trace"] = np.array(traces)[:, rank]
            found[rank].update({f"{clipping}/0/{name}": value.astype(np.float32) for name, value in replica.parameters.items()})
    return found


@pytest.mark.usefixtures("cache")
def test_averaged_replicas_pass(tmp_path: Path) -> None:
    spec = language()
    run = parity.ladder_run_json(spec, framework_json("fake"), tmp_path)
    level = parity_replicas.judge(spec, run, ranks_of(spec, run))
    assert (level.level, level.state) == ("9", "passed"), level


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("wrong", ["added, not averaged", "not reduced", "clipped before the reduction", "one replica forgotten"])
def test_a_wrong_reduction_fails(wrong: str, tmp_path: Path) -> None:
    spec = language()
    run = parity.ladder_run_json(spec, framework_json("fake"), tmp_path)
    assert parity_replicas.judge(spec, run, ranks_of(spec, run, wrong)).state == "failed"


def test_where_there_is_nothing_to_compare() -> None:
    net = Network("normed", image(1, 4, 4), classes(2))
    net.add("batch_norm", "bn")
    net.add("flatten", "flat")
    net.add("linear", "fc", out=2)
    assert "batch norm" in parity_replicas.why_not(net.finish(), "cpu", 0)
    assert parity_replicas.why_not(language(), "gpu", 1) == "1 GPU"
    assert parity_replicas.why_not(language(), "cpu", 0) == parity_replicas.why_not(language(), "gpu", 2) == ""


def measured(python: Path, run: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """The ranks of a level 9 run in a framework."""
    folder = Path(run["folder"])
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(run))
    ranks = launch.start(run, Environment(python, "", managed=True, isolated=True), {})
    for rank in ranks:
        rank.wait(120)
    assert [rank.poll() for rank in ranks] == [0] * len(ranks), [path.read_text() for path in folder.glob("*.err")]
    return parity_replicas.read(folder, run)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_frameworks_replicas_pass_and_a_wrong_rate_fails(
    name: str, framework_python: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, spec = framework_python(name), language()
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(tmp_path / "cache"))
    ladder = parity.ladder_run_json(spec, contracts.settings(name), tmp_path)
    run = parity_replicas.run_json(ladder, tmp_path / "replicas")
    right = measured(python, run)
    level = parity_replicas.judge(spec, ladder, right)
    assert level.state == "passed", level
    other = {**ladder, "optimizer": {**ladder["optimizer"], "learning_rate": ladder["optimizer"]["learning_rate"] * 2}}
    assert parity_replicas.judge(spec, other, right).state == "failed"


# -- faults ------------------------------------------------------------------------------------------------------------------


def rank_pid(folder: Path, rank: int) -> int | None:
    """The worker of this rank."""
    for pid in workers_of(folder):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").endswith(b"%s\0%d" % (os.fsencode(folder), rank)):
                return pid
    return None


def test_a_killed_rank_ends_the_run_at_once(start_train, tmp_path: Path, framework_python: Callable[[str], Path]) -> None:  # type: ignore[no-untyped-def]
    """CASES 7, with ranks that really wait for each other."""
    framework_python("torch")
    driver = start_train("framework=torch", "network=lenet", "data=synthetic", *TWO, "measure=smoke", "measure.iterations=1000000")
    folder = wait_for(lambda: run_folder_in_phase(tmp_path, "iteration"))
    pid = wait_for(lambda: rank_pid(folder, 1))
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: not workers_of(folder), 15, "the other rank is stopped")
    assert driver.wait(30) == 1
    assert time.monotonic() - killed < 40
    row = Result(1, "", "", tmp_path).only
    assert (row["outcome"], row["phase"]) == ("crashed", "iteration")
    assert "rank 1: the worker died by SIGKILL" in row["reason"]  # and not that rank 0 lost it


@pytest.mark.long
def test_two_runs_at_once_need_no_port(tmp_path: Path, framework_python: Callable[[str], Path]) -> None:
    """CASES 6. Two caches, so that the runs do not wait for each other's CPUs; the first runs on until the second has ended."""
    command = [sys.executable, str(TRAIN), "framework=torch", f"framework.python={framework_python('torch')}", "network=lenet",
               "data=synthetic", *QUICK, *TWO]  # fmt: skip

    def started(name: str, *overrides: str) -> subprocess.Popen[bytes]:
        folder = tmp_path / name
        folder.mkdir()
        with open(folder / "out", "w") as out:
            environment = {**os.environ, "CROSSTRAIN_CACHE": str(folder / "cache")}
            return subprocess.Popen([*command, *overrides], cwd=folder, env=environment, stdout=out, stderr=out)

    with socket.socket() as taken, contextlib.ExitStack() as stack:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # taken by someone else is as good
            taken.bind(("", 29500))
            taken.listen()
        first = started("first", "measure.iterations=1500")  # about a minute, the second needs some 20 s
        stack.callback(first.kill)
        wait_for(lambda: run_folder_in_phase(tmp_path / "first", "iteration"), what="the first run's iterations")
        second = started("second")
        stack.callback(second.kill)
        codes = {"second": second.wait(180)}
        assert first.poll() is None, "they did not run at the same time"
        codes["first"] = first.wait(180)
    for name, code in codes.items():
        result = Result(code, (tmp_path / name / "out").read_text(), "", tmp_path / name)
        assert result.only["outcome"] in PUBLISHED, str(result)
