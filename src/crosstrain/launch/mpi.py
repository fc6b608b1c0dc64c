"""Ranks started by Open MPI's mpirun: those of framework.started_by=mpirun, who find each other through it, and those of launcher=mpi.

launcher=mpi: mpirun reaches the other machines of launcher.hosts by ssh. Runs on this machine alone need neither.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import shlex
import shutil
import socket
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstrain import devices, processes
from crosstrain.environments import Environment
from crosstrain.errors import ConfigError, OutcomeError
from crosstrain.launch import local, program, several, slurm

RANK = "OMPI_COMM_WORLD_RANK"
INSTALL = "apt-get install openmpi-bin"
#: what a command on all hosts may take
STEP_S = 60
#: mpirun puts its own folders in front of these on the other machines
CHANGED = ("PATH", "LD_LIBRARY_PATH")


@functools.cache
def machines(hosts: tuple[str, ...]) -> several.Machines:
    """Those of launcher.hosts, each asked once per process. Raises ConfigError with one line where mpirun can not work on them."""
    refuse = "launcher=mpi: "
    if not hosts:
        raise ConfigError(f"{refuse}no hosts are given; say launcher.hosts=[NAME,NAME,…], the first is this machine")
    found = _resolve(hosts[0])
    if not any(map(_is_here, found)):
        raise ConfigError(f"{refuse}the first of launcher.hosts must be the machine where train.py runs; {hosts[0]} is another one")
    if len(hosts) == 1:
        return several.Machines(hosts, len(devices.logical_cpus()), hosts[0])
    if any(ipaddress.ip_address(address).is_loopback for address in found):
        asked = f"{hosts[0]} is {found[0]} here, which no other machine reaches"
        raise ConfigError(f"{refuse}{asked}: give this machine's address in the network as the first of launcher.hosts")
    if shutil.which("mpirun") is None:
        raise ConfigError(f"{refuse}there is no mpirun on PATH; on all hosts: {INSTALL}")
    try:
        told = _step(hosts, "nproc").split()
        cpus = min(map(int, told))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        hint = f"`ssh -o BatchMode=yes {hosts[1]} orted --version` must work, with each host"
        raise ConfigError(f"{refuse}mpirun can not start anything on {', '.join(hosts[1:])}: {_words(error)} ({hint})") from error
    return several.Machines(hosts, cpus, hosts[0])


def check(hosts: tuple[str, ...], folder: Path) -> None:
    """Raises ConfigError where runs on all `hosts` can not be done. `folder`: where the results are or will be. Asks once per process."""
    own = machines(hosts)
    if len(hosts) > 1 and own not in _checked:
        several.check_seen("mpi", hosts, functools.partial(_step, hosts), RANK, folder)
        _checked.add(own)


_checked: set[several.Machines] = set()


def _resolve(host: str) -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)]
    except OSError as error:
        raise ConfigError(f"launcher=mpi: {host} of launcher.hosts: {error.strerror}") from error


def _is_here(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def _step(hosts: Sequence[str], *command: str) -> str:
    """What a command prints, started once on each host. Raises OSError, subprocess.SubprocessError; leaves nothing running here."""
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [*_mpirun(hosts, 1), *command],
        env=_for_mpirun({**os.environ, processes.RUN_ID_VARIABLE: mark}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # without a terminal ssh asks nobody for a password
    ) as started:
        try:
            out, err = started.communicate(timeout=STEP_S)
        finally:
            processes.stop_all(mark, [started.pid], grace_s=1.0)  # an ssh that waits for an answer outlives its mpirun
    if started.returncode:
        raise subprocess.CalledProcessError(started.returncode, command, out, err)
    return out


def _words(error: Exception) -> str:
    """What ssh says comes before mpirun's own explanation of 20 lines."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {error.timeout:g} s"
    lines = [line for line in (getattr(error, "stderr", None) or str(error)).splitlines() if line.strip(" -") and "Warning:" not in line]
    return lines[0].strip() if lines else several.words(error)


def _for_mpirun(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with what the user has set for mpirun and ssh, and as if in no job of Slurm: mpirun would ask that for machines."""
    own = {name: value for name, value in os.environ.items() if name.startswith("OMPI_MCA_") or name == "SSH_AUTH_SOCK"}
    return {**own, **{name: value for name, value in environ.items() if not name.startswith("SLURM_")}}


def _mpirun(hosts: Sequence[str], per_host: int) -> list[str]:
    """So many processes on each host, in blocks; on this machine where no hosts are named."""
    # The workers pin themselves; mpirun would count one slot for each physical core, and refuses to work for root.
    options = ["--bind-to", "none", "--oversubscribe", "--allow-run-as-root", "-n", str(max(1, len(hosts)) * per_host)]
    if hosts:
        options += ["--host", ",".join(f"{host}:{per_host}" for host in hosts), "--map-by", f"ppr:{per_host}:node"]
    return [shutil.which("mpirun") or "mpirun", *options]


def start(run: Mapping[str, Any], place: Environment, extra: Mapping[str, str]) -> list[program.Rank]:
    """Start all ranks of `run` (run.json is written). Raises OutcomeError (env_missing) where there is no mpirun."""
    if shutil.which("mpirun") is None:
        name = run["framework"]["name"]
        raise OutcomeError("env_missing", f"{name}'s ranks are started by mpirun, which is not on PATH", INSTALL)
    nodes, hosts = run.get("nodes", 1), run.get("hosts")
    environ = local.environment(run, extra)
    if nodes > 1 and not hosts:
        # It sees that it is in a Slurm job, and starts its own processes on the nodes by srun. These are not all of the job's.
        hosts = slurm.allocation().nodes[:nodes]
        environ = {"SLURM_OVERLAP": "1", **environ}
    command = _mpirun(hosts or (), run["world_size"] // nodes)
    if run.get("hosts"):
        if run["device"] == "gpu":
            del environ["CUDA_VISIBLE_DEVICES"]  # other GPUs on each machine: the worker knows
        for name in environ:
            command += ["-x", name]
        if run["framework"].get("started_by") != "mpirun":
            command += _alone(environ)
        environ = _for_mpirun(environ)
    return program.start(run, environ, place, command, RANK)


def _alone(environ: Mapping[str, str]) -> list[str]:
    """Start what follows with `environ` and its rank alone: not with what the logins set, nor with mpirun's own variables."""
    kept = [f"{name}={shlex.quote(environ[name])}" if name in CHANGED else f'{name}="${name}"' for name in environ if name.isidentifier()]
    return ["/bin/sh", "-c", f'exec env -i {" ".join(kept)} {RANK}="${RANK}" "$@"', "sh"]


def stop(run: Mapping[str, Any]) -> None:
    """Kill what is left of the run on the other hosts. (mpirun's end is that of its ranks, as a rule.)"""
    several.stop_all(run["run_id"], functools.partial(_step, run["hosts"][1:]))
