"""--require turns a skip for something that could be installed into a failure, and runs what takes long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

PROGRAM = """
import pytest
from conftest import needs

def test_apt():
    needs("apt", "apt-get install something")

def test_other():
    pytest.skip("not on this machine")

@pytest.mark.long
def test_long():
    pass
"""


@pytest.mark.parametrize(
    ("option", "counts"),
    [
        ("", "3 skipped"),
        ("all", "1 failed, 1 passed, 1 skipped"),
        ("interpreter", "3 skipped"),
        ("time", "1 passed, 2 skipped"),
    ],
)
def test_required_skips_fail_and_long_tests_run(tmp_path: Path, option: str, counts: str) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_x.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--require={option}", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert counts in done.stdout, done.stdout
    assert done.returncode == (1 if "failed" in counts else 0)
    if option == "all":
        assert "apt-get install something" in done.stdout
