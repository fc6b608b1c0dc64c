"""What launchers have in common that start all ranks by one program of their own: horovodrun, mpirun, srun."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstrain import paths
from crosstrain.environments import Environment

#: a line `<rank> <exit code>` for each rank, in the order in which they ended
EXITS = "exits"
#: what the program itself says: launcher.out, launcher.err
LAUNCHER = "launcher"
# What the program starts for each rank, in the run folder: the worker. The programs tell the exit code of one rank only, in words.
_SHELL = 'r=$%s; "$@" "$r" >"worker.$r.out" 2>"worker.$r.err"; code=$?; echo "$r $code" >>exits; exit $code'


class Rank:
    """A rank that a program started. Of `subprocess.Popen` it has what the driver uses."""

    def __init__(self, program: subprocess.Popen[bytes], exits: Exits, rank: int) -> None:
        self.pid = program.pid
        self.returncode: int | None = None
        self._program, self._exits, self._rank = program, exits, rank

    def poll(self) -> int | None:
        if self.returncode is None:
            ended = self._program.poll()  # before the file is read: all ranks have written into it by then
            self.returncode = self._exits.code(self._rank)
            if self.returncode is None and ended is not None:
                self.returncode = ended or 1  # it stopped the rank, or could not start it
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """For the end of all ranks."""
        return self._program.wait(timeout)


class Exits:
    """How the ranks ended, by what their shells wrote down."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told: set[int] = set()

    def code(self, rank: int) -> int | None:
        """As subprocess gives it (negative: a signal); None while it runs.

        Failures are told in their order, each only when those before it were: the first is the cause of the others.
        """
        for line in self._path.read_text().splitlines():
            number, code = map(int, line.split())
            if number == rank:
                self._told.add(rank)
                return 128 - code if code > 128 else code
            if code and number not in self._told:
                return None
        return None


def python(place: Environment) -> list[str]:
    """The interpreter with its flags."""
    return [str(place.python), *(["-I", "-B", "-u"] if place.isolated else ["-B", "-u"])]


def start(run: Mapping[str, Any], environ: Mapping[str, str], place: Environment, program: Sequence[str], variable: str) -> list[Rank]:
    """Start all ranks of `run` (run.json is written) by `program` …; it tells each rank its number in the environment `variable`."""
    folder = Path(run["folder"])
    worker = [*python(place), str(paths.worker_dir()), str(folder)]
    (folder / EXITS).touch()
    with open(folder / f"{LAUNCHER}.out", "wb") as out, open(folder / f"{LAUNCHER}.err", "wb") as err:
        started = subprocess.Popen(
            [*program, "/bin/sh", "-c", _SHELL % variable, "sh", *worker],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=folder,
            env=environ,
            start_new_session=True,
        )
    exits = Exits(folder / EXITS)
    return [Rank(started, exits, rank) for rank in range(run["world_size"])]
