"""`crosstrain parity` and the tag that runs carry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import QUICK, Train


def crosstrain(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "crosstrain.cli", *arguments], cwd=cwd, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("framework", ["torch", "mxnet"])
def test_proven_networks_and_the_tag_of_a_run(train: Train, tmp_path: Path, framework_python, framework: str) -> None:  # type: ignore[no-untyped-def]
    framework_python(framework)
    done = crosstrain("parity", f"framework={framework}", "network=lenet,alexnet_r", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("proven: levels 1-6, 8") == 2
    result = train(f"framework={framework}", "epochs=0", "threads=1", *QUICK)
    (run,) = result.runs
    assert run.data.tags["parity"].startswith("proven: levels 1-6, 8")


def test_a_missing_certificate_is_shown(train: Train) -> None:
    (run,) = train("framework=fake", "data=synthetic", *QUICK).runs
    assert run.data.tags["parity"] == "not proven"


def test_a_framework_that_computes_nothing_fails(tmp_path: Path) -> None:
    done = crosstrain("parity", "framework=fake", "network=lenet", cwd=tmp_path)
    assert done.returncode == 1
    assert "proven: levels" not in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_wrong_names_are_one_line(tmp_path: Path) -> None:
    done = crosstrain("parity", "network=lente", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: network=lente: unknown; did you mean lenet?\n")
    done = crosstrain("parity", "lenet", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: lenet: must be key=value, e.g. framework=torch\n")
