"""The scripts of launchers/, run as a user runs them. (offline.sh: test_bundle.py)"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import QUICK, ROOT, Result, run_folder_in_phase, stored_runs, wait_for, workers_of

LAUNCHERS = ROOT / "launchers"
LOCAL = ["sh", str(LAUNCHERS / "local.sh"), "framework=fake", "data=synthetic", *QUICK]
ENV = {**os.environ, "PYTHON": sys.executable}


def local(folder: Path, *arguments: str) -> Result:
    done = subprocess.run([*LOCAL, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, env=ENV)
    return Result(done.returncode, done.stdout, done.stderr, folder)


def test_an_interrupted_sweep_goes_on_where_it_ended(tmp_path: Path) -> None:
    cells = ["seed=1,2,3", "framework.step_ms=1,400"]  # the second cell of each pair takes its time
    process = subprocess.Popen([*LOCAL, *cells], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENV)
    second = wait_for(lambda: [one for one in tmp_path.glob("outputs/*/*/001-*") if run_folder_in_phase(one.parents[1], "iteration")])
    wait_for(lambda: workers_of(second[0]), what="workers of the second cell")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    wait_for(lambda: not workers_of(second[0]), what="end of the workers")
    states = [run.data.tags["outcome"] for run in stored_runs(tmp_path)]
    assert len(states) == 2 and states[1] == "interrupted"
    result = local(tmp_path, "seed=1,2,3", "framework.step_ms=1,400")
    assert result.code == 0, result
    assert len(result.outcomes) == 5, result
    assert local(tmp_path, "seed=1,2,3", "framework.step_ms=1,400").code == 0
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
