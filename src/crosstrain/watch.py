"""Watching the ranks of one run: progress, time limits, system samples; and the end of all of them together."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosstrain import samples
from crosstrain.launch import Rank
from crosstrain.outcomes import Outcome
from crosstrain.progress import RunLine, duration, number
from crosstrain.system_samples import SystemSampler

POLL_S = 0.25
SAMPLE_S = 1.0
#: When one rank has ended badly, the others get this long to notice by themselves.
OTHER_RANKS_S = 3.0
#: Phases that end only with rows in the samples file; the others have a limit of their own.
COUNTED = ("iteration", "block", "train", "evaluate")


@dataclass
class Ended:
    """How the processes ended. `stopped`: why the driver stopped them, or None when they ended by themselves."""

    returncodes: list[int | None]
    phase: str
    stopped: Outcome | None = None
    first: list[int] = field(default_factory=list)
    """the ranks that were the first to end badly: those that end after them may only have lost them"""
    events: list[dict[str, Any]] = field(default_factory=list)


class EventReader:
    """The new lines of an events.<rank>.jsonl each time it is asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.all: list[dict[str, Any]] = []

    def new(self) -> list[dict[str, Any]]:
        try:
            with open(self.path, "rb") as source:
                source.seek(self.offset)
                text = source.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        found = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # a line of a worker that writes nonsense
                found.append(json.loads(line))
        self.all += found
        return found


def wait_for_end(processes: Sequence[Rank], seconds: float) -> None:
    """Return when one of the processes has ended, after `seconds` at the latest.

    One sleep: `Popen.wait(timeout)` wakes up 20 times a second, beside work that is being timed, and sees an end 50 ms late.
    """
    handles: list[int] = []
    poller = select.poll()
    try:
        for process in processes:
            handles.append(os.pidfd_open(process.pid))
            poller.register(handles[-1], select.POLLIN)
        poller.poll(1000 * seconds)
    except OSError:  # an old kernel or a sandbox
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes[0].wait(seconds)
    finally:
        for handle in handles:
            os.close(handle)


class Watch:
    """Rank 0 speaks for the run in progress and phase; all ranks are looked at for their end."""

    def __init__(
        self,
        run: dict[str, Any],
        processes: Sequence[Rank],
        sampler: SystemSampler,
        line: RunLine,
        timeouts: dict[str, float],
        timeout_s: float | None,
    ) -> None:
        folder = Path(run["folder"])
        self.run, self.processes, self.sampler, self.line = run, processes, sampler, line
        self.timeouts, self.timeout_s = timeouts, timeout_s
        self.events = EventReader(folder / "events.0.jsonl")
        self.rows = folder / "samples.0.bin"
        self.begin = time.monotonic()
        self.phase: dict[str, Any] = {"name": "import"}
        self.phase_begin = self.last_row = self.begin
        self.row_count = self.phase_rows = 0
        self.first_failed: list[int] = []

    def until_done(self) -> Ended:
        """Wait for the end of all ranks. A time limit or a failed rank ends the wait early: the caller stops what is left."""
        next_sample = time.monotonic()
        failed_at: float | None = None
        while True:
            self.look()
            now = time.monotonic()
            if now >= next_sample:
                self.sampler.sample()
                next_sample = now + SAMPLE_S
            alive = [process for process in self.processes if process.poll() is None]
            failed = [rank for rank, process in enumerate(self.processes) if process.returncode]
            if failed_at is None and failed:
                failed_at, self.first_failed = now, failed
            if not alive:
                return self.ended()
            if failed_at is not None and now - failed_at > OTHER_RANKS_S:
                return self.ended()
            late = self.too_late(now)
            if late:
                return self.ended(late)
            wait_for_end(alive, POLL_S)

    def ended(self, stopped: Outcome | None = None) -> Ended:
        self.look()
        self.sampler.sample()
        codes = [process.poll() for process in self.processes]
        return Ended(codes, self.phase["name"], stopped, self.first_failed, self.events.all)

    def look(self) -> None:
        """Read what is new and show it."""
        now = time.monotonic()
        for event in self.events.new():
            if event["event"] == "phase":
                self.phase, self.phase_begin, self.last_row, self.phase_rows = event, now, now, self.row_count
        count, last = 0, None
        with contextlib.suppress(samples.SamplesError, OSError):
            count, last = samples.tail(self.rows)
        if count != self.row_count:
            self.row_count, self.last_row = count, now
        self.line.update(self.phase["name"].replace("_", " "), self.details(now, last))

    def details(self, now: float, last: Any) -> str:
        """`412/3000 iterations, 1.2 ms, 53000 samples/s, loss 0.31, 4 s left`."""
        if self.phase["name"] not in COUNTED or last is None or self.row_count == self.phase_rows:
            return duration(now - self.phase_begin) if now - self.phase_begin >= 1 else ""
        done = int(last["iteration"]) + int(last["size"])
        total = self.phase.get("total")
        step_s = float(last["duration"]) / max(1, int(last["size"]))
        rate = self.run["batch_global"] / step_s if step_s else float("nan")
        texts = [
            f"{done}/{total} iterations" if total else f"{done} iterations",
            f"{number(1e3 * step_s, 3)} ms",
            f"{number(rate, 3)} samples/s",
        ]
        if last["loss"] == last["loss"]:
            texts.append(f"loss {number(float(last['loss']), 3)}")
        if total:
            texts.append(f"{duration((total - done) * step_s)} left")
        elif self.phase.get("budget_s"):
            texts.append(f"at most {duration(max(0.0, self.phase['budget_s'] - (now - self.phase_begin)))} left")
        return ", ".join(texts)

    def too_late(self, now: float) -> Outcome | None:
        """The outcome `timeout` when a limit is over."""
        name = self.phase["name"]
        if self.timeout_s is not None and now - self.begin > self.timeout_s:
            return Outcome("timeout", name, f"the run took longer than timeout_s={self.timeout_s:g}", "raise timeout_s")
        if name in COUNTED:
            key, since = "stall_s", self.last_row
        else:
            key, since = f"{name}_s", self.phase_begin
        limit = self.timeouts.get(key, self.timeouts["stall_s"])
        if now - since > limit:
            what = "no iteration finished" if name in COUNTED else "it did not end"
            return Outcome("timeout", name, f"{what} within {limit:g} s", f"raise measure.timeouts.{key}")
        return None
