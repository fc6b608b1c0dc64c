"""framework.version: two versions of one framework side by side, in one sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import PUBLISHED, QUICK, Train, needs
from crosstrain import environments, locks
from crosstrain.errors import OutcomeError
from test_environments import Place, ask, command, make, refused, write_wheel
from test_environments import place as place


def test_what_the_framework_does_not_ask_for_comes_along(place: Place) -> None:
    """`also`: an adapter's other packages, in whichever version fits the other version of the framework."""
    write_wheel(place.wheels, "layers", "1.0.0", ("tiny==1.0.0",))
    write_wheel(place.wheels, "layers", "2.0.0", ("tiny==2.0.0",))
    write_wheel(place.wheels, "tiny", "2.0.0")
    place.lock("tiny.cpu", "tiny==2.0.0", "layers==2.0.0", "numpy==1.0.0", also="layers")
    code = "import tiny, layers, numpy; print(tiny.__version__, layers.__version__)"
    assert ask(make()[0].python, code) == "2.0.0 2.0.0"
    assert ask(make(version="1.0.0")[0].python, code) == "1.0.0 1.0.0"
    assert make(version="2.0.0")[0] == make()[0]  # the lock's own version, said aloud


@pytest.mark.parametrize(
    ("wanted", "nearest"),
    [("1.5.0", "1.0.0 and 2.0.0"), ("0.9.0", "1.0.0"), ("3.1.0", "3.0.0.post1"), ("3.0.0", "2.0.0 and 3.0.0.post1")],
)
def test_a_version_that_does_not_exist_names_the_nearest(place: Place, wanted: str, nearest: str) -> None:
    for version in ("2.0.0", "3.0.0.post1"):
        write_wheel(place.wheels, "tiny", version)
    place.lock("tiny.cpu", "tiny==1.0.0")
    error = refused("tiny", "cpu", None, wanted)
    assert error.outcome == "env_missing" and f"tiny=={wanted}" in error.message
    assert f"nearest for Python {locks.find_lock('tiny', 'cpu').python}: {nearest};" in error.hint
    assert place.folders() == []


def test_a_version_for_other_pythons_says_so(place: Place) -> None:
    old = write_wheel(place.wheels, "tiny", "0.5.0")
    old.rename(place.wheels / "tiny-0.5.0-cp27-cp27mu-manylinux1_x86_64.whl")
    place.lock("tiny.cpu", "tiny==1.0.0")
    error = refused("tiny", "cpu", None, "0.5.0")
    assert "`cp27`" in error.message and "1.0.0" in error.hint and "framework.python" in error.hint


def test_a_pin_that_is_kept_and_does_not_fit_is_no_missing_version(place: Place) -> None:
    write_wheel(place.wheels, "helper", "1.0.0")
    write_wheel(place.wheels, "tiny", "2.0.0", ("helper>=2",))
    place.lock("tiny.cpu", "tiny==1.0.0", "helper==1.0.0", keep="helper")
    error = refused("tiny", "cpu", None, "2.0.0")
    assert "helper" in error.message and "nearest" not in error.hint


def test_the_list_shows_both_and_a_changed_lock_makes_both_old(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    write_wheel(place.wheels, "tiny", "2.0.0")
    place.lock("tiny.cpu", "tiny==1.0.0", "numpy==1.0.0", keep="numpy")
    assert command("make", "tiny") == 0 and command("make", "tiny", "--version", "2.0.0") == 0
    capsys.readouterr()
    command("list")
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("tiny-cpu-")]
    assert sorted((row[1], row[4]) for row in rows) == [("ready", "1.0.0"), ("ready", "2.0.0")]
    write_wheel(place.wheels, "numpy", "1.1.0")
    place.lock("tiny.cpu", "tiny==1.0.0", "numpy==1.1.0", keep="numpy")
    assert [one.state for one in environments.list_environments()] == ["old lock", "old lock"]


def test_one_sweep_measures_two_versions(train: Train, tmp_path: Path) -> None:
    """For real: MXNet 1.6.0 beside the lock's 1.9.1, and one that does not exist."""
    for version in ("1.6.0", None):
        try:
            environments.find_or_make("mxnet", "cpu", None, version, print)
        except OutcomeError as error:
            needs("environment", f"crosstrain env make mxnet ({error.message})")
    cells = ["framework=mxnet", "framework.version=1.6.0,1.9.1,1.9.8", "network=lenet", "device=cpu", "threads=1", "data=synthetic"]
    result = train("-m", *cells, "batch_size=8", *QUICK)
    old, new, missing = result.outcomes
    assert old["outcome"] in PUBLISHED and new["outcome"] in PUBLISHED, result
    assert missing["outcome"] == "env_missing" and "nearest for Python 3.10: 1.9.1" in missing["hint"], result
    runs = {run.data.params["framework_version"]: run.data for run in result.runs}
    assert set(runs) == {"1.6.0", "1.9.1", "1.9.8"}
    assert runs["1.6.0"].tags["run_key"] != runs["1.9.1"].tags["run_key"]
    assert runs["1.6.0"].metrics["step_ms"] > 0 and runs["1.9.1"].metrics["step_ms"] > 0
