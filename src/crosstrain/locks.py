"""The locks (environments/<framework>.<accelerator>.txt): which versions of a framework and of what it needs go together."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crosstrain import paths
from crosstrain.errors import ConfigError, OutcomeError

_HEADER = re.compile(r"#\s*(python|import|horovod|download|disk|keep|also|apt|gpus|note):\s*(.+)")
_GPUS = re.compile(r"(\d+)\.(\d+)-(\d+)\.(\d+)(?: \((.+)\))?")
_LINK = re.compile(r"#\s*link:\s*(\S+)\s*->\s*(\S+)")
_PIN = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+_-]+)")

#: what the name of a framework's environment with Horovod ends with: torch-horovod
HOROVOD = "-horovod"


@dataclass(frozen=True)
class Gpus:
    """The oldest and the newest compute capability that a build has machine code for, and why newer ones are left out ("" = not said)."""

    oldest: tuple[int, int]
    newest: tuple[int, int]
    why: str

    def run_it(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability runs the build.

        Machine code runs on later minors of its major, on no other major (CUDA C++ Programming Guide, "Binary Compatibility").
        """
        return self.oldest <= capability and capability[0] <= self.newest[0]

    def __str__(self) -> str:
        (low, high), why = (f"{major}.{minor}" for major, minor in (self.oldest, self.newest)), f" ({self.why})" if self.why else ""
        return f"{low} to {high}{why}"


@dataclass(frozen=True)
class Lock:
    """One lock. `pins` is ((name, version), …), the framework's own package first; empty when there is nothing to install.

    `links` is ((link below site-packages, shared library of the system), …). `gpus` holds for the pinned version; None = not known.
    """

    framework: str
    accelerator: str
    headers: Mapping[str, str]
    pins: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, str], ...] = ()
    gpus: Gpus | None = None

    @property
    def name(self) -> str:
        return f"{self.framework}.{self.accelerator}"

    @property
    def python(self) -> str:
        return self.headers["python"]

    @property
    def modules(self) -> list[str]:
        """What is imported, the framework first."""
        return self.headers.get("import", self.framework).split()

    @property
    def horovod(self) -> str | None:
        """The version of Horovod that is compiled for this environment (`horovod_wheel`)."""
        return self.headers.get("horovod")

    @property
    def distribution(self) -> str:
        """The name of the framework's own package."""
        return self.pins[0][0] if self.pins else self.modules[0]

    def requirements(self, version: str | None = None) -> list[str]:
        """What uv is told to install. Another version of the framework frees all other pins but those named by `keep`.

        `also` names what the framework itself does not ask for: with another version it comes in whichever version fits.
        """
        kept = self.headers.get("keep", "").split()
        also = [*self.headers.get("also", "").split(), *([] if "numpy" in kept else ["numpy"])]
        (main, pinned), *others = self.pins
        wanted = version or pinned
        # A +cpu wheel in a local folder would also satisfy ==, and run a GPU cell without GPU.
        first = f"{main}=={wanted},!={wanted}+cpu" if self.accelerator == "gpu" else f"{main}=={wanted}"
        if version is None or version == pinned:
            return [first, *(f"{name}=={pin}" for name, pin in others)]
        return [first, *(f"{name}=={pin}" for name, pin in others if name in kept), *also]

    def gigabytes(self, header: str, cpu_wheel: bool) -> float | None:
        """The size that a `download` or `disk` header gives, in GB: the last number when the framework comes as a +cpu wheel."""
        sizes = re.findall(r"([\d.]+) GB", self.headers.get(header, ""))
        return float(sizes[-1 if cpu_wheel else 0]) if sizes else None

    def key(self, version: str | None = None) -> str:
        """Name of the environment's folder. Hashed is what makes it: Python, kind of machine, requirements, links, Horovod; no comments."""
        more = [f"{link} -> {library}" for link, library in self.links]
        more += [f"horovod {self.horovod}"] if self.horovod else []
        text = "\n".join([self.python, platform.machine(), *self.requirements(version), *more])
        return f"{self.framework}-{self.accelerator}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _parse(path: Path) -> Lock:
    framework, _, accelerator = path.stem.partition(".")
    headers: dict[str, str] = {}
    pins: list[tuple[str, str]] = []
    links: list[tuple[str, str]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        header = _HEADER.fullmatch(line.strip())
        pin = _PIN.fullmatch(line.strip())
        link = _LINK.fullmatch(line.strip())
        if link:
            links.append((link[1], link[2]))
        elif header:
            headers[header[1]] = header[2].strip()
        elif pin:
            pins.append((pin[1], pin[2]))
        elif line.strip() and not line.startswith("#"):
            raise ConfigError(f"{path.name} line {number}: {line.strip()!r} is not name==version")
    if pins and "python" not in headers:
        raise ConfigError(f"{path.name} has no line '# python: X.Y'")
    if links and "apt" not in headers:
        raise ConfigError(f"{path.name} has no line '# apt: <packages that bring the linked libraries>'")
    return Lock(framework, accelerator, headers, tuple(pins), tuple(links), _gpus(path.name, headers.get("gpus")))


def _gpus(lock: str, header: str | None) -> Gpus | None:
    if header is None:
        return None
    found = _GPUS.fullmatch(header)
    if not found:
        raise ConfigError(f"{lock}: '# gpus: {header}' must be like '# gpus: 5.0-8.6 (why no newer ones)'")
    return Gpus((int(found[1]), int(found[2])), (int(found[3]), int(found[4])), found[5] or "")


def all_locks() -> list[Lock]:
    """Every lock that has something to install, by name."""
    return [lock for lock in (_parse(path) for path in sorted(paths.locks_dir().glob("*.*.txt"))) if lock.pins]


def find_lock(framework: str, accelerator: str) -> Lock:
    """The lock of a framework for `cpu` or `gpu`.

    Raises OutcomeError: unsupported when only the other accelerator has one, env_missing when nothing can be installed at all.
    """
    path = paths.locks_dir() / f"{framework}.{accelerator}.txt"
    own = "framework.python=<path of an interpreter that has it> uses your own"
    if path.is_file():
        lock = _parse(path)
        if lock.pins:
            return lock
        reason = lock.headers.get("note", "nothing can be installed")
        raise OutcomeError("env_missing", f"{framework} has no environment for {accelerator}: {reason}", own)
    others = [lock.accelerator for lock in all_locks() if lock.framework == framework]
    if others:
        message = f"{framework} has no environment for {accelerator}, only for {' and '.join(others)}"
        raise OutcomeError("unsupported", message, own)
    known = ", ".join(sorted({lock.framework for lock in all_locks()}))
    message = f"{framework} has no lock {path.name}, so there is no environment to make; there are locks of {known}"
    raise OutcomeError("env_missing", message, own)


def with_horovod() -> list[str]:
    """The frameworks that have an environment with Horovod."""
    return sorted({lock.framework.removesuffix(HOROVOD) for lock in all_locks() if lock.horovod})


def describe(framework: str, accelerator: str) -> tuple[tuple[str, ...], str]:
    """(packages, distribution) to look for in a user's own interpreter, from any lock of the framework."""
    found = sorted(paths.locks_dir().glob(f"{framework}.*.txt"), key=lambda path: path.stem != f"{framework}.{accelerator}")
    if not found:
        return (framework,), framework
    lock = _parse(found[0])
    return tuple(module.partition(".")[0] for module in lock.modules), lock.distribution
