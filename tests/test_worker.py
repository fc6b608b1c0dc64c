"""The worker package alone: it runs on every interpreter from 3.6 to 3.13 and imports nothing but the standard library and numpy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import PUBLISHED, QUICK, ROOT, Train, needs
from crosstrain import interpreters, locks, paths
from crosstrain.errors import OutcomeError
from crosstrain.uv_process import uv_program

WORKER = ROOT / "src" / "crosstrain_worker"
VERSIONS = ["3.6", "3.8", "3.10", "3.11", "3.12", "3.13"]


def interpreter(version: str) -> Path:
    try:
        return interpreters.find_python(version, print)
    except OutcomeError as error:
        needs("interpreter", f"Python {version} ({error.hint or error.message})")
        raise AssertionError from error


@pytest.fixture(scope="session")
def with_numpy() -> object:
    """with_numpy("3.6") -> an interpreter of that version with numpy, made once in the user cache."""

    def make(version: str) -> Path:
        folder = paths.cache_dir("test-interpreters") / version
        python = folder / "bin" / "python"
        if not (folder / "complete").exists():
            base = interpreter(version)
            subprocess.run([uv_program(), "venv", "-q", "--clear", "-p", str(base), str(folder)], check=True)
            subprocess.run([uv_program(), "pip", "install", "-q", "-p", str(python), "numpy"], check=True)
            (folder / "complete").touch()
        return python

    return make


@pytest.mark.parametrize("version", VERSIONS)
def test_a_real_run_on_each_interpreter(train: Train, with_numpy, version: str) -> None:  # type: ignore[no-untyped-def]
    result = train("framework=fake", f"framework.python={with_numpy(version)}", "framework.step_ms=1", "epochs=1", "data=digits", *QUICK)
    assert result.only["outcome"] in PUBLISHED, result
    facts = json.loads((Path(result.only["folder"]) / "result.0.json").read_text())
    assert facts["versions"]["python"].startswith(version + ".")


def test_syntax_of_3_6() -> None:
    python = interpreter("3.6")
    done = subprocess.run([python, "-B", "-m", "compileall", "-q", "-f", str(WORKER)], capture_output=True, text=True)
    for cache in WORKER.rglob("*.cpython-36.pyc"):
        cache.unlink()
    assert done.returncode == 0, done.stdout


#: Imports each module named on the command line; prints those that need what is not there.
IMPORT = """
import importlib, runpy, sys
runpy.run_path(sys.argv[1])["register_package"]()
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error.name)
"""


@pytest.mark.parametrize("version", ["3.6", "3.8"])
def test_every_module_can_be_imported(with_numpy, version: str) -> None:  # type: ignore[no-untyped-def]
    """Without any framework: an adapter imports its own in load_library, and only its helpers at their top."""
    names = [".".join(path.relative_to(WORKER.parent).with_suffix("").parts) for path in sorted(WORKER.rglob("*.py"))]
    done = subprocess.run([with_numpy(version), "-I", "-B", "-c", IMPORT, WORKER, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    missing = dict(line.split() for line in done.stdout.splitlines())
    assert not any(name.split(".")[-1].startswith("on_") or "frameworks" not in name for name in missing), missing
    for name, module in missing.items():
        assert module.split(".")[0] in name.split(".")[-1].split("_"), f"{name} needs {module}"


def in_environment(framework: str) -> set[str]:
    """What may be imported beside a framework: the packages of its locks."""
    found = {framework}
    for lock in locks.all_locks():
        if lock.framework.split("-")[0] == framework:
            found |= {module.split(".")[0] for module in lock.modules} | {name.replace("-", "_") for name, _ in lock.pins}
    return found | ({"google"} if "protobuf" in found else set())


def test_only_the_standard_library_and_numpy_are_imported() -> None:
    """A framework is imported only inside its own on_<framework>.py and files named after it."""
    for path in WORKER.rglob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add((node.module or "").split(".")[0])
        own = path.stem.removeprefix("on_").removeprefix("with_").split("_")[0] if path.parent.name == "frameworks" else ""
        foreign = names - set(sys.stdlib_module_names) - {"numpy", "crosstrain_worker"} - in_environment(own)
        assert not foreign, f"{path.name} imports {foreign}"
        assert "crosstrain" not in names, f"{path.name} imports the driver"


def test_wrong_arguments_are_one_line() -> None:
    done = subprocess.run([sys.executable, str(WORKER)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "usage: python crosstrain_worker <run folder> <rank>\n")


def test_files_of_the_worker_do_not_shadow_modules(tmp_path: Path) -> None:
    """Started by path, the worker's folder would come first on sys.path: `events` or `record` would be ours for a framework."""
    program = "import runpy, sys; sys.argv = ['x']; " + f"runpy.run_path({str(WORKER)!r})['register_package'](); import record"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert "No module named 'record'" in done.stderr
