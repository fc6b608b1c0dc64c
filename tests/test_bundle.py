"""`crosstrain env bundle`: wheels for a machine without a network, and installing from nothing but them."""

from __future__ import annotations

import ensurepip
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import PUBLISHED, QUICK, ROOT, Result, needs
from crosstrain import bundle, environments, locks
from crosstrain.errors import ConfigError, OutcomeError
from crosstrain.pip_settings import pip_variables
from test_environments import HERE, Place, ask, builds, command, running, wait_until, write_slow_source, write_wheel
from test_environments import place as bare_place  # noqa: F401


@pytest.fixture
def place(bare_place: Place) -> Place:  # noqa: F811
    """pip, which fetches, comes from the same folder as everything else."""
    folders = [Path(ensurepip.__file__).parent / "_bundled", Path("/usr/share/python-wheels")]
    wheels = [wheel for folder in folders for wheel in folder.glob("pip-*.whl")]
    shutil.copy(wheels[0], bare_place.wheels)
    return bare_place


def write(folder: Path, *names: str, python: str | None = None, version: str | None = None) -> list[str]:
    lines: list[str] = []
    bundle.write(folder, [bundle.part(name, "cpu", python, version) for name in names], lines.append)
    return lines


def compiled(folder: Path, name: str, *tags: str) -> None:
    for tag in tags:
        wheel = write_wheel(folder, name, "1.0.0")
        text = tag.replace("MACHINE", platform.machine())
        wheel.rename(folder / f"{name}-1.0.0-{text}.whl")


# -- frameworks --------------------------------------------------------------------------------------------------------


def test_an_environment_is_made_from_the_bundle_alone(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "open").touch()
    write_slow_source(place.wheels, tmp_path / "state")  # a package that comes as source only
    write_wheel(place.wheels, "helper", "1.0.0")
    write_wheel(place.wheels, "tiny", "1.0.0", ("helper",))
    place.lock("tiny.cpu", "tiny==1.0.0", "slow==1.0.0", "numpy==1.0.0")
    assert command("bundle", "tiny", "--to", str(tmp_path / "new" / "bundle")) == 0
    said = capsys.readouterr().out
    assert "tiny.cpu for Python" in said and "4 packages" in said and "building wheel" in said
    made = tmp_path / "new" / "bundle"
    assert os.listdir(tmp_path / "new") == ["bundle"]
    assert sorted(os.listdir(made)) == ["README.md", "tiny.cpu.txt", "wheels"]
    names = ["helper-1.0.0", "numpy-1.0.0", "slow-1.0.0", "tiny-1.0.0"]
    assert sorted(os.listdir(made / "wheels")) == [f"{name}-py3-none-any.whl" for name in names]
    pins = (made / "tiny.cpu.txt").read_text().splitlines()
    assert pins == [f"# python: {HERE}", "helper==1.0.0", "numpy==1.0.0", "slow==1.0.0", "tiny==1.0.0"]
    readme = (made / "README.md").read_text()
    assert "crosstrain env make tiny.cpu\n" in readme and f"Python {HERE}" in readme
    assert made.stat().st_mode & 0o777 == 0o755  # others may read it
    shutil.rmtree(place.wheels)
    shutil.rmtree(tmp_path / "uv")
    shutil.rmtree(place.cache)
    monkeypatch.setenv("PIP_FIND_LINKS", str(made / "wheels"))
    home = environments.find_or_make("tiny", "cpu", None, None, print)
    assert ask(home.python, "import tiny, helper, slow, numpy; print(tiny.__version__)") == "1.0.0"


def test_another_version(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(place.wheels, "helper", "2.0.0")
    write_wheel(place.wheels, "tiny", "2.0.0", ("helper>=2",))
    place.lock("tiny.cpu", "tiny==1.0.0", "numpy==1.0.0")
    write(tmp_path / "bundle", "tiny", version="2.0.0")
    assert "env make tiny.cpu --version 2.0.0" in (tmp_path / "bundle" / "README.md").read_text()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "bundle" / "wheels"))
    home = environments.find_or_make("tiny", "cpu", None, "2.0.0", print)
    assert ask(home.python, "import tiny, helper; print(tiny.__version__, helper.__version__)") == "2.0.0 2.0.0"


