"""Making, finding, waiting for and taking back environments, with real uv and tiny packages from a folder of wheels."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from crosstrain import environments, interpreters, locks, paths
from crosstrain.environments_command import add_command
from crosstrain.errors import ConfigError, OutcomeError
from crosstrain.pip_settings import read_pip_settings, uv_settings
from crosstrain.uv_process import uv_program

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def write_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = (), content: str = "") -> Path:
    """A wheel with one package `name` that knows its __version__."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(f"Requires-Dist: {r}\n" for r in requires)
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n{content}",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def write_slow_source(folder: Path, state: Path, wheel: Path | None = None) -> None:
    """A source package `slow` 1.0.0 whose build writes its process id into state/pids and ends once state/open exists."""
    wheel = wheel or write_wheel(state, "slow", "1.0.0")
    backend = f"""
import os, shutil, time
def build_wheel(where, config_settings=None, metadata_directory=None):
    with open({str(state / "pids")!r}, "a") as pids:
        pids.write("%d\\n" % os.getpid())
    while not os.path.exists({str(state / "open")!r}):
        time.sleep(0.05)
    shutil.copy({str(wheel)!r}, where)
    return {wheel.name!r}
"""
    files = {
        "PKG-INFO": "Metadata-Version: 2.2\nName: slow\nVersion: 1.0.0\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "slow"\nversion = "1.0.0"\n',
        "backend.py": backend,
    }
    with tarfile.open(folder / "slow-1.0.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"slow-1.0.0/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))


