"""`crosstrain env bundle`: the wheels of the driver or of frameworks in one folder, to install on a machine without a network.

uv chooses versions and files, as it does for an environment. pip, run by uv, fetches the files (uv has no command that only
downloads) and builds wheels of packages that come as sources only.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from urllib.parse import unquote, urlsplit

from crosstrain import __version__, environments, interpreters, locks, paths
from crosstrain.errors import ConfigError, OutcomeError
from crosstrain.pip_settings import pip_variables
from crosstrain.uv_process import Report, Uv

DRIVER = "driver"
_CHECKOUT = Path(__file__).resolve().parents[2]
_PIP = ("--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar", "off")
#: glibc of the old names of manylinux (PEP 513, 571, 599)
_MANYLINUX = {"manylinux1": "2.5", "manylinux2010": "2.12", "manylinux2014": "2.17"}


@dataclass(frozen=True)
class Part:
    """What is bundled: the driver (no lock) or one framework for one accelerator, for Python `python` (X.Y)."""

    name: str
    python: str
    lock: locks.Lock | None = None
    version: str | None = None


@dataclass(frozen=True)
class _Package:
    """One package as uv chose it. `links` are the addresses of its usable wheels, or of its source when `source`; size in bytes."""

    pin: str
    links: tuple[str, ...]
    source: bool
    size: int


def part(name: str, accelerator: str, python: str | None, version: str | None) -> Part:
    """The part that `name` (driver, mxnet, torch.gpu) means; `python` None = the lock's, for the driver the running one.

    Raises OutcomeError where nothing can be bundled, ConfigError for a Python that can not be.
    """
    if python and not re.fullmatch(r"3\.\d+", python):
        raise ConfigError(f"--python {python}: must be like 3.12")
    if name != DRIVER:
        framework, _, own = name.partition(".")
        lock = locks.find_lock(framework, own or accelerator)
        if lock.horovod:
            raise OutcomeError("unsupported", f"{name} can not be bundled: Horovod is compiled on the machine that it is for")
        return Part(lock.name, python or lock.python, lock, version)
    if not (_CHECKOUT / "train.py").is_file():
        raise OutcomeError("env_missing", "only a checkout of crosstrain can bundle the driver, and this one is installed from a wheel")
    python = python or f"{sys.version_info[0]}.{sys.version_info[1]}"
    least = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    if int(python[2:]) < int(least[2:]):
        raise ConfigError(f"--python {python}: the driver needs {least} or newer")
    return Part(DRIVER, python)


def write(folder: Path, parts: Sequence[Part], report: Report) -> int:
    """Make `folder`, whole or not at all; gives its size in bytes. `report` gets a line of progress at a time.

    Raises ConfigError when there is something in `folder`, OutcomeError for all that goes wrong on the way.
    """
    folder = folder.expanduser().absolute()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"--to {folder}: is there already; name a folder that is not")
        folder.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
        try:
            with environments.stop_by_exception():
                stage.chmod(0o755)
                (stage / "wheels").mkdir()
                for one in parts:
                    _add(stage, one, report)
                _explain(stage, parts)
                stage.rename(folder)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise
    except OSError as error:
        raise OutcomeError("env_missing", f"the bundle {folder} could not be made: {error}") from error
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _add(stage: Path, one: Part, report: Report) -> None:
    """Put the wheels of one part and its requirements file into `stage`."""
    uv = Uv(f"the bundle of {one.name}", paths.cache_dir("environments") / "bundle.log", None, report)
    uv.environment.update(pip_variables(os.environ))
    with tempfile.TemporaryDirectory(dir=stage) as name:
        work = Path(name)
        python = interpreters.look_for_python(one.python)
        packages = _resolve(uv, one, python, work)
        total = sum(package.size for package in packages)
        report(f"{one.name} for Python {one.python}: {len(packages)} packages, about {total / 1e6:.0f} MB")
        free = shutil.disk_usage(stage).free
        if total > free:
            message = f"no room for the bundle of {one.name}: {total / 1e9:.1f} GB, {stage.parent} has {free / 1e9:.1f} GB free"
            raise OutcomeError("env_missing", message, "name another folder")
        _fetch(uv, one, [package for package in packages if not package.source], stage / "wheels", work)
        sources = [package for package in packages if package.source]
        if sources:
            _build(uv, one, python, sources, stage / "wheels", work)
        pins = [package.pin for package in packages]
        if one.lock and one.lock.horovod:  # it is compiled where it is used, by pip
            extra = ("--no-binary", "horovod", "--dest", str(stage / "wheels"), f"horovod=={one.lock.horovod}", "pip")
            uv.run("tool", "run", *uv.options, "--python", sys.executable, "pip", "download", *_PIP, *extra)
        if one.name == DRIVER:
            uv.run("build", "--wheel", *uv.options, "--out-dir", str(work / "driver"), str(_CHECKOUT))
            for wheel in (work / "driver").glob("*.whl"):
                shutil.move(wheel, stage / "wheels")
            pins.append(f"crosstrain=={__version__}")
            shutil.copy(_CHECKOUT / "train.py", stage)
            shutil.copy(_CHECKOUT / "launchers" / "offline.sh", stage)
    uv.log.unlink(missing_ok=True)
    lines = [f"# python: {one.python}", *pins]
    (stage / f"{one.name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _resolve(uv: Uv, one: Part, python: Path | None, work: Path) -> list[_Package]:
    """Which files, of exactly which versions. Old source packages tell what they need only to an old Python, so it is used if there."""
    wanted = _CHECKOUT / "pyproject.toml"
    if one.lock:
        wanted = work / "wanted.txt"
        wanted.write_text("\n".join(one.lock.requirements(one.version)))
    found = work / "pylock.toml"
    how = ("--python", str(python or sys.executable), "--python-version", one.python, "--format", "pylock.toml")
    uv.run("pip", "compile", *uv.options, *how, "-o", str(found), str(wanted))
    packages = []
    for entry in tomllib.loads(found.read_text())["packages"]:
        source = not entry.get("wheels")
        files = [entry["sdist"]] if source else entry["wheels"]
        sizes = [_size(file) for file in files]
        links = [f"{file['url']}#sha256={file['hashes']['sha256']}" for file in files]
        packages.append(_Package(f"{entry['name']}=={entry['version']}", _portable(links), source, max(sizes)))
    return packages


def _portable(links: Sequence[str]) -> tuple[str, ...]:
    """Without the wheels that want a newer glibc than another of the same package, since clusters run old systems.

    2.17 is old enough for all, and wheels without compiled code, which say nothing of glibc, stay as the last resort.
    """
    wants = {link: max(_glibc([urlsplit(link).path]), "2.17", key=_numbers) for link in links if "none-any" not in link}
    least = min(wants.values(), key=_numbers, default="")
    return tuple(link for link in links if wants.get(link, least) == least)


def _size(file: dict) -> int:
    """Bytes of a file of a pylock.toml; of one on this machine uv does not write the size."""
    if "size" in file:
        return int(file["size"])
    path = Path(unquote(urlsplit(file["url"]).path))
    return path.stat().st_size if path.is_file() else 0


def _pip(uv: Uv, python: Path | str, command: str, packages: Sequence[_Package], wheels: Path, work: Path, *options: str) -> None:
    """`pip download` or `pip wheel` of these files; pip chooses the best of several wheels. They reach it as a page of links."""
    page = work / "links.html"
    page.write_text("".join(f'<a href="{escape(link)}">{escape(link)}</a>\n' for package in packages for link in package.links))
    wanted = work / "pins.txt"
    wanted.write_text("\n".join(package.pin for package in packages))
    where = ("--dest" if command == "download" else "--wheel-dir", str(wheels), "--find-links", str(page), "--requirement", str(wanted))
    uv.run("tool", "run", *uv.options, "--python", str(python), "pip", command, *_PIP, *options, *where)


def _fetch(uv: Uv, one: Part, packages: Sequence[_Package], wheels: Path, work: Path) -> None:
    _pip(uv, sys.executable, "download", packages, wheels, work, "--only-binary", ":all:", "--python-version", one.python)


def _build(uv: Uv, one: Part, python: Path | None, packages: Sequence[_Package], wheels: Path, work: Path) -> None:
    """Build wheels with the Python they are for; without one with the driver's, where that makes no difference."""
    built = work / "built"
    _pip(uv, python or sys.executable, "wheel", packages, built, work)
    for wheel in sorted(built.glob("*.whl")):
        if python is None and not wheel.name.endswith("-none-any.whl"):
            message = f"{wheel.name.split('-')[0]} must be compiled, with Python {one.python}, which this machine does not have"
            raise OutcomeError("env_missing", message, f"python -m uv python install {one.python}")
        shutil.move(wheel, wheels)


