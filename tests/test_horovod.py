"""parallelism=horovod: the same training as native data parallelism, through horovodrun; and how Horovod comes into an environment."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import contracts
from conftest import PUBLISHED, QUICK, Result, Train, run_folder_in_phase, run_train, store, wait_for, workers_of
from crosstrain import environments, launch, locks, parity, parity_replicas, processes, samples
from crosstrain.errors import OutcomeError
from crosstrain.launch.program import EXITS, Exits
from crosstrain_worker.record import TRAIN as TRAINED
from test_environments import HERE, Place, make, place, write_wheel  # noqa: F401
from test_replicas import language, rank_pid

FRAMEWORKS = locks.with_horovod()
#: of both kinds of environment, the pin of the framework itself
PINS = {name: [locks.find_lock(lock, "cpu").pins[0] for lock in (name, f"{name}-horovod")] for name in FRAMEWORKS}
#: those whose usual version Horovod works with
PAIRS = [name for name, (native, horovod) in PINS.items() if native == horovod]
ON_TWO = ["device=cpu", "replicas=2", "threads=1", "device.oversubscribe=true"]
TWO = ["parallelism=horovod", *ON_TWO]


def python_of(name: str, find: Callable[[str], Path]) -> Path:
    """The interpreter with Horovod. That of another version of the framework takes minutes to make, for two tests: only if it is there."""
    try:
        return find(f"{name}-horovod")
    except pytest.skip.Exception:
        if name in PAIRS:
            raise
        pytest.skip(f"crosstrain env make {name}-horovod makes it: another version of the framework, and compiling")


# -- the pair --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
def test_the_environments_of_a_pair_differ_by_horovod_alone(name: str) -> None:
    native, horovod = locks.find_lock(name, "cpu"), locks.find_lock(f"{name}-horovod", "cpu")
    assert horovod.distribution == native.distribution and horovod.python == native.python
    forced = {"setuptools"}  # Horovod's build wants an older one
    changed = {pin for pin in native.pins if pin not in horovod.pins}
    assert {package for package, _ in changed} <= forced


def test_most_have_it_in_their_usual_version() -> None:
    assert {"torch", "mxnet"} <= set(PAIRS)


@pytest.fixture(scope="module", params=PAIRS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, framework_python: Callable[[str], Path]
) -> tuple[str, Result]:
    """(framework, LeNet on the digits with two replicas, native and with Horovod)."""
    framework_python(f"{request.param}-horovod")
    return request.param, run_train(
        tmp_path_factory.mktemp("pair"), "-m", f"framework={request.param}", "parallelism=native,horovod", *ON_TWO,
        "network=lenet", "data=digits", "batch_size=64", "epochs=1", *QUICK, "measure.min_blocks=5", "measure.block_s=0.3",
    )  # fmt: skip


def test_both_are_published_runs_of_one_version(pair: tuple[str, Result]) -> None:
    name, result = pair
    assert [row["outcome"] in PUBLISHED for row in result.outcomes] == [True] * 2, result
    native, horovod = (store(result.folder).get_run(row["mlflow_run_id"]).data for row in result.outcomes)
    assert (native.params["parallelism"], horovod.params["parallelism"]) == ("native", "horovod")
    assert native.params["framework_version"] == horovod.params["framework_version"] != ""
    versions = [json.loads((Path(row["folder"]) / "environment.json").read_text())["versions"] for row in result.outcomes]
    assert "horovod" not in versions[0] and versions[1]["horovod"] == locks.find_lock(f"{name}-horovod", "cpu").horovod
    # how a framework is driven natively does not matter: with Horovod each replica has a rank of its own
    folder = Path(result.outcomes[1]["folder"])
    assert json.loads((folder / "run.json").read_text())["world_size"] == 2
    assert all((folder / file).is_file() for file in ("worker.1.out", "worker.1.err", "samples.1.bin", "result.1.json"))


def test_both_train_alike(pair: tuple[str, Result]) -> None:
    losses = []
    for row in pair[1].outcomes:
        folder = Path(row["folder"])
        world = json.loads((folder / "run.json").read_text())["world_size"]
        ranks = [samples.read(folder / f"samples.{rank}.bin") for rank in range(world)]
        losses.append(np.mean([rows["loss"][rows["phase"] == TRAINED] for rows in ranks], axis=0))
    assert len(losses[0]) == 22 and losses[0][-1] < 0.7 * losses[0][0]
    # the same sums in another order: rounding grows from step to step
    np.testing.assert_allclose(losses[1][:8], losses[0][:8], rtol=1e-4)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)


@pytest.mark.parametrize("name", sorted(set(FRAMEWORKS) - set(PAIRS)))
def test_another_version_must_be_asked_for(name: str, train: Train, framework_python: Callable[[str], Path]) -> None:
    python_of(name, framework_python)
    (_, native), (_, pinned) = PINS[name]
    result = train("-m", f"framework={name}", f"framework.version=null,{pinned}", "network=lenet", "data=synthetic", *TWO, *QUICK)
    refused, done = result.outcomes
    assert refused["outcome"] == "unsupported" and f"works with {name} {pinned}, and {native} is" in refused["reason"]
    assert f"framework.version={pinned}" in refused["reason"]
    assert done["outcome"] in PUBLISHED, result


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_replicas_pass_level_9_and_a_wrong_rate_fails(
    name: str, framework_python: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, spec = environments.Environment(python_of(name, framework_python), "", managed=True, isolated=True), language()
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(tmp_path / "cache"))
    ladder = parity.ladder_run_json(spec, contracts.settings(name), tmp_path, parallelism="horovod", run_id=os.urandom(16).hex())
    run = parity_replicas.run_json(ladder, tmp_path / "replicas")
    (tmp_path / "replicas").mkdir()
    (tmp_path / "replicas" / "run.json").write_text(json.dumps(run))
    ranks = launch.start(run, home, {})
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0], (tmp_path / "replicas" / "worker.0.err").read_text()
        assert [rank.poll() for rank in ranks] == [0, 0]
    finally:
        processes.stop_all(run["run_id"], [rank.pid for rank in ranks])
    found = parity_replicas.read(tmp_path / "replicas", run)
    level = parity_replicas.judge(spec, ladder, found)
    assert level.state == "passed", level
    other = {**ladder, "optimizer": {**ladder["optimizer"], "learning_rate": ladder["optimizer"]["learning_rate"] * 2}}
    assert parity_replicas.judge(spec, other, found).state == "failed"


# -- one replica, and what is refused ----------------------------------------------------------------------------------------


def test_one_replica_needs_no_horovodrun_and_others_are_refused_with_the_reason(
    train: Train, framework_python: Callable[[str], Path]
) -> None:
    framework_python("torch-horovod")
    result = train("-m", "framework=torch,fake", "parallelism=horovod", "replicas=1,2", "framework.memory_format=channels_last",
                   "network=lenet", "data=synthetic", "device=cpu", "threads=1", "device.oversubscribe=true", *QUICK)  # fmt: skip
    one, *refused = result.outcomes
    assert one["outcome"] in PUBLISHED, result
    folder = Path(one["folder"])
    assert json.loads((folder / "run.json").read_text())["world_size"] == 1 and not list(folder.glob("launcher.*"))
    assert "horovod" in json.loads((folder / "environment.json").read_text())["versions"]
    assert (result.code, [row["outcome"] for row in refused]) == (1, ["unsupported"] * 3)
    assert "contiguous" in refused[0]["reason"] and "channels_last" in refused[0]["reason"]
    assert f"fake has no Horovod, only {', '.join(FRAMEWORKS)} have it" in refused[1]["reason"]


# -- faults ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def running(start_train: Any, tmp_path: Path, framework_python: Callable[[str], Path]) -> tuple[subprocess.Popen[str], Path]:
    """(driver, run folder) of a run with two ranks that would go on for a long time."""
    framework_python("torch-horovod")
    driver = start_train("framework=torch", "network=lenet", "data=synthetic", *TWO, "measure=smoke", "measure.iterations=1000000")
    return driver, wait_for(lambda: run_folder_in_phase(tmp_path, "iteration"), 120)


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "rank 1: the worker died by SIGKILL"), (signal.SIGINT, "rank 1: KeyboardInterrupt")]
)
def test_a_rank_that_dies_or_raises_is_the_reason(
    number: int, reason: str, running: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    driver, folder = running
    os.kill(wait_for(lambda: rank_pid(folder, 1)), number)
    wait_for(lambda: not workers_of(folder), 15, "nothing of the run is left")
    assert driver.wait(30) == 1
    row = Result(1, "", "", tmp_path).only
    assert (row["outcome"], row["phase"]) == ("crashed", "iteration")
    assert reason in row["reason"]  # and not that rank 0 lost it


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_outlives_the_driver(number: int, code: int, running: tuple[subprocess.Popen[str], Path]) -> None:
    driver, folder = running
    assert len(workers_of(folder)) >= 3  # the ranks and horovodrun
    os.kill(driver.pid, number)
    wait_for(lambda: not workers_of(folder), 15, "nothing of the run is left")
    assert driver.wait(30) == code


def test_the_first_failure_is_told_first(tmp_path: Path) -> None:
    file = tmp_path / EXITS
    file.write_text("")
    exits = Exits(file)
    assert [exits.code(rank) for rank in range(3)] == [None] * 3
    file.write_text("2 0\n1 137\n0 1\n")
    assert exits.code(2) == 0
    assert exits.code(0) is None  # it may only have lost rank 1
    assert exits.code(1) == -signal.SIGKILL
    assert exits.code(0) == 1


# -- the wheel -------------------------------------------------------------------------------------------------------------


HEADERS = {"horovod": "0.28.1", "import": "torch horovod"}


def write_source(folder: Path, state: Path) -> None:
    """A source package `horovod` 0.28.1 whose build waits for state/open and leaves its HOROVOD_… variables in state/builds."""
    wheel = write_wheel(state, "horovod", "0.28.1")
    backend = f"""
