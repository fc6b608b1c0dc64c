"""What a person sees: one live line per run on a terminal, plain lines otherwise, and the short table at the end."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

#: A plain (not live) log gets a line when the phase changes, and every so many seconds within one.
PLAIN_EVERY_S = 10.0

console = Console(highlight=False, soft_wrap=True)
if not console.is_terminal:
    console.width = 250  # a file or a pipe has no width at which a table must fold


def say(text: str) -> None:
    """Print one line, above the live line where there is one."""
    console.print(text, markup=False)


def duration(seconds: float) -> str:
    """`42 s`, `3 min`, `2.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """A sign of life on a terminal while something takes its time."""
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        yield


class Sweep:
    """Where the command stands: which cell of how many, and when the last will be done."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.started = time.monotonic()
        self.folder: Path | None = None

    def prefix(self) -> str:
        """`cell 7/24, about 41 min left: ` (nothing for a single run)."""
        if self.total <= 1:
            return ""
        left = ""
        if self.done:
            per_cell = (time.monotonic() - self.started) / self.done
            left = f", about {duration(per_cell * (self.total - self.done))} left"
        return f"cell {self.done + 1}/{self.total}{left}: "


sweep = Sweep()


class RunLine:
    """The progress of one run. Use as a context manager; `update` may be called as often as one likes."""

    def __init__(self, title: str) -> None:
        self.title = sweep.prefix() + title
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self.phase = ""
        self.seen: set[str] = set()
        self.shown = 0.0

    def __enter__(self) -> RunLine:
        if self.live:
            self.live.start()
        else:
            say(self.title)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def update(self, phase: str, details: str = "") -> None:
        """Show the phase and its details (iteration, rate, loss, time left)."""
        now = time.monotonic()
        if self.live:
            if now - self.shown >= 0.5 or phase != self.phase:
                self.live.update(Text(f"{self.title}  {phase}  {details}", no_wrap=True, overflow="ellipsis"), refresh=True)
                self.shown = now
        elif phase not in self.seen or now - self.shown >= PLAIN_EVERY_S:
            say(f"  {phase}  {details}".rstrip())
            self.shown = now
        self.phase = phase
        self.seen.add(phase)


def number(value: float | None, digits: int = 4) -> str:
    """`digits` significant digits, nothing when unknown."""
    if value is None or not math.isfinite(value):
        return ""
    if value and abs(value) >= 10**digits:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def result_line(row: dict[str, Any]) -> str:
    """One line for a finished run."""
    if row["step_ms"] is None:
        return f"{row['run']}: {row['outcome']}: {row['reason']}"
    text = f"{row['run']}: {row['outcome']}: {number(row['step_ms'])} ms/iteration"
    if row["step_ms_low"] is not None:
        text += f" [{number(row['step_ms_low'])}, {number(row['step_ms_high'])}]"
    text += f", {number(row['samples_per_s'])} samples/s"
    if row["accuracy"] is not None:
        text += f", accuracy {100 * row['accuracy']:.2f} %"
    return text + (f" - {row['reason']}" if row["reason"] else "")


def swept(names: list[str], overrides: list[list[str]]) -> list[str]:
    """What tells cells of the same name apart: each one's overrides that not all of that name have. [] where names are enough."""
    common: dict[str, set[str]] = {}
    for name, cell in zip(names, overrides, strict=True):
        common[name] = common.get(name, set(cell)) & set(cell)
    if len(common) == len(names):
        return []
    return [" ".join(o for o in cell if o not in common[name]) for name, cell in zip(names, overrides, strict=True)]


def show_table(rows: list[dict[str, Any]], folder: Path) -> None:
    """The runs of this command, then where to see them."""
    from crosstrain import run

    differences = swept([row["run"] for row in rows], [row["overrides"] for row in rows])
    table = Table(title=f"{len(rows)} runs" if len(rows) != 1 else None, title_justify="left")
    for name in ("run", "swept", "outcome") if differences else ("run", "outcome"):
        table.add_column(name, overflow="fold")
    scaled = any(row["replicas"] > 1 for row in rows)
    for name in ("step_ms", "95 % interval", "samples/s", *["efficiency"] * scaled, "accuracy"):
        table.add_column(name, justify="right")
    for index, row in enumerate(rows):
        interval = f"{number(row['step_ms_low'])} - {number(row['step_ms_high'])}" if row["step_ms_low"] is not None else ""
        accuracy = f"{100 * row['accuracy']:.2f} %" if row["accuracy"] is not None else ""
        what = [row["run"], differences[index]] if differences else [row["run"]]
        efficiency = [f"{100 * row['efficiency']:.0f} %" if row["efficiency"] is not None else ""] * scaled
        table.add_row(*what, row["outcome"], number(row["step_ms"]), interval, number(row["samples_per_s"]), *efficiency, accuracy)
    console.print(table)
    say(f"files: {folder}")
    for line in run.ui_lines():
        say(line)
