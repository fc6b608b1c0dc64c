"""Who drives a run: enough to tell later, on the same host, whether that driver process still lives."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
from pathlib import Path

import psutil


def host_name() -> str:
    """The `host` tag."""
    return socket.gethostname()


def own_tags() -> dict[str, str]:
    """The tags that say where and by whom a run is driven: `host`, `driver`, and MLflow's user and source."""
    return {
        "host": host_name(),
        "driver": driver_identity(),
        "mlflow.user": _user(),
        "mlflow.source.name": Path(sys.argv[0]).name or "crosstrain",
        "mlflow.source.type": "LOCAL",
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def driver_identity(pid: int | None = None) -> str:
    """The `driver` tag: JSON of boot id, PID namespace, pid and start time of this process (or of `pid`)."""
    pid = os.getpid() if pid is None else pid
    return json.dumps({"boot": _boot_id(), "namespace": _pid_namespace(), "pid": pid, "start": _start_time(pid)}, sort_keys=True)


def is_alive(identity: str) -> bool:
    """Whether the driver of a `driver` tag written on this host lives. True also when that can not be told.

    A process of another PID namespace (another container with the same host name) can not be seen from here, so it counts
    as alive until the machine was started anew.
    """
    try:
        fields = json.loads(identity)
        boot, namespace, pid, start = fields["boot"], fields["namespace"], int(fields["pid"]), fields["start"]
    except (ValueError, KeyError, TypeError):
        return True
    if boot != _boot_id():
        return False
    if namespace != _pid_namespace():
        return True
    return start is not None and _start_time(pid) == start


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(int(psutil.boot_time()))


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_time(pid: int) -> float | None:
    """When the process started, None when there is none (a zombie is none).

    On Linux the kernel's clock ticks since boot (field 22 of /proc/<pid>/stat, man 5 proc): unlike psutil's wall-clock
    time they do not move when the system clock is set.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else float(fields[19])
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None
