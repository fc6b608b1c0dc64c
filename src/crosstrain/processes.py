"""Find and stop every process of a run, and no other.

Standard library only and quick to import: the guard loads this file with `python -I -S`. Linux: reads /proc.

A process belongs to a run if its environment carries CROSSTRAIN_RUN_ID=<run id> (inherited through mpirun, srun and the like, also
across sessions), or it descends from such a process or shares its session (some programs clear or overwrite their environment).
"""

from __future__ import annotations

import os
import signal
import time
from collections import namedtuple
from collections.abc import Iterable

RUN_ID_VARIABLE = "CROSSTRAIN_RUN_ID"

# One line of /proc/<pid>/stat. `start` is in clock ticks since boot: (pid, start) names one process, a pid alone may be reused.
# `ticks`: CPU time (user + system) of the process and of the children it has waited for; `waited` is the latter's part of it.
Stat = namedtuple("Stat", "pid parent session start dead ticks waited rss_pages")


def read_stat(pid: int) -> Stat | None:
    """What the kernel says about a process; None if there is none. See proc_pid_stat(5) for the fields."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except OSError:  # ProcessLookupError too: it may end while it is read
        return None
    fields = line[line.rindex(b")") + 2 :].split()  # the name before may hold blanks and brackets
    # A leader that ended before its other threads is shown as a zombie, too, but its process lives.
    dead = fields[0] in b"ZXx" and int(fields[17]) <= 1
    waited = int(fields[13]) + int(fields[14])
    ticks = int(fields[11]) + int(fields[12]) + waited
    return Stat(pid, int(fields[1]), int(fields[3]), int(fields[19]), dead, ticks, waited, int(fields[21]))


def all_pids() -> list[int]:
    """Every process that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def processes_of(run_id: str, pids: Iterable[int] = ()) -> list[int]:
    """The living processes of a run, without the calling one: those that carry its id, and all that descend from those or from
    `pids` (processes the caller started) or are in a session that one of them leads. Zombies are no longer processes here.

    A pid in `pids` counts while it is the caller's own child, waited for or not yet, or carries the id: once reaped, its number may
    name a stranger.
    """
    return [stat.pid for stat in _stats_of(run_id, pids)]


def stop_all(run_id: str, sids: Iterable[int] = (), grace_s: float = 5.0, limit_s: float = 15.0) -> list[int]:
    """SIGTERM to every process of the run, SIGKILL to those left after `grace_s`, until there is none or `limit_s` is over.

    `sids`: pids of the session leaders that the caller started (see `processes_of`). Returns the pids left: [] as a rule; processes
    stuck in the kernel, or of another user. The caller reaps its own children.
    """
    sids = list(sids)
    begin = time.monotonic()
    told: set[tuple[int, int]] = set()
    while True:
        left = _stats_of(run_id, sids)
        elapsed = time.monotonic() - begin
        if not left or elapsed > limit_s:
            return [stat.pid for stat in left]
        if elapsed >= grace_s:
            for stat in left:
                _send(stat, signal.SIGKILL)
            time.sleep(0.01)  # the next look finds what was forked meanwhile
            continue
        for stat in left:
            if (stat.pid, stat.start) not in told:
                told.add((stat.pid, stat.start))
                _send(stat, signal.SIGTERM)
                _send(stat, signal.SIGCONT)  # a stopped process only then takes the SIGTERM
        time.sleep(0.05)


def _stats_of(run_id: str, pids: Iterable[int]) -> list[Stat]:
    me, my_session = os.getpid(), os.getsid(0)
    marker = f"{RUN_ID_VARIABLE}={run_id}".encode()
    given = set(pids)
    stats: dict[int, Stat | None] = {}
    ours: set[int] = set()
    # Again until a look brings nothing new: what a process forked just before it ended is in the next list.
    for _ in range(100):
        new = [pid for pid in all_pids() if pid not in stats]
        if not new:
            break
        for pid in new:
            stats[pid] = stat = read_stat(pid)
            # A zombie's environment is gone; as an unreaped child of ours it still holds its pid, and so the name of its session.
            if stat is not None and pid != me and (_carries(pid, marker) or (pid in given and stat.parent == me)):
                ours.add(pid)
    others = [stat for stat in stats.values() if stat is not None and stat.pid != me]
    grew = True
    while grew:
        sessions = ours - {my_session}
        more = {stat.pid for stat in others if stat.parent in ours or stat.session in sessions} - ours
        ours |= more
        grew = bool(more)
    return [stat for stat in others if stat.pid in ours and not stat.dead]


def _carries(pid: int, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read().split(b"\0")
    except OSError:  # another user's, or ended
        return False


def _send(stat: Stat, number: int) -> None:
    """Signal exactly the process that was seen: the file descriptor pins it while its start time is compared."""
    try:
        handle = os.pidfd_open(stat.pid)
    except ProcessLookupError:
        return
    except OSError:  # an old kernel or a sandbox
        handle = -1
    try:
        now = read_stat(stat.pid)
        if now is None or now.start != stat.start:
            return
        if handle >= 0:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(stat.pid, number)
    except (ProcessLookupError, PermissionError):  # ended, or another user's: reported as left
        pass
    finally:
        if handle >= 0:
            os.close(handle)
