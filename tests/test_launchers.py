"""The scripts of launchers/, run as a user runs them. (offline.sh: test_bundle.py)"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from conftest import QUICK, ROOT, Result, stored_runs, wait_for, workers_of

LAUNCHERS = ROOT / "launchers"
LOCAL = ["sh", str(LAUNCHERS / "local.sh"), "framework=fake", "data=synthetic", *QUICK]
CELLS = ["seed=1,2,3", "framework.step_ms=1,400"]
ENV = {**os.environ, "PYTHON": sys.executable}


def local(folder: Path, *arguments: str) -> Result:
    done = subprocess.run([*LOCAL, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, env=ENV)
    return Result(done.returncode, done.stdout, done.stderr, folder)


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A sweep of six cells, every second of which takes its time."""
    process = subprocess.Popen([*LOCAL, *CELLS], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENV)
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.long
def test_an_interrupted_sweep_goes_on_where_it_ended(sweep: subprocess.Popen[bytes], tmp_path: Path) -> None:
    def measuring() -> list[Path]:
        events = tmp_path.glob("outputs/*/*/001-*/events.0.jsonl")
        return [path.parent for path in events if '"name": "iteration"' in path.read_text()]

    (second,) = wait_for(measuring, 120, "second cell")
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait(60) == 130
    wait_for(lambda: not workers_of(second), what="end of the workers")
    assert [run.data.tags["outcome"] for run in stored_runs(tmp_path)][1:] == ["interrupted"]
    result = local(tmp_path, *CELLS)
    assert result.code == 0, result
    assert len(result.outcomes) == 5, result
    assert local(tmp_path, *CELLS).code == 0
    assert len(stored_runs(tmp_path)) == 2 + 5


def test_wrong_input_keeps_its_line_and_its_exit_code(tmp_path: Path) -> None:
    result = local(tmp_path, "bacth_size=3")
    assert result.code == 2 and result.err.count("\n") == 1 and "batch_size" in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCHERS.glob("*.sh")))
def test_each_is_documented_and_plain(script: str) -> None:
    text = (LAUNCHERS / script).read_text()
    assert f"[{script}]({script})" in (LAUNCHERS / "README.md").read_text()
    assert os.access(LAUNCHERS / script, os.X_OK)
    assert re.match(r"#!/bin/sh\n# .+\n#\n", text), "the head says what it is for"
    subprocess.run(["sh", "-n", str(LAUNCHERS / script)], check=True)


def test_the_sbatch_file_is_documented_and_plain() -> None:
    text = (LAUNCHERS / "slurm.sbatch").read_text()
    assert "[slurm.sbatch](slurm.sbatch)" in (LAUNCHERS / "README.md").read_text()
    assert re.match(r"#!/bin/sh\n# .+\n#\n", text)
    subprocess.run(["sh", "-n", str(LAUNCHERS / "slurm.sbatch")], check=True)  # test_slurm.py runs it


def test_the_kubernetes_job_runs_what_exists(tmp_path: Path) -> None:
    assert "[kubernetes.yaml](kubernetes.yaml)" in (LAUNCHERS / "README.md").read_text()
    job = yaml.safe_load((LAUNCHERS / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"], job["spec"]["backoffLimit"]) == ("batch/v1", "Job", 0)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["restartPolicy"] == "Never"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    python, script, *arguments = [*container["command"], *container["args"]]
    assert (Path(python).name, Path(script).name) == ("python", "train.py") and (ROOT / "train.py").is_file()
    # on this machine without GPUs its cells are planned as unsupported, but every name in them is known
    planned = subprocess.run([sys.executable, str(ROOT / "train.py"), *arguments, "dry_run=true"], cwd=tmp_path, env=ENV)
    assert planned.returncode == 0
    wanted = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert f"gpus=1,{wanted}" in arguments
