"""`crosstrain compare A B`: two sweeps, commits, machines or framework versions, cell by cell; a gate for a team's CI."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from crosstrain import progress, statistics
from crosstrain.errors import ConfigError
from crosstrain.progress import number
from crosstrain.report.cells import IDENTITY, Cell, agree, cells_of, naming
from crosstrain.tracking.store import TrackedRun, Tracker
from crosstrain.tracking.view import store_arguments, tracker_of

#: what two sides may differ in and still be the same cell
FREE = ("framework_version", "device_name")
KEYS = tuple(key for key in IDENTITY if key not in FREE)
SLOWER, NOT_TESTED = 1, 4


@dataclass(frozen=True)
class Side:
    """One cell of one side: the step times of its repeats in ms, none where it has no numbers."""

    facts: dict[str, Any]
    step_ms: list[float]
    outcome: str

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(self.facts[key] for key in KEYS)

    @property
    def cell(self) -> Cell:
        return Cell(self.facts)

    def name(self, settings: Callable[[Cell], list[str]]) -> str:
        framework = " ".join([self.facts["framework"], *settings(self.cell)])
        return f"{self.facts['network']} {framework}, {self.cell.place}, batch {self.facts['batch_global']}"


@dataclass(frozen=True)
class Verdict:
    """A cell of both sides, or of one. `ratio`: step time of B over A, above 1 B is slower; `low`, `high`: its 95 % interval."""

    name: str
    a: float | None
    b: float | None
    ratio: float | None
    low: float | None
    high: float | None
    tested: bool
    words: str


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        parents=[store_arguments()],
        help="compare two sweeps, commits, machines or framework versions",
        epilog="A side is the name of a sweep, KEY=VALUE of a param or tag (framework_version=2.9.0, crosstrain_commit=…, host=…), several "
        "joined by commas (SWEEP,framework_version=2.9.0), or a file of --save. Exit code with --fail-over: 0 no cell is slower, "
        f"{SLOWER} some cell is slower or has lost its numbers, {NOT_TESTED} not tested (too few repeats).",
    )
    parser.add_argument("sides", nargs="+", metavar="SIDE", help="A B, or B alone with --baseline A")
    parser.add_argument("--baseline", metavar="A", help="the side that the others are compared with")
    parser.add_argument("--fail-over", metavar="5%", type=_percentage, help="exit code 1 where B is slower by more than this, for sure")
    parser.add_argument("--save", metavar="FILE", type=Path, help="keep the (last) side in this file, to be a baseline later")
    parser.set_defaults(function=_run)


def _percentage(text: str) -> float:
    try:
        value = float(text.rstrip("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"{text}: must be a percentage such as 5%")
    return value


def _run(arguments: argparse.Namespace) -> int:
    names = [*([arguments.baseline] if arguments.baseline else []), *arguments.sides]
    if len(names) > 2 or (len(names) == 1 and not arguments.save):
        raise ConfigError(f"compare {' '.join(names)}: needs two sides, A B or --baseline A B")
    tracker = tracker_of(arguments)
    if not all(name.endswith(".json") for name in names):
        tracker.connect()
    sides = [side_of(name, tracker) for name in names]
    if arguments.save:
        _save(sides[-1], arguments.save)
    if len(sides) == 1:
        return 0
    verdicts = compare(*sides)
    _show(verdicts, names)
    return 0 if arguments.fail_over is None else gate(verdicts, arguments.fail_over)


def side_of(name: str, tracker: Tracker) -> list[Side]:
    """The cells that a side's name means. Raises ConfigError where there are none, or where it means one cell twice."""
    if name.endswith(".json"):
        sides = _load(Path(name))
    else:
        sides = [Side(cell.facts, cell.values("step_ms"), cell.outcome) for cell in cells_of(_runs(name, tracker))]
    if not sides:
        raise ConfigError(f"{name}: there are no runs; crosstrain list shows what is in the store")
    seen: dict[tuple[Any, ...], Side] = {}
    for side in sides:
        other = seen.setdefault(side.key, side)
        if other is not side:
            different = next(key for key in FREE if side.facts[key] != other.facts[key])
            values = " and ".join(str(one.facts[different]) for one in (other, side))
            settings = naming([side.cell for side in sides], but=FREE)
            raise ConfigError(f"{name}: {side.name(settings)} is there with {different} {values}; add ,{different}=… to choose one")
    return sides


