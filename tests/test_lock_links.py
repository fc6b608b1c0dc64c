"""Libraries of the system that an environment links to (`# link:` of a lock), with tiny packages and a library of our own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from crosstrain import environments, locks, system_libraries
from crosstrain.errors import ConfigError
from test_environments import Place, ask, make, place, refused

__all__ = ["place"]  # the fixture

NAME = "libcrosstrain-test.so.7"
LINK = f"tiny/libinside.so.1 -> {NAME}"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system library that the loader would find by LD_LIBRARY_PATH, behind a folder without it."""
    folder = tmp_path / "system"
    folder.mkdir()
    (folder / NAME).write_bytes(b"a library")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'nothing'}:{folder}")
    return folder / NAME


def packages(python: Path) -> Path:
    (found,) = python.parents[1].glob("lib/python*/site-packages")
    return found


def test_the_link_leads_to_the_library(place: Place, library: Path) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0", apt="libtiny7", link=LINK)
    made, _ = make()
    link = packages(made.python) / "tiny" / "libinside.so.1"
    assert link.is_symlink() and link.read_bytes() == b"a library"
    assert ask(made.python, "import tiny; print(tiny.__version__)") == "1.0.0"
    assert json.loads((made.python.parents[1] / "complete.json").read_text())["links"] == {"tiny/libinside.so.1": str(library)}
    assert make() == (made, [])


def test_a_missing_library_is_told_before_anything_is_made(place: Place, library: Path) -> None:
    library.unlink()
    place.lock("tiny.cpu", "tiny==1.0.0", apt="libtiny7 tiny-bin", link=LINK)
    error = refused("tiny", "cpu", None, None)
    assert (error.outcome, error.hint) == ("env_missing", "apt-get install libtiny7 tiny-bin")
    assert f"tiny needs {NAME}, which this system does not have" in error.message
    assert place.folders() == []


def test_a_library_that_went_away_is_told_and_costs_no_new_environment(place: Place, library: Path) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0", apt="libtiny7", link=LINK)
    made, _ = make()
    library.rename(library.with_suffix(".away"))
    assert refused("tiny", "cpu", None, None).hint == "apt-get install libtiny7"
    library.with_suffix(".away").rename(library)
    assert make() == (made, [])


def test_links_belong_to_the_key_and_their_packages_do_not(place: Place) -> None:
    keys = []
    for headers in ({}, {"apt": "one", "link": LINK}, {"apt": "two", "link": LINK}, {"apt": "one", "link": LINK.replace("so.1", "so.2")}):
        place.lock("tiny.cpu", "tiny==1.0.0", **headers)
        keys.append(environments.environment_key("tiny", "cpu", None))
    assert keys[1] == keys[2] and len(set(keys)) == 3


def test_each_line_is_a_link(place: Place) -> None:
    (place.locks / "tiny.cpu.txt").write_text(
        f"# python: 3.11\n# apt: libtiny7\n# link: {LINK}\n# link: tiny/b.so -> liba.so.1\ntiny==1.0.0\n"
    )
    assert locks.find_lock("tiny", "cpu").links == (("tiny/libinside.so.1", NAME), ("tiny/b.so", "liba.so.1"))


def test_a_lock_with_links_must_say_what_brings_the_libraries(place: Place) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0", link=LINK)
    with pytest.raises(ConfigError, match=r"tiny\.cpu\.txt has no line '# apt:"):
        locks.find_lock("tiny", "cpu")


def test_the_systems_own_libraries_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    found = system_libraries.find("libc.so.6")
    assert found is not None and os.path.basename(found) == "libc.so.6" and found.is_file()
    assert system_libraries.find("c.so.6") is None  # no part of another name
    assert system_libraries.find("libcXso.6") is None  # and no pattern


def test_cntk_finds_its_mpi(framework_python: Callable[[str], Path]) -> None:
    """Also what a lock for Python 3.6 has apart: uv can not compile its packages."""
    python = framework_python("cntk")
    assert (packages(python) / "cntk" / "libs" / "libmpi.so.12").resolve().is_file()
    assert list((packages(python) / "cntk" / "__pycache__").glob("*.cpython-36.pyc"))
    code = "import cntk.train.distributed"
    done = subprocess.run([str(python), "-I", "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
