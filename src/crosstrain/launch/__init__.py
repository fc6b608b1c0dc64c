"""How the ranks of a run are started: argv and environment per rank, nothing else. One file per launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from crosstrain.environments import Environment
from crosstrain.launch import horovod, local, mpi, several, slurm


class Rank(Protocol):
    """One rank that was started: what the driver uses of `subprocess.Popen`. Ranks of one launcher program have its pid."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def check(launcher: str, hosts: tuple[str, ...], folder: Path) -> None:
    """Raises ConfigError where runs can not be started by `launcher` here. `folder`: where the results are or will be."""
    if launcher == "slurm":
        slurm.check(folder)
    elif launcher == "mpi":
        mpi.check(hosts, folder)


def machines(launcher: str, hosts: tuple[str, ...]) -> several.Machines:
    """Those over which replicas can be spread, where `launcher` has several. Raises ConfigError as `check` does."""
    return slurm.allocation() if launcher == "slurm" else mpi.machines(hosts)


def start(run: Mapping[str, Any], place: Environment, extra: Mapping[str, str]) -> Sequence[Rank]:
    """Start all ranks of `run` (run.json is written), by mpirun or horovodrun where they need it, over several machines also by srun."""
    if run["world_size"] > 1 and run["parallelism"] == "native" and run["framework"].get("started_by") == "mpirun":
        return mpi.start(run, place, extra)
    if run.get("nodes", 1) > 1:
        return (mpi if run.get("hosts") else slurm).start(run, place, extra)
    if run["world_size"] > 1 and run["parallelism"] == "horovod":
        return horovod.start(run, place, extra)
    return local.start(run, place, extra)


def stop(run: Mapping[str, Any]) -> None:
    """End what is left of `run` on other machines; the processes of this one are the caller's."""
    if run.get("nodes", 1) > 1:
        (mpi if run.get("hosts") else slurm).stop(run)
