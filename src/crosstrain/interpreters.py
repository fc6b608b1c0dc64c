"""Which Python: one of a wanted version to make an environment with, or the user's own that already has the framework."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from crosstrain.errors import OutcomeError
from crosstrain.pip_settings import uv_settings
from crosstrain.uv_process import one_line, uv_program

#: an interpreter that does not answer within this is passed over (a cold network file system needs some seconds)
_ANSWER_S = 30

# Runs in any Python, 2.7 included. Free-threaded builds need wheels of their own, so they do not count.
_WHO = """
import json, sys, sysconfig
import platform
plain = platform.python_implementation() == "CPython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
print(json.dumps(["%d.%d" % sys.version_info[:2], plain, sys.executable]))
"""

# Runs in the user's interpreter. The first entry of sys.path is dropped: it is this process's folder, which the worker
# will not have. A folder without __init__.py (a namespace package) is no installed framework.
_HAS = """
import json, sys
sys.path.pop(0)
answer = {"python": list(sys.version_info[:3]), "executable": sys.executable, "missing": [], "version": None}
if sys.version_info >= (3, 6):
    from importlib.util import find_spec
    for name in ["numpy"] + sys.argv[2:]:
        spec = find_spec(name)
        if spec is None or (spec.submodule_search_locations is not None and not spec.has_location):
            answer["missing"].append(name)
if sys.version_info >= (3, 8) and not answer["missing"]:
    from importlib.metadata import PackageNotFoundError, version
    try:
        answer["version"] = version(sys.argv[1])
    except PackageNotFoundError:
        pass
print(json.dumps(answer))
"""


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def _ask(python: Path | str, code: str, *arguments: str, isolated: bool) -> tuple[list | dict | None, str]:
    """The JSON that `code` prints in that interpreter, or None and why not, in one line."""
    command = [str(python), *(["-I"] if isolated else []), "-c", code, *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S, env=_clean_environment()
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_ANSWER_S} s"
    except (OSError, UnicodeDecodeError) as error:
        return None, str(error)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1]), ""
    except (IndexError, ValueError):
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or [f"exit code {done.returncode} and no answer"]
        return None, lines[-1 if lines[0].startswith("Traceback") else 0].strip()


# -- an interpreter to make an environment with ------------------------------------------------------------------------


def _answers(python: Path | str, version: str) -> Path | None:
    """The interpreter's own path when it really is a CPython X.Y; None for a pyenv shim that only prints an error."""
    answer, _ = _ask(python, _WHO, isolated=False)
    if isinstance(answer, list) and answer[:2] == [version, True] and answer[2]:
        return Path(answer[2])
    return None


def _on_path(version: str) -> Iterator[str]:
    """Every pythonX.Y on PATH, not only the first: a pyenv shim in front may answer nothing."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        found = shutil.which(f"python{version}", path=folder) if folder else None
        if found:
            yield found


def _uv_python(*arguments: str) -> tuple[str, str]:
    """(what `uv python …` printed, the error in one line)."""
    environment, _ = uv_settings(os.environ)
    done = subprocess.run(
        [uv_program(), "python", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment
    )
    return (done.stdout.strip(), "") if done.returncode == 0 else ("", one_line(done.stderr))


def _of_uv(version: str) -> Iterator[str]:
    found, _ = _uv_python("find", "--system", "--no-project", "--no-python-downloads", version)
    if found:
        yield found


def _of_pyenv(version: str) -> Iterator[Path]:
    """pyenv's own interpreters, the newest patch release first; uv does not see them behind the shims."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")

    def patch(folder: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", folder.name)]

    for folder in sorted((root / "versions").glob(f"{version}.*"), key=patch, reverse=True):
        if (folder / "bin" / "python").exists():
            yield folder / "bin" / "python"


def look_for_python(version: str) -> Path | None:
    """A CPython X.Y of this machine: on PATH, of uv, of pyenv, or the driver's own."""
    for search in (_on_path, _of_uv, _of_pyenv):
        for candidate in search(version):
            python = _answers(candidate, version)
            if python:
                return python
    return _answers(getattr(sys, "_base_executable", sys.executable), version)


def find_python(version: str, report: Callable[[str], None]) -> Path:
    """A CPython X.Y of this machine, else installed by uv.

    Raises OutcomeError (env_missing) that names what was looked for and the one command that helps.
    """
    there = look_for_python(version)
    if there:
        return there
    report(f"Python {version} is not on this machine: installing it with uv")
    _, error = _uv_python("install", "--no-bin", version)
    for candidate in _of_uv(version):
        python = _answers(candidate, version)
        if python:
            return python
    raise OutcomeError(
        "env_missing",
        f"no Python {version}: looked for python{version} on PATH, in uv's and in pyenv's versions, "
        f"and uv could not install it ({error})",
        f"python -m uv python install {version}, or framework.python=<path of an interpreter with the framework>",
    )


# -- the user's own interpreter ----------------------------------------------------------------------------------------


@functools.cache
def check_own(python: str, packages: tuple[str, ...], distribution: str, version: str | None) -> tuple[Path, str]:
    """The user's interpreter (a path or a command on PATH), once it is known to have numpy and the `packages`; and the
    installed version of `distribution`, "" where the interpreter can not tell it.

    Nothing is imported in it, so this takes about 0.1 s; good answers are kept for the life of the process. `version` is
    compared with that of the installed `distribution` where the interpreter can tell it (Python >= 3.8).
    Raises OutcomeError (env_missing) that names the interpreter and what it lacks.
    """
    found = shutil.which(os.path.expanduser(python))
    if not found:
        inside = Path(python).expanduser() / "bin" / "python"
        hint = f"give the interpreter itself: framework.python={inside}" if inside.exists() else "give a path or a command on PATH"
        raise OutcomeError("env_missing", f"framework.python={python} is no program that can be started", hint)
    path = Path(found).absolute()  # not resolved: a virtual environment's python is a link
    answer, reason = _ask(path, _HAS, distribution, *packages, isolated=False)
    if not isinstance(answer, dict):
        raise OutcomeError("env_missing", f"framework.python={python} does not answer as a Python: {reason}")
    release = ".".join(str(number) for number in answer["python"])
    if tuple(answer["python"]) < (3, 6):
        raise OutcomeError("env_missing", f"framework.python={python} is Python {release}; crosstrain needs 3.6 or newer")
    if answer["missing"]:
        names = " and ".join(answer["missing"])
        raise OutcomeError(
            "env_missing",
            f"framework.python={python} (Python {release}) has no {names}",
            "install it there, or leave framework.python out",
        )
    installed = answer["version"]
    if version and installed and installed.split("+")[0] != version:
        raise OutcomeError(
            "env_missing",
            f"framework.python={python} has {distribution} {installed}, not framework.version={version}",
            "leave one of the two out",
        )
    if path.parent.name == "shims" and answer["executable"]:
        path = Path(answer["executable"])  # pyenv's shim chooses by variables that a worker does not get
    return path, installed or ""
