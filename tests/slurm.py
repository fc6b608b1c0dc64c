"""A real Slurm on this machine: two slurmd as the nodes n1 and n2, each with its own process and mount namespace.

So a process of n1 does not see those of n2, as on two machines. Debian's slurm-wlm and munge; needs root.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import TRAIN, Result, needs

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue", "unshare")
CONFIG = """\
ClusterName=crosstrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/d-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """`start()` it, use `env` for Slurm's commands, `stop()` it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hidden = folder / "of-n1-alone"
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def env(self) -> dict[str, str]:
        """The environment of this process now, for this cluster."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return {**own, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        for name in ("munge", "state", "d-n1", "d-n2", "of-n1-alone", "nothing"):
            (self.folder / name).mkdir()
        host = socket.gethostname().split(".")[0]
        (self.folder / "slurm.conf").write_text(CONFIG.format(host=host, ports=free_ports(3), folder=self.folder))
        self._start_munge()
        self._daemon("slurmctld", "-D")
        for node in NODES:
            # n2 sees an empty folder in place of of-n1-alone
            hide = f"mount --bind {self.folder}/nothing {self.hidden}" if node == "n2" else ":"
            inside = f"{hide}; slurmd -D -N {node}; :"
            self._daemon("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", inside)
        end = time.monotonic() + 90
        while self.ask("sinfo", "--noheader", "--states=idle", "--format=%D") != "2":
            if time.monotonic() > end:
                raise AssertionError(f"the nodes are not idle: {self.ask('sinfo')}\n{self.logs()}")
            time.sleep(0.2)

    def _start_munge(self) -> None:
        """A munged of our own, with a key and a socket of our own. It must not be root and wants files that nobody else can write."""
        place = self.folder / "munge"
        key = place / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        for path in (place, key):
            shutil.chown(path, "munge", "munge")
        files = [f"--{what}={place}/{what.split('-')[0]}" for what in ("socket", "pid-file", "log-file", "seed-file")]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *files, user="munge")
        end = time.monotonic() + 30
        while not (place / "socket").exists():
            assert time.monotonic() < end and self._daemons[-1].poll() is None, self.logs()
            time.sleep(0.05)

    def _daemon(self, *command: str, user: str | None = None) -> None:
        with open(self.folder / f"daemon.{len(self._daemons)}.log", "wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.env, user=user, group=user, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            )

    def stop(self) -> None:
        """Everything. With a node's first process, the child of unshare, the kernel ends all the others in its namespace."""
        for process in reversed(self._daemons):
            process.send_signal(signal.SIGKILL if process.args[0] == "unshare" else signal.SIGTERM)  # type: ignore[index]
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def processes(self) -> list[int]:
        """Pids of the daemons and of all that Slurm started, as far as it keeps SLURM_CONF."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                if f"SLURM_CONF={self.folder}".encode() in environ and int(pid) != os.getpid():
                    found.append(int(pid))
        return found

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("*.log"))

    def submit(self, cwd: Path, *arguments: str, nodes: int = 2, env: dict[str, str] | None = None) -> str:
        """The id of a job with two CPUs on each of `nodes` nodes, whose script is `train.py …`; its output is cwd/job.out."""
        (cwd / "job.sh").write_text(f'#!/bin/sh\nexec {sys.executable} {TRAIN} "$@"\n')
        options = [f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=2", "--parsable", "--output=job.out", "job.sh"]
        done = subprocess.run(
            ["sbatch", *options, *arguments], cwd=cwd, env={**self.env, **(env or {})}, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def state(self, job: str) -> tuple[str, int]:
        """(Slurm's word, exit code or 128 + signal) of a job."""
        shown = self.ask("scontrol", "show", "job", "--oneliner", job)
        (state,), (ended,) = (re.findall(rf" {key}=(\S+)", shown) for key in ("JobState", "ExitCode"))
        code, number = map(int, ended.split(":"))
        return state, 128 + number if number else code

    def wait(self, job: str, timeout: float = 240) -> int:
        """The exit code of a job, once it and its steps are gone."""
        end = time.monotonic() + timeout
        while self.ask("squeue", "--noheader", f"--jobs={job}"):
            if time.monotonic() > end:
                raise AssertionError(f"job {job} is still there: {self.ask('squeue')}\n{self.logs()}")
            time.sleep(0.1)
        return self.state(job)[1]

    def train(self, cwd: Path, *arguments: str, **options: Any) -> Result:
        """A whole job."""
        code = self.wait(self.submit(cwd, *arguments, **options))
        return Result(code, (cwd / "job.out").read_text(), "", cwd)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def start_cluster() -> Cluster:
    """A running cluster; skips where Slurm is not installed or can not be started by this user."""
    if any(shutil.which(program) is None for program in PROGRAMS):
        needs("apt", "apt-get install slurm-wlm munge")
    if os.getuid() != 0 or subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("Slurm's daemons need root, and the right to make namespaces")
    # below /tmp with a short name: a socket's path has at most 107 characters; and munge can enter it
    folder = Path(tempfile.mkdtemp(prefix="ct-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    cluster = Cluster(folder)
    try:
        cluster.start()
    except BaseException:
        cluster.stop()
        raise
    return cluster
