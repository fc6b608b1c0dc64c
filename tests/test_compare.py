"""`crosstrain compare`: verdicts by cell, and the exit codes by which a team gates an upgrade."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from crosstrain import cli, progress
from crosstrain.report.compare import NOT_TESTED, SLOWER, Verdict, gate
from crosstrain.tracking import Tracker
from stores import new_store, put


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five repeats of old, slower (10 %), noisy (0 to 20 % slower, in no order) and same; one repeat of single; lost has no numbers."""
    folder = tmp_path_factory.mktemp("home")
    tracker: Tracker = new_store(folder)
    for repeat in range(1, 6):
        wiggle = 0.01 * repeat
        put(tracker, "old", 10 + wiggle, repeat=repeat)
        put(tracker, "slower", 11 + wiggle, repeat=repeat, framework_version="2.14.0")
        put(tracker, "same", 10 + 0.02 - wiggle / 2, repeat=repeat)
        put(tracker, "noisy", (10.001, 12, 9.9, 12, 11)[repeat - 1], repeat=repeat)
        for version, step_ms in (("2.9.0", 12.0), ("2.13.0", 10.0)):
            put(tracker, "versions", step_ms + wiggle, repeat=repeat, framework_version=version)
    put(tracker, "single", 30.0)
    put(tracker, "lost", None, "crashed", "no memory left")
    return folder


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """compare(folder, *arguments): the command, in this process, since importing MLflow takes seconds."""

    def run(folder: Path, *arguments: str) -> Done:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(progress.console, "_width", 200)
        code = cli.main(["compare", *arguments])
        return Done(code, *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("sides", "limit", "code", "words"),
    [
        (("old", "slower"), "5%", SLOWER, "slower by at least"),
        (("old", "slower"), "15%", 0, "old"),
        (("slower", "old"), "5%", 0, "B is faster than A"),
        (("old", "same"), "5%", 0, "no difference shown"),
        (("old", "noisy"), "5%", 0, "no difference shown"),
        (("old", "single"), "5%", NOT_TESTED, "not tested: 1 of 1 cells have fewer than 5 repeats"),
        (("old", "lost"), "5%", SLOWER, "B: crashed"),
        (("lost", "old"), "5%", NOT_TESTED, "A: crashed"),
        (("framework_version=2.9.0", "versions,framework_version=2.13.0"), "5%", 0, "B is faster than A"),
        (("--baseline", "old", "slower"), "5%", SLOWER, "1.1"),
    ],
)
def test_the_exit_code_is_a_gate(
    home: Path, compare: Callable[..., Done], sides: tuple[str, ...], limit: str, code: int, words: str
) -> None:
    done = compare(home, *sides, "--fail-over", limit)
    assert done.code == code, done
    assert words in done.out
    assert compare(home, *sides).code == 0, "without --fail-over it only shows"


def test_a_saved_side_is_a_baseline_without_its_store(home: Path, compare: Callable[..., Done], tmp_path: Path) -> None:
    kept = tmp_path / "baseline.json"
    assert compare(home, "old", "--save", str(kept)).code == 0
    assert len(json.loads(kept.read_text())) == 1
    assert compare(home, "slower", "--baseline", str(kept), "--fail-over", "5%").code == SLOWER
    both = compare(tmp_path, str(kept), str(kept), "--fail-over", "5%")
    assert both.code == 0 and not (tmp_path / "mlruns").exists()


def test_cells_are_named_by_what_tells_them_apart(home: Path, compare: Callable[..., Done], tmp_path: Path) -> None:
    """An older file without a param is of the framework's default; a run that ended early is compared with what it was to be."""
    tracker = new_store(tmp_path)
    for precision, settings in (("fp32", ""), ("bf16", ""), ("bf16", "lstm=scan")):
        put(tracker, "mixed", 10.0, precision=precision, framework_settings=settings)
    saved = tmp_path / "side.json"
    assert compare(tmp_path, "mixed", "mixed", "--save", str(saved)).code == 0
    sides = json.loads(saved.read_text())[:2]
    for side in sides:
        del side["facts"]["framework_settings"]
    saved.write_text(json.dumps(sides))
    done = compare(tmp_path, str(saved), "mixed")
    rows = [line for line in done.out.splitlines() if "lenet" in line]
    names = ["fp32", "bf16", "bf16 lstm=scan"]
    assert [row.split("│")[1].strip() for row in rows] == [f"lenet torch {name}, 1 thread, batch 64" for name in names]
    assert ["not there" in row for row in rows] == [False, False, True]
    put(tracker, "early", None, "crashed", **dict.fromkeys(("framework_version", "device_name", "data_placement", "threads"), ""))
    done = compare(tmp_path, "mixed", "early")
    (row,) = (line for line in done.out.splitlines() if "fp32" in line)
    assert "A: ok, B: crashed" in row


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("old", "compare old: needs two sides"),
        ("old slower same", "compare old slower same: needs two sides"),
        ("old none", "none: there are no runs"),
        ("old versions", "versions: lenet torch, 1 thread, batch 64 is there with framework_version"),
        ("old nothing.json", "nothing.json: is no file of `crosstrain compare --save`"),
    ],
)
def test_wrong_sides_are_one_line(home: Path, compare: Callable[..., Done], line: str, says: str) -> None:
    done = compare(home, *line.split(" "))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {says}") and done.err.count("\n") == 1, done.err


def verdict(low: float | None, tested: bool = True) -> Verdict:
    return Verdict("cell", 1.0, 1.0, 1.0, low, None, tested, "")


def test_only_the_near_end_above_the_limit_fails() -> None:
    assert gate([verdict(1.0501)], 0.05) == SLOWER
    assert gate([verdict(1.05)], 0.05) == 0
    assert gate([verdict(1.2, tested=False)], 0.05) == NOT_TESTED
    assert gate([verdict(1.2, tested=False), verdict(1.2)], 0.05) == SLOWER
    assert gate([], 0.05) == NOT_TESTED