class Place:
    """A cache, a folder of wheels and a folder of locks of its own, and no settings of this machine."""

    def __init__(self, root: Path) -> None:
        self.wheels, self.locks, self.cache = root / "wheels", root / "locks", root / "cache"
        for folder in (self.wheels, self.locks):
            folder.mkdir()
        write_wheel(self.wheels, "numpy", "1.0.0")
        write_wheel(self.wheels, "tiny", "1.0.0")

    def lock(self, name: str, *pins: str, python: str = HERE, **headers: str) -> None:
        lines = [f"# {key}: {value}" for key, value in {"python": python, **headers}.items()]
        (self.locks / f"{name}.txt").write_text("\n".join([*lines, *pins]) + "\n")

    def folders(self) -> list[str]:
        return sorted(path.name for path in (self.cache / "environments").iterdir() if path.is_dir())

    def start(self, framework: str) -> subprocess.Popen[str]:
        """Another process that makes an environment; prints each line of progress."""
        code = (
            "import sys; from pathlib import Path; from crosstrain import environments, paths\n"
            "paths.locks_dir = lambda: Path(sys.argv[1])\n"
            "environments.find_or_make(sys.argv[2], 'cpu', None, None, lambda line: print(line, flush=True))\n"
        )
        source = str(Path(environments.__file__).parents[1])
        return subprocess.Popen(
            [sys.executable, "-c", code, str(self.locks), framework],
            env={**os.environ, "PYTHONPATH": source},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path)
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(place.cache))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(place.wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(paths, "locks_dir", lambda: place.locks)
    return place


def make(
    framework: str = "tiny", accelerator: str = "cpu", version: str | None = None
) -> tuple[environments.Environment, list[str]]:
    lines: list[str] = []
    return environments.find_or_make(framework, accelerator, None, version, lines.append), lines


def ask(python: Path, code: str) -> str:
    return subprocess.run([str(python), "-I", "-B", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def refused(*arguments: str | None) -> OutcomeError:
    """The error of find_or_make(framework, accelerator, python, version), known to be one line."""
    framework, accelerator, python, version = arguments
    assert framework and accelerator
    with pytest.raises(OutcomeError) as caught:
        environments.find_or_make(framework, accelerator, python, version, lambda line: None)
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


def wait_until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, f"no {what}"
        time.sleep(0.05)


# -- making and finding ------------------------------------------------------------------------------------------------


def test_first_use_makes_it_with_progress_and_later_uses_find_it(place: Place) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0", "numpy==1.0.0")
    made, lines = make()
    assert made.managed and made.isolated and made.key == environments.environment_key("tiny", "cpu", None)
    assert ask(made.python, "import tiny, numpy, sys; print(tiny.__version__, '%d.%d' % sys.version_info[:2])") == f"1.0.0 {HERE}"
    text = "\n".join(lines)
    assert made.key in lines[0] and "resolved 2 packages: tiny 1.0.0" in text and "installed 2 packages" in text
    assert lines[-1].startswith(f"environment {made.key} is ready: tiny 1.0.0")
    compiled = list(made.python.parents[1].glob("lib/python*/site-packages/tiny/__pycache__/*.pyc"))
    assert compiled, "workers run with -B, so bytecode must be there"
    facts = json.loads((made.python.parents[1] / "complete.json").read_text())
    assert facts["lock"] == ["tiny==1.0.0", "numpy==1.0.0"] and facts["versions"]["tiny"] == "1.0.0" and facts["size"] > 0
    shutil.rmtree(place.wheels)
    assert make() == (made, [])


def test_pins_make_the_key_and_comments_do_not(place: Place) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0")
    first = environments.environment_key("tiny", "cpu", None)
    place.lock("tiny.cpu", "tiny==1.0.0", note="other words")
    assert environments.environment_key("tiny", "cpu", None) == first
    place.lock("tiny.cpu", "tiny==1.0.1")
    changed = environments.environment_key("tiny", "cpu", None)
    assert len({first, changed, environments.environment_key("tiny", "cpu", "2.0.0")}) == 3


def test_another_version_frees_the_other_pins(place: Place) -> None:
    write_wheel(place.wheels, "helper", "1.0.0")
    write_wheel(place.wheels, "helper", "2.0.0")
    write_wheel(place.wheels, "tiny", "2.0.0", ("helper>=2",))
    place.lock("tiny.cpu", "tiny==1.0.0", "helper==1.0.0", "numpy==1.0.0")
    usual, _ = make()
    newer, _ = make(version="2.0.0")
    code = "import tiny, helper, numpy; print(tiny.__version__, helper.__version__)"
    assert ask(usual.python, code) == "1.0.0 1.0.0"
    assert ask(newer.python, code) == "2.0.0 2.0.0"
    place.lock("tiny.cpu", "tiny==1.0.0", "helper==1.0.0", keep="helper")
    assert "helper" in refused("tiny", "cpu", None, "2.0.0").message  # the kept pin contradicts


def test_gpu_never_takes_a_cpu_wheel_and_cpu_tells_the_size_of_the_other(place: Place) -> None:
    headers = {"download": "2.6 GB, or 0.2 GB with a +cpu wheel", "note": "where the CPU wheel is"}
    place.lock("tiny.cpu", "tiny==1.0.0", **headers)
    place.lock("tiny.gpu", "tiny==1.0.0", **headers)
    big, lines = make()
    told = next(index for index, line in enumerate(lines) if "2.6 GB" in line)
    assert lines[told + 1] == "where the CPU wheel is" and any("installed" in line for line in lines[told:])
    environments.remove(big.key)
    write_wheel(place.wheels, "tiny", "1.0.0+cpu")
    small, lines = make()
    assert ask(small.python, "import tiny; print(tiny.__version__)") == "1.0.0+cpu"
    assert "CPU wheel" in "\n".join(lines) and "2.6 GB" not in "\n".join(lines)
    on_gpu, _ = make(accelerator="gpu")
    assert ask(on_gpu.python, "import tiny; print(tiny.__version__)") == "1.0.0"


def test_half_built_and_broken_environments_are_made_anew(place: Place) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0")
    folder = paths.cache_dir("environments") / environments.environment_key("tiny", "cpu", None)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "left over").write_text("")
    assert [one.state for one in environments.list_environments()] == ["half-built"]
    made, lines = make()
    assert "removing the half-built" in lines[0] and not (folder / "left over").exists()
    assert ask(made.python, "import tiny") == ""
    made.python.unlink()
    made.python.symlink_to("/nonexistent/python")  # as after the base interpreter was removed
    assert ask(make()[0].python, "import tiny") == ""


# -- interrupted, and two at once --------------------------------------------------------------------------------------


@pytest.fixture
def slow(place: Place, tmp_path: Path) -> Iterator[Path]:
    """`slow.cpu`, whose build goes on until state/open exists. Afterwards nothing of a build may run."""
    state = tmp_path / "state"
    state.mkdir()
    write_slow_source(place.wheels, state)
    place.lock("slow.cpu", "slow==1.0.0")
    yield state
    (state / "open").touch()
    wait_until(lambda: not running(state), "end of the builds")


def builds(state: Path) -> list[int]:
    return [int(pid) for pid in (state / "pids").read_text().split()] if (state / "pids").exists() else []


def running(state: Path) -> list[int]:
    return [pid for pid in builds(state) if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_nothing(place: Place, slow: Path, number: signal.Signals) -> None:
    process = place.start("slow")
    wait_until(lambda: builds(slow), "build")
    assert len(place.folders()) == 1
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT), errors
    assert place.folders() == []
    wait_until(lambda: not running(slow), "end of the killed build")
    (slow / "open").touch()
    assert ask(make("slow")[0].python, "import slow; print(slow.__version__)") == "1.0.0"


def test_two_at_once_build_once(place: Place, slow: Path) -> None:
    first = place.start("slow")
    wait_until(lambda: builds(slow), "build")
    assert [one.state for one in environments.list_environments()] == ["being built"]
    with pytest.raises(OutcomeError, match="being built"):
        environments.remove(place.folders()[0])
    second = place.start("slow")
    assert second.stdout is not None
    waiting = second.stdout.readline()
    assert "waiting" in waiting and place.folders()[0] in waiting
    (slow / "open").touch()
    said, errors = first.communicate(timeout=120)
    assert first.returncode == 0 and "is ready" in said, errors
    said, errors = second.communicate(timeout=120)
    assert second.returncode == 0 and said == "", errors
    assert len(builds(slow)) == 1


def test_after_a_killed_driver_the_next_waits_for_its_uv_and_builds_anew(place: Place, slow: Path) -> None:
    first = place.start("slow")
    wait_until(lambda: builds(slow), "build")
    first.kill()
    first.communicate()
    second = place.start("slow")
    assert second.stdout is not None
    assert "waiting" in second.stdout.readline()
    (slow / "open").touch()
    said, errors = second.communicate(timeout=120)
    assert second.returncode == 0 and "removing the half-built" in said and "is ready" in said, errors


# -- one line ----------------------------------------------------------------------------------------------------------


def test_an_unknown_version_is_one_line_and_leaves_nothing(place: Place) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0")
    error = refused("tiny", "cpu", None, "9.9.9")
    assert error.outcome == "env_missing" and "tiny==9.9.9" in error.message
    log = Path(error.hint.split(": ")[-1])
    assert "tiny==9.9.9" in log.read_text()
    assert place.folders() == []


def test_no_network_is_one_line_that_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    place.lock("other.cpu", "other==1.0.0")
    error = refused("other", "cpu", None, None)
    assert error.outcome == "env_missing" and "127.0.0.1:9" in error.message
    assert "no network" in error.hint and "PIP_INDEX_URL" in error.hint
    assert place.folders() == []


def test_no_room_is_one_line_before_anything_is_installed(place: Place) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0", disk="9000000 GB, or 0.1 GB with a +cpu wheel")
    error = refused("tiny", "cpu", None, None)
    assert "9e+06 GB" in error.message and "CROSSTRAIN_CACHE" in error.hint and place.folders() == []
    write_wheel(place.wheels, "tiny", "1.0.0+cpu")
    assert make()[0].managed


def test_a_cache_that_can_not_be_written_is_one_line(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0")
    (place.wheels / "file").write_text("")
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(place.wheels / "file" / "cache"))
    assert "CROSSTRAIN_CACHE" in refused("tiny", "cpu", None, None).hint


def test_a_missing_interpreter_names_the_command_that_helps(place: Place) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0", python="3.99")
    error = refused("tiny", "cpu", None, None)
    assert error.outcome == "env_missing" and "Python 3.99" in error.message and "PATH" in error.message
    assert "uv python install 3.99" in error.hint and place.folders() == []


def test_without_a_lock(place: Place) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0")
    place.lock("nowhere.cpu", note="it is on no index")
    error = refused("tiny", "gpu", None, None)
    assert error.outcome == "unsupported" and "only for cpu" in error.message and "framework.python" in error.hint
    error = refused("nowhere", "cpu", None, None)
    assert error.outcome == "env_missing" and "it is on no index" in error.message
    assert refused("unknown", "cpu", None, None).outcome == "env_missing"


def test_a_line_that_pins_nothing_is_named(place: Place) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0", "numpy>=1")
    with pytest.raises(ConfigError, match=r"tiny\.cpu\.txt line 3: 'numpy>=1'"):
        locks.find_lock("tiny", "cpu")


# -- interpreters ------------------------------------------------------------------------------------------------------


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_shims_that_do_not_answer_are_passed_over(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "real" / f"python{HERE}"
    real.parent.mkdir()
    real.symlink_to(os.path.realpath(sys.executable))
    script(tmp_path / "shims" / f"python{HERE}", "echo 'pyenv: command not found' >&2; exit 127")
    script(tmp_path / "liar" / f"python{HERE}", """echo '["2.7", true, "/usr/bin/python2.7"]'""")
    monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / name) for name in ("shims", "liar", "real")))
    assert interpreters.find_python(HERE, print).samefile(real)


