"""Certificates of the parity ladder: what was proven of a framework's network, and where that is kept."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crosstrain import paths
from crosstrain.networks.spec import Spec


@dataclass(frozen=True)
class Level:
    """One level's verdict. `state`: passed, failed or not applicable; `error`: None where none is measured or it is not finite."""

    level: str
    title: str
    state: str
    error: float | None = None
    tolerance: float | None = None
    words: str = ""


@dataclass(frozen=True)
class Certificate:
    """The verdict on one network in one framework.

    `code`: hash of the worker's code that was judged; `deviations`: as declared; `variant`: key of the reduced spec that climbed
    levels 3 to 9 in place of a large network, "" where it climbed itself; `choices`: of CHOICES.
    """

    framework: str
    version: str
    network: str
    spec_key: str
    precision: str
    device: str
    compile: str
    memory_format: str
    code: str
    levels: tuple[Level, ...]
    deviations: dict[str, str]
    variant: str = ""
    parallelism: str = "native"
    choices: str = ""

    @property
    def failed(self) -> Level | None:
        """The first level that failed."""
        return next((level for level in self.levels if level.state == "failed"), None)

    @property
    def proven(self) -> bool:
        return self.failed is None

    def tag(self) -> str:
        """In one line: `proven: levels 1-6, 8-9; …`, or `failed at level 4: …`."""
        failed = self.failed
        if failed is not None:
            return f"failed at level {failed.level} ({failed.title}): {failed.words}"
        numbers = [int(level.level) for level in self.levels if level.state == "passed" and level.level.isdigit()]
        reduced = f" (levels 3-8 on a reduced variant{', 9 too' if 9 in numbers else ''})" if self.variant else ""
        counted = any(level.level == "flops" and level.state == "passed" for level in self.levels)
        flops = "; executed FLOPs are the spec's" if counted else "; executed FLOPs not counted"
        named = "; ".join(f"{words} ({', '.join(names)})" for words, names in self._grouped_deviations())
        return f"proven: levels {_ranges(numbers)}{reduced}{flops}" + (f"; deviations: {named}" if named else "")

    def _grouped_deviations(self) -> list[tuple[str, list[str]]]:
        """(words, names of the ops), long lists of names shortened: a ResNet has fifty batch norms."""
        groups: dict[str, list[str]] = {}
        for name, words in self.deviations.items():
            groups.setdefault(words, []).append(name)
        return [(words, [*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else names) for words, names in sorted(groups.items())]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Certificate:
        return Certificate(**{**data, "levels": tuple(Level(**level) for level in data["levels"])})


#: what a run without a certificate is tagged with
NOT_PROVEN = "not proven"


def tag(certificate: Certificate | None) -> str:
    """The certificate's line, or `not proven` where there is none."""
    return NOT_PROVEN if certificate is None else certificate.tag()


def store(certificate: Certificate) -> Path:
    """Keep it in the user cache; it replaces the one of the same framework and its settings, network, precision, device and code."""
    c = certificate
    path = _path(c.framework, c.version, c.compile, c.memory_format, c.parallelism, c.spec_key, c.precision, c.device, c.code, c.choices)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    temporary.write_text(json.dumps(c.to_json(), indent=1) + "\n")
    os.replace(temporary, path)
    return path


def find(
    framework: Mapping[str, Any], version: str, spec: Spec, precision: str, device: str, parallelism: str = "native"
) -> Certificate | None:
    """The stored certificate for exactly this, and for the worker's code as it is now; None where there is none.

    `framework`: run.json's key; of it name, compile, memory_format and CHOICES count. `version`: the framework's own answer.
    """
    name, settings = framework["name"], (framework["compile"], framework["memory_format"])
    path = _path(name, version, *settings, parallelism, spec.key(), precision, device, code_hash(name), choices(framework))
    try:
        return Certificate.from_json(json.loads(path.read_text()))
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
        return None  # none, or one of another version of ours


#: keys of single frameworks that choose between ways to compute the same network
CHOICES = ("lstm", "space_to_depth")


def choices(framework: Mapping[str, Any]) -> str:
    """`lstm=scan` for run.json's key `framework`; "" where nothing is chosen."""
    return " ".join(f"{key}={framework[key]}" for key in CHOICES if framework.get(key))


def code_hash(framework: str) -> str:
    """SHA-256 (hex) of the worker's code that makes a network in this framework and measures it on the ladder."""
    worker = paths.worker_dir()
    frameworks = worker / "frameworks"
    shared = [worker / "ladder.py", frameworks / "base.py", frameworks / "with_horovod.py"]
    files = [*shared, frameworks / f"on_{framework}.py", *frameworks.glob(f"{framework}_*.py")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _path(*identity: str) -> Path:
    return paths.cache_dir("certificates") / (hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32] + ".json")


def _ranges(numbers: list[int]) -> str:
    """1-6, 8 for [1, 2, 3, 4, 5, 6, 8]."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
