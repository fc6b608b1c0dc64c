"""The run folder as the journal: its record (tracking.json, tracking.npz) and where that went (tracking_store.json)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

RECORD = "tracking.json"
_STORED = "tracking_store.json"
_LOCK = "tracking.lock"


@dataclass(frozen=True)
class Stored:
    """In which store a run belongs, and whether it is there to the end. Says nothing of what happened in the store since."""

    uri: str
    """without its password"""
    experiment: str
    run_id: str = ""
    """MLflow's; "" before the run is in the store"""
    complete: bool = False

    def save(self, folder: Path) -> None:
        temporary = folder / f"{_STORED}.part"
        temporary.write_text(json.dumps(asdict(self)) + "\n")
        os.replace(temporary, folder / _STORED)


def stored(folder: Path) -> Stored | None:
    """None for a folder whose run was never meant for a store, or that was written by an older crosstrain."""
    try:
        return Stored(**json.loads((folder / _STORED).read_text()))
    except (OSError, ValueError, TypeError):
        return None


@contextlib.contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Whether this process, and no other, uploads the run meanwhile. The system lets go when the process ends."""
    with (folder / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def find(roots: Iterable[Path]) -> list[Path]:
    """The run folders at or below `roots`, each once, in the order of their names."""
    return sorted({path.parent.resolve() for root in roots for path in root.rglob(RECORD)})


def waiting(folders: Iterable[Path]) -> list[Path]:
    """Those of these run folders whose run is not in the store to the end."""
    known = {folder: stored(folder) for folder in folders if (folder / RECORD).is_file()}
    return [folder for folder, where in known.items() if where is None or not where.complete]


def finished_keys(folders: Iterable[Path], outcomes: Iterable[str]) -> set[str]:
    """The `run_key` of the runs that ended with one of these outcomes."""
    keys, outcomes = set(), set(outcomes)
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, KeyError):
            tags = json.loads((folder / RECORD).read_text())["tags"]
            if tags.get("outcome") in outcomes and tags.get("run_key"):
                keys.add(tags["run_key"])
    return keys
