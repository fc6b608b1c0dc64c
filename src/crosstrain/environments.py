"""Find or make the Python environment of a framework.

Environments live in the user cache, `environments/<framework>-<accelerator>-<hash of the lock>`, and are filled by uv.
`complete.json` is written last: a folder without it is half-built, never used, and removed. One process at a time builds
one (a lock file); uv holds that lock file open too, so that nobody builds beside a uv whose driver was killed.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from crosstrain import horovod_wheel, interpreters, locks, paths, system_libraries
from crosstrain.errors import OutcomeError
from crosstrain.uv_process import Report, Uv

_MARKER = "complete.json"


@dataclass(frozen=True)
class Environment:
    """An interpreter that has a framework."""

    python: Path
    key: str
    #: made by crosstrain from a lock
    managed: bool
    #: start it with -I; a user's own is started without, so that the user's site-packages count (and PYTHONPATH removed)
    isolated: bool


@dataclass(frozen=True)
class Cached:
    """One folder of the cache. `state`: ready, old lock, half-built, being built. Size in bytes."""

    key: str
    folder: Path
    state: str
    size: int
    #: the contents of complete.json, {} when there is none
    facts: dict


def environment_key(framework: str, accelerator: str, version: str | None) -> str:
    """Name of the managed environment, the same as long as its lock does not change. Raises OutcomeError without a lock."""
    return locks.find_lock(framework, accelerator).key(version)


def find_or_make(framework: str, accelerator: str, python: str | None, version: str | None, report: Report) -> Environment:
    """The environment of a run.

    `python` is framework.python: a path, a command on PATH, "driver" (this interpreter), or None = the managed environment, made on
    first use; `version` is framework.version. `report` gets one line at a time.
    Raises OutcomeError (env_missing or unsupported). A build that an exception (KeyboardInterrupt too) leaves is taken back.
    """
    if python == "driver":
        return Environment(Path(sys.executable), "driver", managed=False, isolated=False)
    if python:
        packages, distribution = locks.describe(framework, accelerator)
        own, installed = interpreters.check_own(python, packages, distribution, version)
        return Environment(own, f"{own} {installed}".strip(), managed=False, isolated=False)
    return make(framework, accelerator, version, report)


def make(framework: str, accelerator: str, version: str | None, report: Report) -> Environment:
    """The managed environment, built if it is not there yet. Errors as for `find_or_make`."""
    lock = locks.find_lock(framework, accelerator)
    key = lock.key(version)
    try:
        folder = paths.cache_dir("environments") / key
        ready = _ready(folder)
        if ready:
            return ready
        with _locked(folder, report) as lock_fd:
            ready = _ready(folder)  # another process may have built it while this one waited
            if not ready:
                _build(folder, lock, version, lock_fd, report)
                ready = _ready(folder)
    except OSError as error:
        hint = "CROSSTRAIN_CACHE names another folder for environments"
        raise OutcomeError("env_missing", f"the environment {key} could not be made: {error}", hint) from error
    assert ready is not None
    return ready


def _facts(folder: Path) -> dict:
    try:
        facts = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _ready(folder: Path) -> Environment | None:
    """The finished environment, or None. Its base interpreter or a library it links to may have been removed since: links are followed."""
    python = folder / "bin" / "python"
    facts = _facts(folder)
    if facts and python.exists() and all(os.path.exists(library) for library in facts.get("links", {}).values()):
        return Environment(python, folder.name, managed=True, isolated=True)
    return None


@contextlib.contextmanager
def _locked(folder: Path, report: Report | None) -> Iterator[int]:
    """Hold the folder's lock file; gives its descriptor. Waits for another holder; without `report`, BlockingIOError at once."""
    descriptor = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if report is None:
                raise
            report(f"another process is making the environment {folder.name}: waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


# -- building ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stop_by_exception() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit meanwhile, so that clean-up runs; a handler that somebody set stays."""
    signals = [signal.SIGTERM, signal.SIGHUP] if threading.current_thread() is threading.main_thread() else []
    replaced = [one for one in signals if signal.getsignal(one) is signal.SIG_DFL]

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for one in replaced:
        signal.signal(one, stop)
    try:
        yield
    finally:
        for one in replaced:
            signal.signal(one, signal.SIG_DFL)


def _build(folder: Path, lock: locks.Lock, version: str | None, lock_fd: int, report: Report) -> None:
    """Make `folder` whole or not at all."""
    libraries = system_libraries.find_all(lock)
    if folder.exists():
        report(f"removing the half-built environment {folder.name}")
        _remove_folder(folder)
    with stop_by_exception():
        base = interpreters.find_python(lock.python, report)
        report(f"making the environment {folder.name} with {base}")
        try:
            _fill(folder, lock, version, base, lock_fd, report, libraries)
        except BaseException:
            _remove_folder(folder)
            raise


def _fill(folder: Path, lock: locks.Lock, version: str | None, base: Path, lock_fd: int, report: Report, libraries: dict[str, str]) -> None:
    start = time.monotonic()
    uv = Uv(f"the environment {folder.name}", Path(f"{folder}.log"), lock_fd, report)
    wanted = lock.requirements(version)
    uv.run("venv", "--no-project", "--python", str(base), str(folder))
    install = ["--python", str(folder / "bin" / "python"), *wanted]
    plan = _plan(uv, lock, version, install)
    coming = dict(re.findall(r"^ \+ ([^=\s]+)==(\S+)$", plan, re.MULTILINE))
    main = lock.distribution
    cpu_wheel = coming.get(main, "").endswith("+cpu")
    _check_disk(folder, lock, cpu_wheel)
    report(f"resolved {len(coming)} packages: {main} {coming.get(main, '')}" + (" (CPU wheel)" if cpu_wheel else ""))
    if "Would download" in plan and not cpu_wheel and "download" in lock.headers:
        report(f"about to download {lock.headers['download']}")
        if "note" in lock.headers:
            report(lock.headers["note"])
    if lock.horovod:
        horovod_wheel.check(lock, coming[main])
    # compiled now: workers run with -B, which never writes it
    if lock.python == "3.6":  # uv's way needs 3.7
        uv.pip_install(*install)
        # files for other Pythons do not compile: no failure
        command = [str(folder / "bin" / "python"), "-I", "-m", "compileall", "-qq", str(folder / "lib")]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    else:
        uv.pip_install("--compile-bytecode", *install)
    if lock.horovod:
        work = folder / "horovod"
        wheel = horovod_wheel.provide(lock, coming[main], folder / "bin" / "python", work, uv)
        uv.pip_install("--compile-bytecode", "--no-deps", "--python", str(folder / "bin" / "python"), str(wheel))
        shutil.rmtree(work, ignore_errors=True)
    system_libraries.make_links(folder, libraries)
    versions = _installed(folder)
    size = _size(folder)
    seconds = time.monotonic() - start
    facts = {
        "schema": 1,
        "framework": lock.framework,
        "accelerator": lock.accelerator,
        "version": version,
        "lock": wanted,
        "links": libraries,
        "module": " ".join(lock.modules),
        "main": f"{main} {versions.get(main, '')}",
        "python": lock.python,
        "base": str(base),
        "machine": platform.machine(),
        "made": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "uv": uv.run("--version").strip(),
        "size": size,
        "versions": versions,
    }
    uv.log.unlink(missing_ok=True)
    temporary = folder / f"{_MARKER}.tmp"
    temporary.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    temporary.replace(folder / _MARKER)
    report(f"environment {folder.name} is ready: {main} {versions.get(main, '')}, {size / 1e9:.1f} GB, {seconds:.0f} s")


def _plan(uv: Uv, lock: locks.Lock, version: str | None, install: list[str]) -> str:
    """What uv would install. Where it can not have the wanted version, the error's hint names the nearest that there are."""
    try:
        return uv.pip_install("--dry-run", *install)
    except OutcomeError as error:
        if not version or "No solution found" not in error.message:
            raise
        near = [_nearest(uv, install[1], lock.distribution, bound) for bound in (f"<={version}", f">={version}")]
        found = " and ".join(dict.fromkeys(one for one in near if one))
        # The nearest may be the wanted one itself, where something else does not fit.
        hint = f"nearest for Python {lock.python}: {found}; " if found and version not in near else ""
        if "found wheels for" in error.message:
            hint += "in an environment of your own with another Python, framework.python uses it; "
        raise OutcomeError("env_missing", error.message, hint + error.hint) from None


def _nearest(uv: Uv, python: str, main: str, wanted: str) -> str:
    """The version that uv finds nearest to the bound, above or below; "" when there is none."""
    lowest = ["--resolution", "lowest-direct"] if wanted.startswith(">") else []
    with contextlib.suppress(OutcomeError):
        plan = uv.pip_install("--dry-run", "--no-deps", "--python", python, *lowest, main + wanted)
        found = re.search(r"^ \+ [^=\s]+==(\S+)$", plan, re.MULTILINE)
        return found[1] if found else ""
    return ""


def _check_disk(folder: Path, lock: locks.Lock, cpu_wheel: bool) -> None:
    needed = lock.gigabytes("disk", cpu_wheel)
    free = shutil.disk_usage(folder).free / 1e9
    if needed is not None and needed > free:
        raise OutcomeError(
            "env_missing",
            f"no room for the environment {folder.name}: it needs about {needed:g} GB, {folder.parent} has {free:.1f} GB free",
            "free some space, or name a folder elsewhere with CROSSTRAIN_CACHE",
        )


def _installed(folder: Path) -> dict[str, str]:
    found = metadata.distributions(path=[str(one) for one in folder.glob("lib/python*/site-packages")])
    return dict(sorted((one.name.lower().replace("_", "-"), one.version) for one in found if one.name))


def _size(folder: Path) -> int:
    """Bytes of all files (uv links them from its own cache where it can, so the disk may hold them once for both)."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _remove_folder(folder: Path) -> None:
    """The marker first: whatever stops this, what is left counts as half-built."""
    (folder / _MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


# -- the cache ---------------------------------------------------------------------------------------------------------


def list_environments() -> list[Cached]:
    """Every environment of the cache, half-built ones included, by key."""
    by_name = {lock.name: lock for lock in locks.all_locks()}
    result = []
    for folder in sorted(path for path in paths.cache_dir("environments").iterdir() if path.is_dir()):
        facts = _facts(folder)
        if facts:
            lock = by_name.get(f"{facts.get('framework')}.{facts.get('accelerator')}")
            state = "ready" if lock and lock.key(facts.get("version")) == folder.name else "old lock"
        else:
            state = "being built" if _is_locked(folder) else "half-built"
        result.append(Cached(folder.name, folder, state, facts.get("size") or _size(folder), facts))
    return result


def _is_locked(folder: Path) -> bool:
    try:
        with _locked(folder, None):
            return False
    except BlockingIOError:
        return True


def remove(key: str) -> int:
    """Remove one environment of the cache; gives its size in bytes. Raises OutcomeError when it is being built or not there."""
    folder = paths.cache_dir("environments") / key
    if not folder.is_dir() or folder.parent != paths.cache_dir("environments"):
        raise OutcomeError("env_missing", f"there is no environment {key}", "crosstrain env list shows them")
    try:
        with _locked(folder, None):
            size = _size(folder)
            _remove_folder(folder)
    except BlockingIOError:
        raise OutcomeError("env_missing", f"{key} is being built by another process") from None
    Path(f"{folder}.log").unlink(missing_ok=True)
    return size


def check(cached: Cached) -> str:
    """Import numpy and the framework in a ready environment; gives their versions. Raises OutcomeError when that fails."""
    module = cached.facts.get("module")
    if not module:
        raise OutcomeError("env_missing", f"{cached.key} is {cached.state}", f"crosstrain env remove {cached.key}")
    code = (
        "import importlib, platform, sys, numpy\n"
        "print('Python %s, numpy %s' % (platform.python_version(), numpy.__version__), end='')\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    package = name.partition('.')[0]\n"
        "    print(', %s %s' % (package, getattr(sys.modules[package], '__version__', '(no version)')), end='')\n"
    )
    command = [str(cached.folder / "bin" / "python"), "-I", "-B", "-c", code, *module.split()]
    try:
        # Five minutes: TensorFlow's import has been seen to take 40 s on a busy machine.
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OutcomeError("env_missing", f"{cached.key}: {error}") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OutcomeError("env_missing", f"{cached.key}: import {module} fails: {reason}", f"crosstrain env remove {cached.key}")
    return done.stdout.strip().splitlines()[-1]
