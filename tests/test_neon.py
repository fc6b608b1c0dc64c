"""Intel's neon: on no package index, so its runs need an interpreter of the user's. Without one, it has its row all the same."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from conftest import PUBLISHED, QUICK, Train
from crosstrain.cli import main
from crosstrain.uv_process import uv_program

#: an interpreter that has Intel's neon 2.6, for the tests that train with it
OWN = os.environ.get("CROSSTRAIN_TEST_NEON", "")
with_neon = pytest.mark.skipif(not OWN, reason="CROSSTRAIN_TEST_NEON names no interpreter that has Intel's neon")


def test_without_an_interpreter_it_is_a_row_that_says_what_to_do(train: Train) -> None:
    result = train("-m", "framework=neon,fake", "network=lenet", "device=cpu", *QUICK)
    missing, other = result.outcomes
    assert missing["outcome"] == "env_missing" and not missing["ok"], result
    assert "not on the package index" in missing["message"]
    assert "framework.python=" in missing["hint"]
    assert other["outcome"] in PUBLISHED and result.code == 1
    assert "framework.python=" in result.out
    tags = result.runs[0].data.tags
    assert tags["outcome"] == "env_missing"


def test_plan_and_env_say_the_same(capsys: pytest.CaptureFixture[str], train: Train) -> None:
    assert "env_missing: neon" in train("framework=neon", "dry_run=true").out
    assert main(["env", "make", "neon"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("neon: ") and said.count("\n") == 1 and "framework.python=" in said


def test_another_package_of_this_name_is_no_neon(train: Train, tmp_path: Path) -> None:
    """The package index has one."""
    subprocess.run([uv_program(), "venv", "-q", "--no-project", "--system-site-packages", str(tmp_path / "own")], check=True)
    site = next((tmp_path / "own").glob("lib/python*/site-packages"))
    for name in ("neon", "numpy"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("__version__ = '0.1.2'\n")
    result = train("framework=neon", f"framework.python={tmp_path / 'own' / 'bin' / 'python'}", *QUICK)
    assert not result.only["ok"] and result.only["outcome"] in ("unsupported", "crashed"), result
    assert "neon" in result.only["message"]


@with_neon
def test_it_trains_and_is_proven(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ["framework=neon", f"framework.python={OWN}", "device=cpu", "threads=1"]
    result = train(*chosen, "network=lenet", "batch_size=16", "epochs=1", "data=digits", "data.samples=320", *QUICK)
    assert result.only["outcome"] in PUBLISHED, result
    assert result.runs[0].data.params["framework_version"].startswith("2.")
    assert result.only["accuracy"] > 0.2
    monkeypatch.chdir(tmp_path)
    assert main(["parity", *chosen, "network=lenet"]) == 0
    assert main(["parity", *chosen, "network=fcn_r"]) == 0


@with_neon
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["network=lstm_ptb"], "no mapping for op embedding"),
        (["network=autoencoder_small", "network.stage=ae1"], "no mapping for op tied_linear"),
        (["network=lenet", "precision=bf16"], "precision=bf16"),
        (["network=lenet", "replicas=2", "device=cpu"], "replica"),
    ],
)
def test_what_it_can_not_do_is_unsupported(train: Train, changes: list[str], reason: str) -> None:
    result = train("framework=neon", f"framework.python={OWN}", "data=synthetic", "batch_size=4", *changes, *QUICK)
    assert result.only["outcome"] == "unsupported", result
    assert reason in result.only["message"]
