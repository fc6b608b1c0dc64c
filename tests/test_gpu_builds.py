"""GPUs that a framework's build has no code for: `unsupported` before anything is downloaded, never the CPU in silence.

The machine with two H200s is the recorded one of test_devices.py, in front of a whole `train.py`, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Train
from crosstrain import devices, environments, locks, prepare, runspec
from crosstrain.errors import ConfigError, OutcomeError
from test_config import composed
from test_devices import DISCOVERY, A, B, Replay
from test_environments import Place, make
from test_environments import place as place

MXNET = (
    "mxnet: mxnet-cu117 1.9.1 has machine code for compute capability 5.0 to 8.6 (no PTX for newer ones); "
    "this GPU (NVIDIA H200) has 9.0"
)

PYNVML = """
NVMLError = Exception

def nvmlInit():
    pass

from test_devices import DISCOVERY, Replay  # which looks for GPUs itself
replay, NVMLError = Replay(DISCOVERY), Replay.NVMLError

def __getattr__(name):
    return getattr(replay, name)
"""


@pytest.fixture
def h200s(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every driver finds the recorded machine, and no environment; gives the folder of environments."""
    folder = tmp_path / "nvml"
    folder.mkdir()
    (folder / "pynvml.py").write_text(PYNVML)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # a download would be env_missing
    return cache / "environments"


def made(environments: Path) -> list[Path]:
    return [path for path in environments.glob("*") if path.is_dir()]


def test_mxnet_on_an_h200_is_unsupported_and_nothing_is_made(h200s: Path, train: Train) -> None:
    result = train("-m", "framework=mxnet", "network=lenet", "gpus=null,1,2")
    assert result.code == 1, result
    assert [(row["outcome"], row["message"]) for row in result.outcomes] == [("unsupported", MXNET)] * 3
    assert "device=cpu" in result.out and "Traceback" not in result.out + result.err
    assert not made(h200s)


def test_the_plan_says_the_same(h200s: Path, train: Train, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "crosstrain.cli", "plan", "framework=cntk", "gpus=1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "400"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    reason = "cntk: cntk-gpu 2.7.post2 has machine code for compute capability 3.0 to 7.5 (CUDA 10.0 and cuDNN 7 know no newer ones)"
    assert f"unsupported: {reason}; this GPU (NVIDIA H200) has 9.0" in done.stdout
    dry = train("framework=mxnet", "gpus=1", "dry_run=true", env={"COLUMNS": "400"})
    assert dry.code == 0 and f"unsupported: {MXNET}" in dry.out, dry
    assert not made(h200s)


def test_a_framework_whose_lock_names_no_gpus_goes_on(h200s: Path, train: Train) -> None:
    dry = train("framework=torch", "gpus=1", "dry_run=true", env={"COLUMNS": "400"})
    assert dry.code == 0 and "unsupported" not in dry.out and "makes the environment torch-gpu-" in dry.out, dry


# -- which GPUs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """machine(a, b): the recorded GPUs A and B have these compute capabilities."""

    def have(*capabilities: tuple[int, int]) -> None:
        changes = {
            f'["nvmlDeviceGetCudaComputeCapability", {{"handle": {number}}}]': [list(capability)]
            for number, capability in enumerate(capabilities)
        }
        monkeypatch.setattr(devices, "open_nvml", lambda: (Replay(DISCOVERY, changes), ""))

    return have


def chosen(*overrides: str) -> list[str]:
    return [gpu.uuid for gpu in prepare.choose_place(runspec.from_config(composed("network=lenet", *overrides))).gpus]


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((3, 7), False), ((5, 0), True), ((6, 1), True), ((8, 6), True), ((8, 9), True), ((9, 0), False), ((10, 0), False), ((12, 1), False)],
)
def test_machine_code_runs_on_later_minors_only(machine, capability, runs) -> None:  # type: ignore[no-untyped-def]
    machine(capability, capability)
    if runs:
        assert chosen("framework=mxnet", "gpus=1") == [A, B]
        return
    with pytest.raises(OutcomeError, match=rf" has {capability[0]}\.{capability[1]}$") as caught:
        chosen("framework=mxnet", "gpus=1")
    assert caught.value.outcome == "unsupported" and "device=cpu" in caught.value.hint


def test_of_different_gpus_those_that_run_it_are_taken(machine) -> None:  # type: ignore[no-untyped-def]
    machine((9, 0), (7, 5))
    assert chosen("framework=cntk", "gpus=1") == [B]
    assert chosen("framework=torch", "gpus=1") == [A, B]
    with pytest.raises(OutcomeError, match=r"cntk-gpu 2\.7\.post2 .* has 9\.0$"):
        chosen("framework=cntk", "gpus=2")


def test_another_interpreter_or_version_is_not_judged_by_the_lock(machine) -> None:  # type: ignore[no-untyped-def]
    machine((9, 0), (9, 0))
    assert chosen("framework=mxnet", "gpus=1", "framework.python=/somewhere/python") == [A, B]
    assert chosen("framework=mxnet", "gpus=1", "framework.version=1.9.0") == [A, B]
    with pytest.raises(OutcomeError):
        chosen("framework=mxnet", "gpus=1", "framework.version=1.9.1")


def test_the_cpu_asks_for_no_gpu(machine) -> None:  # type: ignore[no-untyped-def]
    machine((9, 0), (9, 0))
    assert chosen("framework=mxnet", "device=cpu", "threads=1") == []


# -- the locks -------------------------------------------------------------------------------------------------------------


def test_the_gpus_are_no_part_of_the_key_and_an_environment_is_made_without_any(place: Place) -> None:
    place.lock("tiny.gpu", "tiny==1.0.0")
    key = environments.environment_key("tiny", "gpu", None)
    place.lock("tiny.gpu", "tiny==1.0.0", gpus="5.0-8.6 (no PTX)")
    assert locks.find_lock("tiny", "gpu").gpus == locks.Gpus((5, 0), (8, 6), "no PTX")
    assert make(accelerator="gpu")[0].key == key


@pytest.mark.parametrize("value", ["8.6", "5-8", "5.0 - 8.6", "5.0-8.6 no PTX", "all"])
def test_a_bad_range_is_one_line(place: Place, value: str) -> None:
    place.lock("tiny.gpu", "tiny==1.0.0", gpus=value)
    with pytest.raises(ConfigError, match=r"^tiny\.gpu\.txt: '# gpus: .*' must be like '# gpus: 5\.0-8\.6"):
        locks.find_lock("tiny", "gpu")


def test_mxnet_for_gpus_is_the_one_for_the_cpu_in_another_build() -> None:
    cpu, gpu = locks.find_lock("mxnet", "cpu"), locks.find_lock("mxnet", "gpu")
    assert (cpu.python, cpu.modules, cpu.headers["keep"], cpu.pins[1:]) == (gpu.python, gpu.modules, gpu.headers["keep"], gpu.pins[1:])
    assert (cpu.pins[0][1], gpu.pins[0]) == ("1.9.1", ("mxnet-cu117", "1.9.1"))
    assert "LD_LIBRARY_PATH" in gpu.headers["note"] and gpu.gigabytes("disk", cpu_wheel=False)