def test_pyenv_versions_are_found_behind_the_shims(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = tmp_path / "pyenv" / "versions"
    script(tmp_path / "shims" / f"python{HERE}", "exit 127")
    for patch in ("2", "9"):
        (versions / f"{HERE}.{patch}" / "bin").mkdir(parents=True)
        (versions / f"{HERE}.{patch}" / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    script(versions / f"{HERE}.10" / "bin" / "python", "exit 1")  # the newest, and broken
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert interpreters.find_python(HERE, print) == versions / f"{HERE}.9" / "bin" / "python"


def test_a_users_own_interpreter_must_have_numpy_and_the_framework(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.lock("tiny.cpu", "tiny-dist==1.0.0", **{"import": "tiny"})
    own = tmp_path / "own"
    subprocess.run([uv_program(), "venv", "-q", "--no-project", "--python", sys.executable, str(own)], check=True)
    python = str(own / "bin" / "python")
    site = next(own.glob("lib/python*/site-packages"))

    def install(wheel: str) -> None:
        zipfile.ZipFile(place.wheels / wheel).extractall(site)

    monkeypatch.setenv("PYTHONPATH", str(place.wheels / "numpy-1.0.0-py3-none-any.whl"))  # does not reach a worker
    write_wheel(tmp_path, "tiny", "1.0.0")
    zipfile.ZipFile(tmp_path / "tiny-1.0.0-py3-none-any.whl").extractall(tmp_path)
    monkeypatch.chdir(tmp_path)  # nor does a folder that happens to lie here
    error = refused("tiny", "cpu", python, None)
    assert error.outcome == "env_missing" and "no numpy and tiny" in error.message and python in error.message
    install("numpy-1.0.0-py3-none-any.whl")
    (site / "tiny").mkdir()  # a folder alone is no package
    assert "has no tiny" in refused("tiny", "cpu", python, None).message
    install("tiny-1.0.0-py3-none-any.whl")
    (site / "tiny" / "__init__.py").write_text("raise SystemExit('imported')")  # only looked for, never imported
    found = environments.find_or_make("tiny", "cpu", python, None, print)
    assert found == environments.Environment(Path(python), python, managed=False, isolated=False)
    assert environments.find_or_make("tiny", "gpu", python, None, print) == found  # no lock for gpu needed
    write_wheel(place.wheels, "tiny_dist", "1.0.0+cu1")
    install("tiny_dist-1.0.0+cu1-py3-none-any.whl")
    upgraded = environments.find_or_make("tiny", "cpu", python, "1.0.0", print)
    assert (upgraded.python, upgraded.key) == (found.python, f"{python} 1.0.0+cu1")
    assert "1.0.0+cu1, not framework.version=2.0.0" in refused("tiny", "cpu", python, "2.0.0").message
    assert f"framework.python={python}" in refused("tiny", "cpu", str(own), None).hint
    assert "no program" in refused("tiny", "cpu", "no-such-python", None).message
    assert "does not answer as a Python" in refused("tiny", "cpu", "true", None).message
    assert not place.cache.exists()  # nothing was made


def test_driver_means_this_interpreter(place: Place) -> None:
    assert environments.find_or_make("fake", "cpu", "driver", None, print).python == Path(sys.executable)


# -- pip's settings ----------------------------------------------------------------------------------------------------


def test_pip_settings_of_files_and_variables(tmp_path: Path) -> None:
    def conf(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True)
        path.write_text(text)

    conf(tmp_path / "xdg/pip/pip.conf", "[global]\nfind-links = /of/all\nindex_url = http://all/simple\n")
    conf(
        tmp_path / "home/.config/pip/pip.conf",
        "[global]\nfind-links = /of/user\ncert = /user.pem\n[install]\nindex-url = http://install/simple\n",
    )
    conf(
        tmp_path / "named/pip.conf",
        "[global]\ntrusted-host = one\n    two\nextra-index-url =\n    http://a/simple\n    http://b/%41\n",
    )
    environ = {
        "HOME": str(tmp_path / "home"),
        "XDG_CONFIG_DIRS": str(tmp_path / "xdg"),
        "PIP_CONFIG_FILE": str(tmp_path / "named/pip.conf"),
        "PIP_FIND_LINKS": "/of/variable ~/wheels",
        "PIP_CERT": "",
        "PIP_CONSTRAINT": "/constraints.txt",
        "PIP_DEFAULT_TIMEOUT": "180",
        "https_proxy": "http://proxy:1",
    }
    result, options = uv_settings(environ)
    assert result["UV_FIND_LINKS"] == "/of/variable," + os.path.expanduser("~/wheels")  # a variable beats a file
    assert result["UV_DEFAULT_INDEX"] == "http://install/simple"  # [install] beats [global]
    assert result["UV_INDEX"] == "http://a/simple http://b/%41"
    assert result["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert result["UV_INSECURE_HOST"] == "one two"
    assert result["SSL_CERT_FILE"] == "/user.pem"  # an empty variable counts for nothing
    assert result["UV_CONSTRAINT"] == "/constraints.txt" and result["UV_HTTP_TIMEOUT"] == "180"
    assert result["https_proxy"] == "http://proxy:1" and options == []
    del environ["PIP_FIND_LINKS"]
    assert read_pip_settings(environ)["find-links"] == "/of/user"
    environ["PIP_CONFIG_FILE"] = os.devnull  # pip's way to switch all files off
    assert set(read_pip_settings(environ)) == {"config-file", "constraint", "default-timeout", "timeout"}


def test_uvs_own_variables_win_over_pips_settings() -> None:
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://pip/simple", "PIP_FIND_LINKS": "/pip", "PIP_NO_INDEX": "1"}
    result, options = uv_settings(pip)
    assert options == ["--no-index"] and "UV_DEFAULT_INDEX" not in result and result["UV_FIND_LINKS"] == "/pip"
    result, options = uv_settings({**pip, "UV_INDEX_URL": "http://uv/simple", "UV_FIND_LINKS": "/uv"})
    assert options == [] and result["UV_INDEX_URL"] == "http://uv/simple" and result["UV_FIND_LINKS"] == "/uv"
    del pip["PIP_NO_INDEX"]
    assert "UV_DEFAULT_INDEX" not in uv_settings({**pip, "UV_INDEX_URL": "http://uv/simple"})[0]
    assert not {"VIRTUAL_ENV", "PYTHONPATH"} & set(uv_settings({"VIRTUAL_ENV": "/v", "PYTHONPATH": "/p"})[0])


def test_a_broken_pip_configuration_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("find-links = /no/section\n")
    with pytest.raises(OutcomeError, match=r"pip\.conf can not be read") as caught:
        uv_settings({"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")})
    assert "\n" not in caught.value.message


def test_wheels_named_in_pips_configuration_file_are_used(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name)
    (tmp_path / "pip.conf").write_text(f"[global]\nfind-links = {place.wheels}\n[install]\nno-index = true\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    place.lock("tiny.cpu", "tiny==1.0.0")
    assert ask(make()[0].python, "import tiny; print(tiny.__version__)") == "1.0.0"


def test_the_version_wanted_may_lie_in_any_of_several_indexes(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def index(name: str, version: str) -> str:
        folder = tmp_path / name / "tiny"
        folder.mkdir(parents=True)
        wheel = write_wheel(folder, "tiny", version)
        (folder / "index.html").write_text(f'<!DOCTYPE html><a href="{wheel.name}">{wheel.name}</a>')
        return folder.parent.as_uri()

    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", index("main", "2.0.0"))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index("extra", "1.0.0"))
    for version in ("2.0.0", "1.0.0"):
        place.lock("tiny.cpu", f"tiny=={version}")
        assert ask(make()[0].python, "import tiny; print(tiny.__version__)") == version


# -- the command -------------------------------------------------------------------------------------------------------


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    args = parser.parse_args(["env", *words])
    return args.function(args)


def test_the_command_makes_lists_checks_and_removes(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0", "numpy==1.0.0")
    place.lock("tiny.gpu", "tiny==1.0.0", "numpy==1.0.0", disk="3 GB")
    place.lock("wrong.cpu", "wrong==1.0.0")
    assert command("make", "tiny", "wrong", "tiny.gpu") == 1  # the others are made all the same
    said = capsys.readouterr()
    assert said.err.startswith("wrong: ") and said.err.count("\n") == 1
    on_cpu, on_gpu = (environments.environment_key("tiny", accelerator, None) for accelerator in ("cpu", "gpu"))
    assert place.folders() == sorted([on_cpu, on_gpu])
    assert command("check", "tiny") == 0
    checked = capsys.readouterr().out
    assert f"{on_cpu}: Python {HERE}" in checked and "tiny 1.0.0" in checked and on_gpu in checked
    next((place.cache / "environments" / on_cpu).glob("lib/python*/site-packages/tiny/__init__.py")).write_text("import absent")
    assert command("check", on_cpu) == 1
    assert "absent" in capsys.readouterr().err
    place.lock("tiny.cpu", "tiny==1.0.1")
    assert command("remove", "tiny.gpu") == 0 and place.folders() == [on_cpu]
    capsys.readouterr()
    assert command("list") == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "old lock" in rows[on_cpu] and "not made" in rows[on_gpu] and "3 GB" in rows[on_gpu]
    assert command("remove", "--all") == 0 and place.folders() == []
    with pytest.raises(ConfigError, match="no environment tiny"):
        command("remove", "tiny")


def test_every_shipped_lock_can_be_read() -> None:
    names = {lock.name: lock for lock in locks.all_locks()}
    assert {"torch.cpu", "torch.gpu", "mxnet.cpu"} <= set(names)
    for lock in names.values():
        assert lock.accelerator in ("cpu", "gpu") and lock.python.count(".") == 1
        assert any(name == "numpy" for name, _ in lock.pins), lock.name
    assert names["mxnet.cpu"].requirements("1.8.0")[:2] == ["mxnet==1.8.0", "numpy==1.23.5"]
