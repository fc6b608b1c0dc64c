"""framework.started_by=mpirun: Open MPI starts all ranks, and they find each other through it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from crosstrain.environments import Environment
from crosstrain.errors import OutcomeError
from crosstrain.launch import local, program, slurm


def start(run: Mapping[str, Any], place: Environment, extra: Mapping[str, str]) -> list[program.Rank]:
    """Start all ranks of `run` (run.json is written). Raises OutcomeError (env_missing) where there is no mpirun."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        name = run["framework"]["name"]
        raise OutcomeError("env_missing", f"{name}'s ranks are started by mpirun, which is not on PATH", "apt-get install openmpi-bin")
    # The workers pin themselves; mpirun would count one slot for each physical core, and refuses to work for root.
    options = ["--bind-to", "none", "--oversubscribe", "--allow-run-as-root", "-n", str(run["world_size"])]
    if run.get("nodes", 1) > 1:
        # It sees that it is in a Slurm job, and starts its own processes on the nodes by srun. These are not all of the job's.
        hosts = ",".join(slurm.allocation().nodes[: run["nodes"]])
        options += ["--host", hosts, "--map-by", f"ppr:{run['world_size'] // run['nodes']}:node"]
        extra = {"SLURM_OVERLAP": "1", **extra}
    return program.start(run, local.environment(run, extra), place, [mpirun, *options], "OMPI_COMM_WORLD_RANK")
