"""The guard of one run: a small process that stops everything of the run when its driver dies, also by SIGKILL.

Started as `python -I -S guard.py <run id>` with a pipe from the driver as its stdin: a byte `x` means that all is done; the pipe's
end without it, or another parent, means that the driver is dead. mpirun, horovodrun and srun start sessions of their own, which
no signal to the driver's group reaches; the guard finds them by CROSSTRAIN_RUN_ID.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time


class Guard:
    """The driver's end; made by `start_guard`. Leaving it, or `release`, ends the guard without stopping anything."""

    def __init__(self, run_id: str) -> None:
        import subprocess

        # Without the run's id, or the guard would count as a process of the run.
        environ = {name: value for name, value in os.environ.items() if name != "CROSSTRAIN_RUN_ID"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), run_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env=environ,
            start_new_session=True,  # Ctrl-C and a closing terminal are not for it
        )
        self.pid = self._process.pid

    def release(self) -> None:
        """The run ended and nothing of it is left: the guard leaves. May be called twice."""
        import contextlib

        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(BrokenPipeError):  # somebody killed the guard
                pipe.write(b"x")
            pipe.close()
        self._process.wait()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def start_guard(run_id: str) -> Guard:
    """Start the guard of a run, before its first worker. Call `release()` once the run ended in whatever way."""
    return Guard(run_id)


def _driver_died(driver: int) -> bool:
    """Wait for the end of the run: False if the driver said that all is done."""
    while True:
        # The look at the parent each second is for a pipe end that some fork of the driver still holds.
        readable, _, _ = select.select([0], [], [], 1.0)
        if readable:
            return os.read(0, 1) != b"x"
        if os.getppid() != driver:
            return True


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    driver = os.getppid()
    # Last on the path: this folder's modules must not shadow the standard library.
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import processes  # type: ignore[import-not-found]

    if _driver_died(driver):
        for _ in range(10):  # again for a second: a worker that the driver was just starting shows its run id only once it execs
            processes.stop_all(sys.argv[1])
            time.sleep(0.1)


if __name__ == "__main__":
    main()
