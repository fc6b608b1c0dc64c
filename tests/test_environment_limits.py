"""Environments where the disk is full or the cache can not be used: one line, and nothing half-made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from crosstrain.uv_process import one_line
from test_environments import Place, write_wheel
from test_environments import place as place

PROGRAM = """
import sys
from pathlib import Path
from crosstrain import cli, paths
paths.locks_dir = lambda: Path(sys.argv[1])
sys.exit(cli.main(sys.argv[2:]))
"""


def crosstrain(place: Place, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """`crosstrain …` with the locks of `place`; `before` are shell commands in a mount name space of its own."""
    command = [sys.executable, "-c", PROGRAM, str(place.locks), *arguments]
    if before:
        script = f'{before}; "$@"; code=$?; ls "$CROSSTRAIN_CACHE/environments"; exit $code'
        command = ["unshare", "--mount", "sh", "-c", script, "sh", *command]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


@pytest.mark.parametrize("words", [["list"], ["remove", "--all"], ["check", "--all"], ["make", "tiny"]], ids=" ".join)
def test_a_cache_that_can_not_be_used(place: Place, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0")
    (place.wheels / "file").write_text("")
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(place.wheels / "file" / "cache"))
    done = crosstrain(place, "env", *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and "CROSSTRAIN_CACHE" in done.stderr and "file" in done.stderr


def test_a_full_disk(place: Place, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("only root may mount")
    write_wheel(place.wheels, "large", "1.0.0", content="# " + os.urandom(2_000_000).hex())
    place.lock("large.cpu", "large==1.0.0")
    place.cache.mkdir()
    full = f"mount -t tmpfs -o size=3m tmpfs {place.cache}"
    done = crosstrain(place, "env", "make", "large", before=full)
    assert done.returncode == 1
    assert done.stderr.startswith("large: the environment large-cpu-") and done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr and "free some space" in done.stderr
    left = [name for name in done.stdout.splitlines() if name.startswith("large-cpu-")]
    assert left and all(name.endswith((".lock", ".log")) for name in left), done.stdout


def test_a_long_error_keeps_its_start_and_its_end() -> None:
    text = one_line("error: could not\n  cause: " + "x" * 900 + "\n  cause: no space\n", limit=100)
    assert len(text) == 100 and text.startswith("could not: xxx") and text.endswith("x: no space") and " … " in text
    assert one_line("some output\nERROR: first\nERROR: second\n") == "first: second"