import json, os, shutil, time
def build_wheel(where, config_settings=None, metadata_directory=None):
    import torch
    said = {{name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}}
    with open({str(state / "builds")!r}, "a") as builds:
        builds.write(json.dumps({{**said, "torch": torch.__version__, "CXX": os.environ["CXX"]}}) + "\\n")
    while not os.path.exists({str(state / "open")!r}):
        time.sleep(0.05)
    shutil.copy({str(wheel)!r}, where)
    return {wheel.name!r}
"""
    files = {
        "PKG-INFO": "Metadata-Version: 2.2\nName: horovod\nVersion: 0.28.1\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "horovod"\nversion = "0.28.1"\n',
        "backend.py": backend,
    }
    with tarfile.open(folder / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture
def source(place: Place, tmp_path: Path) -> Path:  # noqa: F811
    """The state folder of such a source package, beside wheels of torch 1.0.0 and 2.0.0, and pip."""
    import ensurepip

    state = tmp_path / "state"
    state.mkdir()
    (state / "builds").touch()
    write_source(place.wheels, state)
    for version in ("1.0.0", "2.0.0"):
        write_wheel(place.wheels, "torch", version)
    for pip in (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"):
        shutil.copy(pip, place.wheels)
    place.lock("torch-horovod.cpu", "torch==1.0.0", "numpy==1.0.0", **HEADERS)
    return state


def builds(state: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (state / "builds").read_text().splitlines()]


def test_it_is_compiled_once_for_each_version_of_the_framework(source: Path, place: Place) -> None:  # noqa: F811
    (source / "open").touch()
    home, lines = make("torch-horovod")
    (built,) = builds(source)
    assert built["HOROVOD_WITH_PYTORCH"] == built["HOROVOD_WITHOUT_MXNET"] == built["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert built["HOROVOD_CPU_OPERATIONS"] == "GLOO" and built["torch"] == "1.0.0" and not Path(built["CXX"]).exists()
    assert any("compiling Horovod 0.28.1 for torch 1.0.0" in line for line in lines)
    facts = json.loads((home.python.parents[1] / "complete.json").read_text())
    assert facts["versions"]["horovod"] == "0.28.1"
    (cached,) = environments.list_environments()
    assert environments.check(cached) == f"Python {sys.version.split()[0]}, numpy 1.0.0, torch 1.0.0, horovod 0.28.1"
    place.lock("torch-horovod.cpu", "torch==1.0.0", "numpy==1.0.0", "tiny==1.0.0", **HEADERS)
    _, lines = make("torch-horovod")
    assert len(builds(source)) == 1 and not any("compiling" in line for line in lines)
    make("torch-horovod", version="2.0.0")
    assert [one["torch"] for one in builds(source)] == ["1.0.0", "2.0.0"]


def test_an_interrupted_build_leaves_nothing(source: Path, place: Place) -> None:  # noqa: F811
    driver = place.start("torch-horovod")
    wait_for(lambda: builds(source), 120)
    os.killpg(driver.pid, signal.SIGINT)
    driver.communicate(timeout=60)
    assert place.folders() == [] and not list((place.cache / "wheels").iterdir())


def test_without_a_compiler_nothing_is_installed(source: Path, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "bin").mkdir()
    for tool in ("make", f"python{HERE}"):
        with contextlib.suppress(FileExistsError):
            (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(OutcomeError) as caught:
        make("torch-horovod")
    assert caught.value.outcome == "env_missing" and "no g++ and no cmake" in caught.value.message
    assert caught.value.hint == "apt-get install g++ cmake" and place.folders() == [] and builds(source) == []
