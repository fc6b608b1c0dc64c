"""What launchers have in common that start ranks on several machines, all of which see the same files."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from crosstrain import paths, processes
from crosstrain.errors import ConfigError

log = logging.getLogger(__name__)

#: runs a command once on each machine, as ranks in the machines' order, and returns what they print. Raises OSError, SubprocessError
Step = Callable[..., str]


@dataclass(frozen=True)
class Machines:
    """Where ranks may be started: `nodes` by name, the first is this machine, `address` its own. `cpus`: the fewest that one has."""

    nodes: tuple[str, ...]
    cpus: int
    address: str
    job: str = ""
    """Slurm's"""


def words(error: Exception) -> str:
    """The last line of what a failed command said."""
    said = getattr(error, "stderr", None) or str(error)
    return (said.strip().splitlines() or [type(error).__name__])[-1]


def check_seen(launcher: str, nodes: Sequence[str], step: Step, variable: str, folder: Path) -> None:
    """Every machine sees what is new in `folder`, where the results go, and in the user cache, and the worker.

    Raises ConfigError with one line. `variable`: of the environment, the rank of a process in a step.
    """
    cache, worker = paths.cache_dir(), str(paths.worker_dir() / "__main__.py")
    folder = next(parent for parent in (folder, *folder.parents) if parent.exists())
    look = f'for path; do [ -e "$path" ] || echo "${variable} $path"; done'
    with (
        tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-") as first,
        tempfile.NamedTemporaryFile(dir=cache, prefix=".seen-") as second,
    ):
        try:
            missing = step("/bin/sh", "-c", look, "sh", first.name, second.name, worker).splitlines()
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"launcher={launcher}: nothing can be started on {', '.join(nodes)}: {words(error)}") from error
    if missing:
        rank, _, path = missing[0].partition(" ")
        wanted = {
            first.name: f"{folder}, where the results go: start in a folder that all nodes share",
            second.name: f"{cache}, the user cache: CROSSTRAIN_CACHE=<a folder that all nodes share>",
            worker: f"{worker}: install crosstrain where all nodes share it",
        }
        raise ConfigError(f"launcher={launcher}: node {nodes[int(rank)]} does not see {wanted[path]}")


def stop_all(run_id: str, step: Step) -> None:
    """Kill every process of the run on the machines of `step`."""
    here = str(Path(processes.__file__).parent)
    try:
        step(sys.executable, "-I", "-S", "-c", _STOP_ALL, here, run_id)
    except (OSError, subprocess.SubprocessError) as error:
        log.error("the other nodes of the run could not be looked at: %s", words(error))


_STOP_ALL = "import sys; sys.path.append(sys.argv[1]); import processes; sys.exit(bool(processes.stop_all(sys.argv[2], grace_s=1.0)))"
