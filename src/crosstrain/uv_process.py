"""uv: where it is, and running it with pip's settings, with progress, so that it never outlives the driver's interest."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil

from crosstrain.errors import OutcomeError
from crosstrain.pip_settings import uv_settings

#: gets one line of progress at a time
Report = Callable[[str], None]

#: silence of uv after which a line says that it still works
_HEARTBEAT_S = 10.0
#: lines of uv, and of pip when uv runs it, that tell progress; small downloads are not worth a line
_PROGRESS = re.compile(r"\s*(Prepared|Downloading(?!.*(bytes|kB)\))|Downloaded|Building|Built|Installed|Bytecode compiled|warning:)")
_NO_NETWORK = re.compile(
    r"dns error|client error|Failed to fetch|error sending request|timed out|network connectivity|establish a new connection"
)


def uv_program() -> str:
    """Path of uv: the one of the package `uv`, else the one on PATH. Raises OutcomeError (env_missing) when there is none."""
    try:
        import uv

        return str(uv.find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
    if not found:
        raise OutcomeError("env_missing", "uv, which makes the environments, is not installed", "pip install uv")
    return found


def one_line(output: str, limit: int = 400) -> str:
    """uv's error ("error: … cause: …" over several lines, maybe with branches drawn), or pip's ("ERROR: …"), as one line of at
    most `limit` characters: what happened stands at its start, why often at its end."""
    lines = [re.sub(r"^[\s×╰─▶├│]+", "", line).strip() for line in output.splitlines()]
    starts = [index for index, line in enumerate(lines) if line.lower().startswith("error:")]
    kept = [re.sub(r"^(error|ERROR|cause|Caused by):\s*", "", line) for line in lines[starts[0] if starts else 0 :] if line]
    text = ": ".join(kept)
    head = limit * 2 // 3
    return text if len(text) <= limit else text[:head] + " … " + text[head + 3 - limit :]


class Uv:
    """Runs uv for one environment or bundle (`what` names it in errors). What it said goes to `log` when it fails.

    uv inherits the lock file `lock_fd`, if there is one, and is killed, with all it started, when an exception leaves `run`.
    """

    def __init__(self, what: str, log: Path, lock_fd: int | None, report: Report) -> None:
        self.what = what
        self.log = log
        self.lock_fd = lock_fd
        self.report = report
        self.program = uv_program()
        self.environment, self.options = uv_settings(os.environ)
        self._said: list[str] = []

    def pip_install(self, *arguments: str) -> str:
        """`uv pip install`, as `run`."""
        return self.run("pip", "install", *self.options, *arguments)

    def run(self, *arguments: str) -> str:
        """uv's output. Raises OutcomeError (env_missing) with its error in one line."""
        process = subprocess.Popen(
            [self.program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self.environment,
            start_new_session=True,  # builds of source packages are stopped with it
            pass_fds=() if self.lock_fd is None else (self.lock_fd,),
        )
        try:
            output = self._follow(process)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        self._said.append(output)
        if process.returncode:
            self.log.write_text("".join(self._said), encoding="utf-8")
            hint = f"uv's whole output: {self.log}"
            if _NO_NETWORK.search(output):
                hint = "no network? PIP_INDEX_URL names a mirror, PIP_FIND_LINKS a folder of wheels; " + hint
            if "No space left on device" in output:
                hint = "free some space, or name a folder elsewhere; " + hint
            raise OutcomeError("env_missing", f"{self.what} could not be made: {one_line(output)}", hint)
        return output

    def _follow(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
        start = time.monotonic()
        output: list[str] = []
        while True:
            try:
                line = lines.get(timeout=_HEARTBEAT_S)
            except queue.Empty:
                written = _written(process.pid)
                self.report(f"still working: {time.monotonic() - start:.0f} s, {written / 1e9:.1f} GB written")
                continue
            if line is None:
                process.wait()
                return "".join(output)
            output.append(line)
            if _PROGRESS.match(line):
                line = line.strip()
                self.report(line[0].lower() + line[1:])


def _read_lines(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _written(pid: int) -> int:
    """Bytes that a process and those it started have written so far; 0 when it has just ended."""
    try:
        process = psutil.Process(pid)
        return sum(one.io_counters().write_chars for one in (process, *process.children(recursive=True)))
    except (psutil.Error, AttributeError):  # not every system counts
        return 0
