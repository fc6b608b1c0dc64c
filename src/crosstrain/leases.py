"""Leases: two drivers on one machine never measure on the same GPU or CPU.

A lease is an flock on one file per device, held by the driver; the kernel frees it when the driver dies, however it dies. One
folder per host, because home directories are shared between the hosts of a cluster. A driver that needs both takes GPUs first and
CPUs second, always: with one order for all, none waits for a device of one that waits for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from crosstrain import paths
from crosstrain.devices import Gpu, logical_cpus

Device = TypeVar("Device")

_POLL_S = 0.2


def lease_gpus(gpus: Sequence[Gpu], n: int, wait: Callable[[str], None]) -> AbstractContextManager[list[Gpu]]:
    """A context manager that gives `n` of `gpus`, the first free ones in that order, and holds them until it is left.

    While not enough are free it polls; `wait` then gets one line, once, that names who holds them.
    Raises ValueError if n > len(gpus).
    """
    return _lease({f"gpu-{gpu.uuid.replace('/', '_')}.lock": gpu for gpu in gpus}, n, "GPU", wait)


def lease_cpus(n: int, wait: Callable[[str], None]) -> AbstractContextManager[list[int]]:
    """As `lease_gpus`, for logical CPUs: one per physical core first. Raises ValueError if there are fewer than n."""
    return _lease({f"cpu-{cpu}.lock": cpu for cpu in logical_cpus()}, n, "CPU", wait)


@contextlib.contextmanager
def _lease(by_name: dict[str, Device], n: int, kind: str, wait: Callable[[str], None]) -> Iterator[list[Device]]:
    if n > len(by_name):
        raise ValueError(f"{n} {kind}s asked for, but there are {len(by_name)}")
    folder = paths.cache_dir("leases", platform.node() or "localhost")
    told = False
    while True:
        held, holders = _take(folder, list(by_name), n)
        if len(held) == n:
            break
        if not told:
            wait(f"waiting for {n} {kind}{'s' if n > 1 else ''}: leased by {', '.join(holders)}")
            told = True
        time.sleep(_POLL_S)
    try:
        yield [by_name[name] for name in held]
    finally:
        _release(held)


def _take(folder: Path, names: list[str], n: int) -> tuple[dict[str, int], list[str]]:
    """All or nothing: n locked files (name → descriptor) and []; or none, and who holds the others.

    One driver picks at a time (a gate file), so two that need several devices can not take them from each other for ever.
    """
    held: dict[str, int] = {}
    holders: dict[str, None] = {}  # each once, in order
    gate = _open(folder / "picking.lock")
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        for name in names:
            if len(held) == n:
                break
            handle = _open(folder / name)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held[name] = handle
            except BlockingIOError:
                holders[os.pread(handle, 300, 0).decode(errors="replace") or "another process"] = None
                os.close(handle)
        if len(held) < n:
            return {}, list(holders)
        for handle in held.values():
            os.ftruncate(handle, 0)
            os.pwrite(handle, _who(), 0)
        taken, held = held, {}
        return taken, []
    finally:
        _release(held)
        os.close(gate)


def _open(path: Path) -> int:
    """Opened with O_CLOEXEC, as Python always does: no worker inherits a lease."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)


def _release(held: dict[str, int]) -> None:
    for handle in held.values():
        # Unlock, not only close: a child forked without exec still shares the open file.
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _who() -> bytes:
    command = " ".join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]])
    return f"pid {os.getpid()} ({command[:80]})".encode()
