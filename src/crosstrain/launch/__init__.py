"""How the ranks of a run are started: argv and environment per rank, nothing else. One file per launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from crosstrain.environments import Environment
from crosstrain.launch import horovod, local, mpi


class Rank(Protocol):
    """One rank that was started: what the driver uses of `subprocess.Popen`. Ranks of one launcher program have its pid."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def start(run: Mapping[str, Any], place: Environment, extra: Mapping[str, str]) -> Sequence[Rank]:
    """Start all ranks of `run` (run.json is written), by Horovod's launcher or mpirun where they need it."""
    if run["world_size"] > 1 and run["parallelism"] == "horovod":
        return horovod.start(run, place, extra)
    if run["world_size"] > 1 and run["framework"].get("started_by") == "mpirun":
        return mpi.start(run, place, extra)
    return local.start(run, place, extra)
