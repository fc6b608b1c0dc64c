"""launcher=slurm: the driver runs on the first node of an allocation, srun starts the ranks on all its nodes.

Runs on one node need no srun: there the driver starts the ranks itself, as everywhere.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstrain.environments import Environment
from crosstrain.errors import ConfigError
from crosstrain.launch import local, program, several

log = logging.getLogger(__name__)

#: how train.py is started on the first node of a job from elsewhere
ONE_STEP = "srun --overlap --relative=0 --nodes=1 --ntasks=1"
COMMANDS = ("srun", "scontrol", "squeue", "scancel")
#: what a question to Slurm's controller may take, and a step on all nodes
ASK_S, STEP_S = 60, 300
#: what is left of a step after its processes were killed
GONE_S = 10
#: of the variables that srun takes for options only these: others may come from options of the job that are not meant for our steps
KEPT = re.compile(r"SLURM_(CONF|CLUSTERS|JOB_?ID|MEM_PER_\w+)$")


@functools.cache
def allocation() -> several.Machines:
    """Ask Slurm. Raises ConfigError with one line where the driver is not on the first node of an allocation."""
    refuse = "launcher=slurm: "
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        raise ConfigError(f"{refuse}there is no {missing[0]} on PATH; launcher=local runs on this machine")
    job = os.environ.get("SLURM_JOB_ID")
    start = f"start train.py in a job: launchers/slurm.sbatch does, or salloc and then {ONE_STEP} --pty python train.py …"
    if not job:
        raise ConfigError(f"{refuse}this is no Slurm job (SLURM_JOB_ID is not set); {start}")
    here = os.environ.get("SLURMD_NODENAME")
    if not here:
        raise ConfigError(f"{refuse}job {job} is there, but this process is not on one of its nodes; {start}")
    try:
        nodes = tuple(_ask("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split())
        found = re.search(r"NodeAddr=(\S+)", _ask("scontrol", "show", "node", here))
        cpus = min(_expanded(os.environ["SLURM_JOB_CPUS_PER_NODE"]))
    except (OSError, subprocess.SubprocessError, KeyError, ValueError) as error:
        raise ConfigError(f"{refuse}Slurm does not answer about job {job}: {several.words(error)}") from error
    if here != nodes[0]:
        raise ConfigError(f"{refuse}train.py runs on {here}; start it on the first node of job {job}, which is {nodes[0]} ({ONE_STEP})")
    return several.Machines(nodes, cpus, found[1] if found else here, job)


def _expanded(text: str) -> list[int]:
    """SLURM_JOB_CPUS_PER_NODE: `72(x2),36` is [72, 72, 36]. Raises ValueError."""
    numbers = []
    for part in text.split(","):
        number, _, times = part.partition("(x")
        numbers += [int(number)] * int(times.rstrip(")") or 1)
    return numbers


def _ask(*command: str, seconds: float = ASK_S) -> str:
    """What a command of Slurm prints. Raises OSError, subprocess.SubprocessError."""
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True, stdin=subprocess.DEVNULL).stdout


def check(folder: Path) -> None:
    """Raises ConfigError where runs of several nodes can not be done: no allocation, several drivers, files that not all nodes see.

    `folder`: where the results are or will be. Asks the nodes once per process.
    """
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SUBMITIT_EXECUTOR" not in os.environ:
        once = f"start it once ({ONE_STEP}): it starts the ranks itself"
        raise ConfigError(f"launcher=slurm: srun started train.py more than once; {once}")
    own = allocation()
    if len(own.nodes) > 1 and own not in _checked:
        several.check_seen("slurm", own.nodes, functools.partial(_step, own.nodes), "SLURM_PROCID", folder)
        _checked.add(own)


_checked: set[several.Machines] = set()


def _srun(nodes: Sequence[str], per_node: int, *options: str) -> list[str]:
    """A step with so many tasks on each node, in blocks. It shares what the job has with the step in which the driver may be."""
    spread = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes) * per_node}", f"--ntasks-per-node={per_node}", "--distribution=block"]
    return ["srun", "--overlap", "--export=ALL", "--input=none", "--mpi=none", f"--nodelist={','.join(nodes)}", *spread, *options]


def _step(nodes: Sequence[str], *command: str, seconds: float = STEP_S) -> str:
    """What a command prints, started once on each node. Raises OSError, subprocess.SubprocessError."""
    return _ask(*_srun(nodes, 1, "--cpu-bind=none"), *command, seconds=seconds)


def start(run: Mapping[str, Any], place: Environment, extra: Mapping[str, str]) -> list[program.Rank]:
    """Start all ranks of `run` (run.json is written), equally many on each of its nodes."""
    own, nodes = allocation(), run["nodes"]
    per_node = run["world_size"] // nodes
    cpus = run["threads"] * run["replicas"] // run["world_size"]
    # Where there are enough Slurm binds each rank to CPUs of its own, as far as the cluster is made so.
    bound = run["device"] == "cpu" and cpus * per_node <= own.cpus
    options = [f"--cpus-per-task={cpus}", "--cpu-bind=cores"] if bound else ["--cpu-bind=none", "--overcommit"]
    # A rank that fails ends nothing: the driver looks at all of them. All see all GPUs of the job on their node.
    options += [f"--job-name={run['run_id']}", "--kill-on-bad-exit=0", "--wait=0", "--gpu-bind=none"]
    environ = local.environment(run, extra)
    environ = {name: value for name, value in environ.items() if not name.startswith("SLURM_") or KEPT.match(name) or name in extra}
    if run["device"] == "gpu":
        del environ["CUDA_VISIBLE_DEVICES"]  # other GPUs on each node: the worker knows
    return program.start(run, environ, place, _srun(own.nodes[:nodes], per_node, *options), "SLURM_PROCID")


def stop(run: Mapping[str, Any]) -> None:
    """Kill what is left of the run on any node: its step, until Slurm has it no more, then what got away from it."""
    own = allocation()
    end = time.monotonic() + GONE_S
    try:
        while steps := _steps(own.job, run["run_id"]):
            subprocess.run(["scancel", "--signal=KILL", *steps], capture_output=True, timeout=ASK_S)
            if time.monotonic() > end:
                log.error("steps that could not be stopped: %s", steps)
                break
            time.sleep(0.2)
    except (OSError, subprocess.SubprocessError) as error:
        log.error("the steps of the run could not be looked at: %s", several.words(error))
    # Not every cluster tracks processes that leave their session.
    several.stop_all(run["run_id"], functools.partial(_step, own.nodes[: run["nodes"]], seconds=ASK_S))


def _steps(job: str, name: str) -> list[str]:
    """The ids of the job's steps with this name."""
    lines = _ask("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j").splitlines()
    return [step for step, _, found in (line.strip().partition(" ") for line in lines) if found == name]