# -- what a person reads -----------------------------------------------------------------------------------------------

_README = Template("""\
# A bundle of crosstrain $crosstrain: $names

For $machine with glibc $glibc or newer. Nothing here needs a network. `<here>` is this folder.
$parts""")
_DRIVER_PART = Template("""
## The driver, for Python $python

    sh <here>/offline.sh <here> VENV $frameworks

makes the virtual environment VENV (`PYTHON=…` names the interpreter) and the frameworks' environments. By hand:

    python$python -m venv VENV
    VENV/bin/pip install --no-index --find-links <here>/wheels -r <here>/driver.txt
    VENV/bin/python <here>/train.py framework=fake

Start `train.py` in the folder where the results shall lie. `crosstrain` itself is VENV/bin/crosstrain.
""")
_MANAGED_PART = Template("""
## $name, Python $python

    export PIP_NO_INDEX=1 PIP_FIND_LINKS=<here>/wheels     # no blanks in this path: pip splits it there
    crosstrain env make $name$version

Python $python must be on the machine: on PATH, of pyenv, or of uv.$system
""")
_OWN_PART = Template("""
## $name for Python $python

The lock is for Python $locked, so this is an environment of your own:

    python$python -m venv VENV_$framework
    VENV_$framework/bin/pip install --no-index --find-links <here>/wheels -r <here>/$name.txt
    … train.py framework=$framework framework.python=VENV_$framework/bin/python
""")