def test_for_another_python_its_wheels_are_taken(place: Place, tmp_path: Path) -> None:
    """Also where that Python is not on this machine: nothing runs in it."""
    place.lock("native.cpu", "native==1.0.0")
    compiled(place.wheels, "native", *(f"cp3{minor}-cp3{minor}-manylinux2014_MACHINE" for minor in (11, 12, 99)))
    write(tmp_path / "12", "native.cpu", python="3.12")
    assert [path.name.split("-")[2] for path in (tmp_path / "12" / "wheels").iterdir()] == ["cp312"]
    assert "# python: 3.12\n" in (tmp_path / "12" / "native.cpu.txt").read_text()
    if HERE != "3.12":
        assert "framework.python=VENV_native/bin/python" in (tmp_path / "12" / "README.md").read_text()
    write(tmp_path / "99", "native", python="3.99")
    assert [path.name.split("-")[2] for path in (tmp_path / "99" / "wheels").iterdir()] == ["cp399"]
    with pytest.raises(OutcomeError, match="native"):
        write(tmp_path / "98", "native", python="3.98")
    assert not list(tmp_path.glob("98*"))


@pytest.mark.long
def test_what_must_be_compiled_needs_its_python(place: Place, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "open").touch()
    write_slow_source(place.wheels, state)
    place.lock("slow.cpu", "slow==1.0.0")
    write(tmp_path / "plain", "slow", python="3.99")
    assert (tmp_path / "plain" / "wheels" / "slow-1.0.0-py3-none-any.whl").exists()
    # the same source, whose wheel now is for this Python only
    compiled(state, "slow", f"cp{HERE.replace('.', '')}-none-linux_MACHINE")
    wheel = next(state.glob("slow*-linux_*.whl"))
    source = place.wheels / "slow-1.0.0.tar.gz"
    source.unlink()
    write_slow_source(place.wheels, state, wheel)
    with pytest.raises(OutcomeError, match=r"slow must be compiled, with Python 3\.99"):
        write(tmp_path / "native", "slow", python="3.99")
    write(tmp_path / "native", "slow")
    assert platform.libc_ver()[1] in (tmp_path / "native" / "README.md").read_text()


def test_old_systems_are_served_and_the_least_glibc_is_told(place: Place, tmp_path: Path) -> None:
    place.lock("native.cpu", "native==1.0.0")
    compiled(place.wheels, "native", "py3-none-manylinux_2_17_MACHINE", "py3-none-manylinux2010_MACHINE", "py3-none-any")
    write(tmp_path / "old", "native")
    assert "glibc 2.17 or newer" in (tmp_path / "old" / "README.md").read_text()
    (wheel,) = (tmp_path / "old" / "wheels").iterdir()
    assert "manylinux_2_17" in wheel.name  # the old names are no gain, and compiled is better than plain
    links = [
        "http://x/a-1-cp311-cp311-manylinux_2_34_x86_64.whl#sha256=0",
        "http://x/a-1-cp39-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
    ]
    assert bundle._portable(links) == (links[1],)
    assert bundle._portable(links[:1]) == (links[0],)


# -- nothing half-made -------------------------------------------------------------------------------------------------


