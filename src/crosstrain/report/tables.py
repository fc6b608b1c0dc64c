"""The tables of a report: rows network × framework, columns threads, GPUs or batch sizes, as the papers have them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from crosstrain import statistics
from crosstrain.progress import number
from crosstrain.report.cells import Cell, naming

TASKS = {"training": "Training", "gradient": "Gradients (forward and backward, no update)", "forward": "Forward (inference)"}


@dataclass
class Entry:
    """One place of a table. `best`: nothing in its column of the same network and precision is shown to be faster."""

    text: str
    best: bool = False


@dataclass
class Table:
    """`rows`: the row's names (network, framework, …), then an entry for each column."""

    title: str
    heads: list[str]
    columns: list[str]
    rows: list[tuple[list[str], list[Entry]]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Measure:
    """What a table shows. `lower`: smaller is better, None: there is no better."""

    metric: str
    title: str
    lower: bool | None
    shown: Callable[[float], str] = number


def percent(value: float) -> str:
    return f"{100 * value:.3g} %"


MEASURES = (
    Measure("step_ms", "time per iteration, ms", True),
    Measure("samples_per_s", "samples/s", False),
    Measure("speedup", "speed-up against one device", None),
    Measure("efficiency", "efficiency (speed-up / devices)", None, percent),
    Measure("communication_pct", "communication, % of an iteration", None),
    Measure("accuracy", "accuracy", None, percent),
    Measure("perplexity", "perplexity", None),
    Measure("time_to_accuracy_s", "time to target accuracy, s", None),
    Measure("peak_memory_mb", "peak memory by the framework, MB", None),
    Measure("device_memory_mb", "memory on the device, MB", None),
    Measure("build_s", "building the network (compilation ahead of time), s", None),
    Measure("first_step_s", "first iteration (compilation, tuning), s", None),
    Measure("energy_j_per_sample", "energy, J/sample", None),
    Measure("utilization_pct", "of the measured matrix rate (crosstrain doctor), %", None),
    Measure("throttled_pct", "the GPU's clock held down, % of the time", None),
    Measure("sm_clock_mhz", "the GPU's clock (SM), MHz", None),
)


def tables_of(cells: Sequence[Cell]) -> list[Table]:
    """All tables that the cells fill: for each task and device, and each measure that some cell has."""
    made = []
    for task in TASKS:
        of_task = [cell for cell in cells if cell.facts["task"] == task]
        devices = sorted({cell.facts["device"] for cell in of_task if cell.facts["device"]}) or [""] * bool(of_task)
        for device in devices:
            # what ended before its device was chosen is in the first
            chosen = [cell for cell in of_task if (cell.facts["device"] or devices[0]) == device]
            for measure in MEASURES:
                always = measure.metric == "step_ms"  # also shows what failed
                scales = measure.metric in ("speedup", "efficiency", "communication_pct")
                several = [cell for cell in chosen if (cell.facts["replicas"] or 1) > 1]
                if always or any(cell.value(measure.metric) is not None for cell in (several if scales else chosen)):
                    made.append(table_of(chosen, measure, f"{TASKS[task]}: {measure.title}"))
    return made


def table_of(cells: Sequence[Cell], measure: Measure, title: str) -> Table:
    """One table. The columns are batch sizes where those vary within a network and framework, else places (threads, GPUs)."""
    by_batch = bool(_varies(cells, "batch_global")) and not _scaled(cells)
    homes: dict[str, dict[str, Cell]] = {}  # by framework, then by place
    for cell in cells:
        if cell.placed:
            homes.setdefault(cell.facts["framework"], {})[cell.place] = cell

    def placed(cell: Cell) -> Cell:
        """A cell with its place; for one that ended before it had a place, one of where its framework runs, if that is one place."""
        known = homes.get(cell.facts["framework"], {})
        return cell if cell.placed or len(known) != 1 else next(iter(known.values()))

    def row(cell: Cell) -> tuple[str, str]:
        return (cell.facts["network"], placed(cell).place if by_batch else _batch(cell))

    def column(cell: Cell) -> tuple[Any, str]:
        if by_batch:
            return (cell.facts["batch_global"] or 0, str(cell.facts["batch_global"] or "?"))
        return (placed(cell).place_order, placed(cell).place)

    columns = sorted({column(cell) for cell in cells})
    rows: dict[tuple[str, ...], dict[tuple[Any, str], Cell]] = {}
    settings = naming(cells, lambda cell: (*row(cell), cell.facts["framework"], column(cell)))
    for cell in cells:
        names = (*row(cell), " ".join([cell.facts["framework"], *settings(cell)]))
        while column(cell) in rows.get(names, {}):  # of what can not be told apart nothing is lost
            names = (*names[:2], f"{names[2]} (another)")
        rows.setdefault(names, {})[column(cell)] = cell
    ordered = sorted(rows, key=lambda names: (names[0], _first_number(names[1]), names[2]))
    notes: list[str] = []
    best = _best(rows, columns, measure, notes)
    entries = [(list(names), [_entry(rows[names].get(c), measure, (names, c) in best, notes, names) for c in columns]) for names in ordered]
    entries = [(names, cells_of_row) for names, cells_of_row in entries if any(entry.text for entry in cells_of_row)]
    heads = ["network", "device" if by_batch else "batch", "framework"]
    return Table(title, heads, [f"batch {text}" if by_batch else text for _, text in columns], entries, notes)


def _varies(cells: Iterable[Cell], key: str) -> bool:
    """Whether placed cells of the same network, framework and place differ in it."""
    known: dict[Any, set[Any]] = {}
    for cell in cells:
        if cell.placed:
            known.setdefault((cell.facts["network"], cell.facts["framework"], cell.place), set()).add(cell.facts[key])
    return any(len(values) > 1 for values in known.values())


def _scaled(cells: Iterable[Cell]) -> bool:
    return len({cell.place for cell in cells if cell.placed}) > 1


def _batch(cell: Cell) -> str:
    """Of weak scaling the batch of a replica: it is what stays the same along the row."""
    if cell.facts["scaling"] == "weak" and cell.facts["batch_per_replica"]:
        return f"{cell.facts['batch_per_replica']} each"
    return str(cell.facts["batch_global"] or "")


def _first_number(text: str) -> float:
    digits = text.split(" ")[0]
    return float(digits) if digits.isdigit() else 0.0


def _entry(cell: Cell | None, measure: Measure, best: bool, notes: list[str], row: tuple[str, ...]) -> Entry:
    if cell is None:
        return Entry("")
    value, outcome = cell.value(measure.metric), cell.outcome
    if value is None:
        return Entry(outcome if not cell.published else "")
    text = measure.shown(value)
    if outcome != "ok":
        text += f" ({outcome})"
        note = f"{row[0]} {row[2]}, {cell.place}, batch {cell.facts['batch_global']}: {outcome}: {cell.reason}"
        if measure.metric == "step_ms" and note not in notes:  # said once, under the times
            notes.append(note)
    return Entry(text, best)


def _best(rows: dict[Any, dict[Any, Cell]], columns: Sequence[Any], measure: Measure, notes: list[str]) -> set[tuple[Any, Any]]:
    """The fastest of each network, batch, precision and column, and those that are not shown to be slower. Flagged runs are never best."""
    if measure.lower is None:
        return set()
    found = set()
    untested = False
    precisions = sorted({cell.facts["precision"] for line in rows.values() for cell in line.values()})
    for group, column, precision in itertools.product(sorted({row[:2] for row in rows}), columns, precisions):
        ranked = sorted(
            ((median_of, row, cell) for row in rows if row[:2] == group and (cell := rows[row].get(column)) is not None
             and cell.facts["precision"] == precision and cell.outcome == "ok" and (median_of := cell.value("step_ms")) is not None),
            key=lambda one: one[0],
        )  # fmt: skip
        if len(ranked) < 2:
            continue
        _, first_row, first = ranked[0]
        found.add((first_row, column))
        for _, row, other in ranked[1:]:
            compared = statistics.compare(first.values("step_ms"), other.values("step_ms"))
            untested = untested or compared.p is None
            if compared.p is not None and compared.faster is None:
                found.add((row, column))
                text = f"{' '.join(filter(None, group))}, {column[1]}: no difference shown between {first_row[2]} and {row[2]}"
                notes.append(f"{text} (p = {compared.p:.2g}, {100 * abs(compared.ratio - 1):.2g} %)")
    if untested and found:
        notes.append("bold: the smallest median of its precision; whether it is faster was not tested (needs repeat=1,…,5)")
    return found