def _explain(stage: Path, parts: Sequence[Part]) -> None:
    """README.md: how to install from the bundle."""
    texts = []
    for one in parts:
        facts = {"name": one.name, "python": one.python, "framework": one.name.partition(".")[0]}
        if one.lock is None:
            managed = [other.name for other in parts if other.lock and other.python == other.lock.python and not other.version]
            texts.append(_DRIVER_PART.substitute(facts, frameworks=" ".join(managed)).replace(" \n", "\n"))
        elif one.python == one.lock.python:
            version = f" --version {one.version}" if one.version else ""
            system = f" Of the system: `apt-get install {one.lock.headers['apt']}`." if "apt" in one.lock.headers else ""
            texts.append(_MANAGED_PART.substitute(facts, version=version, system=system))
        else:
            texts.append(_OWN_PART.substitute(facts, locked=one.lock.python))
    text = _README.substitute(
        crosstrain=__version__,
        names=", ".join(one.name for one in parts),
        machine=f"{platform.system()} {platform.machine()}",
        glibc=_glibc([path.name for path in (stage / "wheels").iterdir()]),
        parts="".join(texts),
    )
    (stage / "README.md").write_text(text, encoding="utf-8")


def _glibc(wheels: Sequence[str]) -> str:
    """The least glibc that all wheels can do with, by their names; for one built here it is this machine's."""
    least = "2.5"
    for name in wheels:
        tags = name.removesuffix(".whl").split("-")[-1].split(".")
        versions = [".".join(tag.split("_")[1:3]) for tag in tags if tag.startswith("manylinux_")]
        versions += [_MANYLINUX[tag.split("_")[0]] for tag in tags if tag.split("_")[0] in _MANYLINUX]
        versions += [platform.libc_ver()[1] for tag in tags if tag.startswith("linux_")]
        if versions:
            least = max(least, min(versions, key=_numbers), key=_numbers)
    return least


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]