def _runs(name: str, tracker: Tracker) -> list[TrackedRun]:
    wanted = [part.partition("=") for part in name.split(",")]
    sweeps = [key for key, equals, _ in wanted if not equals]
    runs = [run for sweep in sweeps for run in tracker.runs_of_sweep(sweep.replace("'", ""))] if sweeps else tracker.runs()
    pairs = [(key, value) for key, equals, value in wanted if equals]
    return [run for run in runs if all({**run.tags, **run.params}.get(key) == value for key, value in pairs)]


def _save(sides: Iterable[Side], path: Path) -> None:
    try:
        path.write_text(json.dumps([side.__dict__ for side in sides], indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save {path}: {error.strerror}") from error


def _load(path: Path) -> list[Side]:
    try:
        sides = [Side(**one) for one in json.loads(path.read_text(encoding="utf-8"))]
        # an older file lacks a key
        return [replace(side, facts={**dict.fromkeys(IDENTITY, ""), **side.facts}) for side in sides]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: is no file of `crosstrain compare --save`") from error


def compare(a: Sequence[Side], b: Sequence[Side]) -> list[Verdict]:
    """The verdict on each cell of either side."""

    def place(cell: Cell) -> tuple[Any, ...]:
        return (cell.facts["network"], cell.facts["framework"], cell.place, cell.facts["batch_global"])

    settings = naming([side.cell for side in (*a, *b)], place, but=FREE)
    return [_verdict((one or other).name(settings), one, other) for one, other in _pairs(a, b)]  # type: ignore[union-attr]


def _pairs(a: Sequence[Side], b: Sequence[Side]) -> list[tuple[Side | None, Side | None]]:
    """The cells of both sides that are the same, then those of one side. What a side does not know (it ended early) counts as the same."""
    left = {side.key: side for side in b}
    pairs: list[tuple[Side | None, Side | None]] = [(side, left.pop(side.key, None)) for side in a]
    alone = [side for side, other in pairs if side and not other]
    for at, (side, other) in enumerate(pairs):
        fits = [one for one in left.values() if side and not other and agree(side.facts, one.facts, KEYS)]
        if len(fits) == 1 and len([one for one in alone if agree(one.facts, fits[0].facts, KEYS)]) == 1:
            pairs[at] = (side, left.pop(fits[0].key))
    return [*pairs, *((None, side) for side in left.values())]


def _verdict(name: str, a: Side | None, b: Side | None) -> Verdict:
    times = [median(side.step_ms) if side is not None and side.step_ms else None for side in (a, b)]
    if a is None or b is None or times[0] is None or times[1] is None:
        words = [f"{letter}: {'not there' if side is None else side.outcome}" for letter, side in (("A", a), ("B", b))]
        return Verdict(name, times[0], times[1], None, None, None, False, ", ".join(words))
    found = statistics.compare(a.step_ms, b.step_ms)
    flagged = "".join(f"; {letter} is {side.outcome}" for letter, side in (("A", a), ("B", b)) if side.outcome != "ok")
    return Verdict(name, times[0], times[1], found.ratio, found.low, found.high, found.p is not None, found.verdict + flagged)


def gate(verdicts: Iterable[Verdict], limit: float) -> int:
    """The exit code: a cell is slower when even the near end of its interval is above the limit, or when it lost its numbers."""
    verdicts = list(verdicts)
    slower = [v for v in verdicts if (v.tested and v.low is not None and v.low > 1 + limit) or (v.a is not None and v.b is None)]
    untested = [v for v in verdicts if v.ratio is not None and not v.tested]
    for verdict in slower:
        how = f"slower by at least {100 * ((verdict.low or 1) - 1):.2g} %" if verdict.b is not None else verdict.words
        progress.say(f"FAILED {verdict.name}: {how}")
    if slower:
        return SLOWER
    if untested or not any(v.tested for v in verdicts):
        progress.say(f"not tested: {len(untested)} of {len(verdicts)} cells have fewer than 5 repeats a side (repeat=1,2,3,4,5)")
        return NOT_TESTED
    return 0


def _show(verdicts: Iterable[Verdict], names: Sequence[str]) -> None:
    table = Table(title=f"A: {names[0]}   B: {names[1]}", title_justify="left")
    for column in ("cell", "A, ms", "B, ms", "B / A", "95 % interval", "verdict"):
        table.add_column(column, overflow="fold", justify="left" if column in ("cell", "verdict") else "right")
    for v in verdicts:
        interval = f"{v.low:.3f} - {v.high:.3f}" if v.low is not None and v.high is not None else ""
        table.add_row(v.name, number(v.a), number(v.b), f"{v.ratio:.3f}" if v.ratio is not None else "", interval, v.words)
    progress.console.print(table)