@pytest.fixture
def slow(place: Place, tmp_path: Path) -> Iterator[Path]:
    state = tmp_path / "state"
    state.mkdir()
    write_slow_source(place.wheels, state)
    place.lock("slow.cpu", "slow==1.0.0")
    yield state
    (state / "open").touch()
    wait_until(lambda: not running(state), "end of the builds")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_leaves_nothing(place: Place, slow: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    target = tmp_path / "to"
    target.mkdir()
    program = (
        "import sys; from pathlib import Path; from crosstrain import cli, paths\n"
        f"paths.locks_dir = lambda: Path({str(place.locks)!r})\n"
        f"sys.exit(cli.main(['env', 'bundle', 'slow', '--to', {str(target / 'bundle')!r}]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: builds(slow), "build")
    assert any(target.iterdir())
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert list(target.iterdir()) == []
    wait_until(lambda: not running(slow), "end of the killed build")


def test_no_network_is_one_line(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.lock("other.cpu", "other==1.0.0")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(OutcomeError, match=r"127\.0\.0\.1:9") as caught:
        write(tmp_path / "to" / "bundle", "other")
    assert "no network" in caught.value.hint and "\n" not in caught.value.message + caught.value.hint
    assert list((tmp_path / "to").iterdir()) == []


def test_a_folder_with_something_in_it_stays_as_it_is(place: Place, tmp_path: Path) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    with pytest.raises(ConfigError, match="mine: is there already"):
        write(tmp_path / "mine", "tiny")
    assert os.listdir(tmp_path / "mine") == ["file"]
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", "tiny")
    assert (tmp_path / "empty" / "README.md").exists()
    with pytest.raises(OutcomeError, match="file"):
        write(tmp_path / "mine" / "file" / "bundle", "tiny")


def test_wrong_words_are_one_line(place: Place, tmp_path: Path) -> None:
    place.lock("tiny.cpu", "tiny==1.0.0")
    for words, reason in (
        (("driver", "--python", "3.10"), "3.11 or newer"),
        (("tiny", "--python", "3"), "like 3.12"),
        (("tiny", "driver", "--version", "2.0.0"), "exactly one framework"),
    ):
        with pytest.raises(ConfigError, match=reason):
            command("bundle", *words, "--to", str(tmp_path / "bundle"))
    with pytest.raises(OutcomeError, match=r"unknown has no lock.*there are locks of tiny"):
        command("bundle", "unknown", "--to", str(tmp_path / "bundle"))
    assert not (tmp_path / "bundle").exists()


# -- where pip looks ---------------------------------------------------------------------------------------------------


def test_pip_is_told_what_uv_is_told(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = http://company/simple\nfind-links =\n    /one\n    /two\n[install]\nno-index = 1\n"
    )
    environ = {"HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "XDG_CONFIG_DIRS": str(tmp_path), "PIP_TIMEOUT": "7"}
    told = {key: value for key, value in pip_variables(environ).items() if key != "PIP_CERT"}
    assert told == {
        "PIP_INDEX_URL": "http://company/simple",
        "PIP_FIND_LINKS": "/one /two",
        "PIP_NO_INDEX": "1",
        "PIP_TIMEOUT": "7",
    }
    own = {"UV_DEFAULT_INDEX": "http://mine/simple", "UV_INDEX": "a=http://a/simple http://b/x=y", "UV_FIND_LINKS": "/three,/four"}
    told = pip_variables({**environ, **own})
    assert told["PIP_INDEX_URL"] == "http://mine/simple" and told["PIP_EXTRA_INDEX_URL"] == "http://a/simple http://b/x=y"
    assert told["PIP_FIND_LINKS"] == "/three /four" and told["PIP_NO_INDEX"] == "0"


# -- the driver --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the driver, made with this machine's settings."""
    target = tmp_path_factory.mktemp("driver") / "bundle"
    try:
        bundle.write(target, [bundle.part("driver", "cpu", None, None)], print)
    except OutcomeError as error:
        if "no network" in error.hint:
            needs("environment", f"crosstrain env bundle driver ({error.message})")
        raise
    return target


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_driver_runs_from_its_bundle_without_a_network(driver: Path, tmp_path: Path) -> None:
    pins = (driver / "driver.txt").read_text().splitlines()
    wheels = os.listdir(driver / "wheels")
    assert len(wheels) == len(pins) - 1 and all(name.endswith(".whl") for name in wheels)
    assert sorted(os.listdir(driver)) == ["README.md", "driver.txt", "offline.sh", "train.py", "wheels"]
    nowhere = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "PYTHON"))}
    env = {**kept, **nowhere, "PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable, "CROSSTRAIN_CACHE": str(tmp_path / "cache")}
    shell = ["sh", str(driver / "offline.sh"), str(driver), str(tmp_path / "venv")]
    # a network name space of its own has no network at all; where that is not allowed, the proxy above leads nowhere
    alone = ["unshare", "--net"] if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0 else []
    done = subprocess.run([*alone, *shell], capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ready: " in done.stdout
    train = [str(tmp_path / "venv" / "bin" / "python"), str(driver / "train.py"), "framework=fake", *QUICK]
    (tmp_path / "run").mkdir()
    done = subprocess.run([*alone, *train], cwd=tmp_path / "run", capture_output=True, text=True, timeout=300, env=env)
    result = Result(done.returncode, done.stdout, done.stderr, tmp_path / "run")
    assert result.only["outcome"] in PUBLISHED, result
    listed = subprocess.run([tmp_path / "venv" / "bin" / "crosstrain", "env", "list"], capture_output=True, text=True, env=env)
    assert all(f"{lock.framework}-{lock.accelerator}-" in listed.stdout for lock in locks.all_locks()), listed


def test_offline_tells_how_it_is_used(tmp_path: Path) -> None:
    done = subprocess.run(["sh", ROOT / "launchers" / "offline.sh", str(tmp_path), "venv"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: ") and done.stderr.count("\n") == 1
