"""From the runs of the store to cells: one for each choice, its repeats together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from crosstrain.tracking.store import PUBLISHED, TrackedRun

#: what a cell is: everything a user can choose except the repeat and the seed
IDENTITY = (
    "framework", "framework_version", "network", "data", "data_placement", "task", "device", "device_name", "gpus", "replicas", "nodes",
    "parallelism", "scaling", "batch_global", "batch_per_replica", "precision", "compile", "memory_format", "framework_settings", "threads",
    "epochs", "optimizer", "learning_rate", "momentum", "weight_decay", "target_accuracy",
)  # fmt: skip
#: what may tell cells of one framework and network apart, and how it is named there
SETTINGS = {
    "framework_version": "{}", "device_name": "{}", "precision": "{}", "compile": "compile={}", "memory_format": "{}",
    "framework_settings": "{}", "parallelism": "{}", "scaling": "{} scaling", "data": "{}", "data_placement": "data on {}",
    "optimizer": "{}", "learning_rate": "lr {}", "momentum": "momentum {}", "weight_decay": "decay {}", "epochs": "{} epochs",
    "target_accuracy": "target {}",
}  # fmt: skip
#: what tables and figures have a place of their own for, and how it is named where that does not tell cells apart
PLACES = {
    "device": "on the {}", "threads": "{} threads", "nodes": "{} nodes", "batch_global": "batch {}", "batch_per_replica": "{} each",
    "gpus": "{} GPUs", "replicas": "{} replicas", "task": "{}",
}  # fmt: skip
WHOLE = ("gpus", "replicas", "nodes", "batch_global", "batch_per_replica", "threads", "epochs")
#: not known ("") of a run that ended before its place was chosen, its data was ready or its framework had been asked
LATE = ("framework_version", "device", "device_name", "gpus", "data_placement", "threads")


@dataclass
class Cell:
    """One choice. `facts`: its params, whole numbers as int, None where unknown; `runs`: its repeats, oldest first."""

    facts: dict[str, Any]
    runs: list[TrackedRun] = field(default_factory=list)

    @property
    def published(self) -> list[TrackedRun]:
        """The repeats that have numbers."""
        return [run for run in self.runs if _has_numbers(run)]

    @property
    def outcome(self) -> str:
        """ok only where every repeat is; else that of the last one that is not."""
        others = [outcome for run in self.runs if (outcome := run.tags.get("outcome") or run.status.lower()) != "ok"]
        return others[-1] if others else "ok"

    @property
    def reason(self) -> str:
        return next((run.tags.get("outcome_reason", "") for run in reversed(self.runs) if run.tags.get("outcome") != "ok"), "")

    def values(self, metric: str) -> list[float]:
        """Of each repeat that has it."""
        return [run.metrics[metric] for run in self.published if metric in run.metrics]

    def value(self, metric: str) -> float | None:
        """The median over the repeats."""
        values = self.values(metric)
        return median(values) if values else None

    @property
    def placed(self) -> bool:
        """Whether it is known where it runs."""
        return bool(self.facts["gpus"] or self.facts["threads"])

    @property
    def place(self) -> str:
        """`2 GPUs`, `4 threads`, `2 x 1 thread`; `16 GPUs on 2 nodes`; `CPU`, `not placed` where a run ended before it had one."""
        gpus, replicas, threads, nodes = (self.facts.get(key) for key in ("gpus", "replicas", "threads", "nodes"))
        on = f" on {nodes} nodes" if (nodes or 1) > 1 else ""
        if gpus:
            return f"{gpus} GPU" + "s" * (gpus > 1) + on
        if not threads:
            return "CPU" if self.facts.get("device") == "cpu" else "not placed"
        words = f"{threads} thread" + "s" * (threads != 1)
        return (f"{replicas} x {words}" if (replicas or 1) > 1 else words) + on

    @property
    def place_order(self) -> tuple[int, int, int]:
        gpus, replicas, threads = (self.facts.get(key) or 0 for key in ("gpus", "replicas", "threads"))
        return gpus, replicas, 0 if gpus else threads  # as `place` names them


def measured(runs: Iterable[TrackedRun]) -> list[TrackedRun]:
    """Those of crosstrain that are no reports, oldest first: others may use the experiment, too."""
    return sorted((run for run in runs if run.tags.get("kind") == "run"), key=lambda run: run.start_ms)


def cells_of(runs: Iterable[TrackedRun]) -> list[Cell]:
    """The cells of `measured` runs, in the order in which they were first run, without runs that have no numbers and were done again.

    A run without numbers that ended early belongs to the one cell that is the same in all that it tells.
    """
    found: dict[tuple[Any, ...], Cell] = {}
    for run in measured(runs):
        known = {**run.params, "nodes": run.tags.get("nodes", "1")}  # a tag; older runs have none
        facts = {key: _fact(key, known.get(key, "")) for key in IDENTITY}
        if facts["device"] == "auto":  # of older runs that ended before it was chosen
            facts |= {"device": "gpu"} if facts["gpus"] else {"device": None, "gpus": None}
        found.setdefault(tuple(facts.values()), Cell(facts)).runs.append(run)
    cells = _joined(list(found.values()))
    for cell in cells:
        cell.runs = [run for number, run in enumerate(cell.runs) if not _done_again(run, cell.runs[number + 1 :])]
    return cells


def _fact(key: str, text: str) -> Any:
    if key in WHOLE:
        return int(text) if text.isdigit() else None
    return None if key in LATE and not text else text


def _joined(cells: list[Cell]) -> list[Cell]:
    """Each cell without numbers of which not all is known, together with the one that it may be, where there is just one."""
    unknown = {id(cell): 0 if cell.published else sum(cell.facts[key] is None for key in LATE) for cell in cells}
    kept: list[Cell] = []
    for cell in sorted(cells, key=lambda cell: unknown[id(cell)]):
        same = [other for other in kept if agree(cell.facts, other.facts)] if unknown[id(cell)] else []
        if len(same) == 1:
            same[0].runs = sorted([*same[0].runs, *cell.runs], key=lambda run: run.start_ms)
        else:
            kept.append(cell)
    return sorted(kept, key=lambda cell: cell.runs[0].start_ms)


def agree(some: Mapping[str, Any], others: Mapping[str, Any], keys: Iterable[str] = IDENTITY) -> bool:
    """Whether two cells are the same in all of `keys` that both know."""
    return all(some[key] == others[key] or (key in LATE and None in (some[key], others[key])) for key in keys)


def _done_again(run: TrackedRun, later: Iterable[TrackedRun]) -> bool:
    """Whether a run without numbers is followed by one of the same repeat and seed."""
    return not _has_numbers(run) and any(_repeat(other) == _repeat(run) for other in later)


def _repeat(run: TrackedRun) -> tuple[str | None, str | None]:
    return run.params.get("repeat"), run.params.get("seed")


def _has_numbers(run: TrackedRun) -> bool:
    return run.tags.get("outcome") in PUBLISHED and "step_ms" in run.metrics


def naming(
    cells: Sequence[Cell], place: Callable[[Cell], Hashable] | None = None, but: Collection[str] = ()
) -> Callable[[Cell], list[str]]:
    """What names of a cell the SETTINGS (all `but` some) in which these cells differ: `["bf16", "compile=on"]`.

    `place`: where a table or figure puts a cell. Where that and the SETTINGS do not tell two cells apart, more of them is named.
    """
    words = {**SETTINGS, **PLACES}
    keys = [key for key in SETTINGS if key not in but and _differs(cells, key, _within(key))]

    def names(cell: Cell) -> list[str]:
        return [words[key].format(cell.facts[key]) for key in keys if cell.facts[key] not in ("", None)]

    alike = [list(cells)] if place else []
    for key in [key for key in words if key not in (*keys, *but)]:
        alike = _groups(alike, lambda cell: (place(cell), *names(cell)))  # type: ignore[misc]
        if any(_differs(those, key, ()) for those in alike):
            keys.append(key)
    return names


def _groups(groups: Iterable[Sequence[Cell]], by: Callable[[Cell], Hashable]) -> list[list[Cell]]:
    """What of these groups still is together when `by` divides them."""
    found: dict[Hashable, list[Cell]] = {}
    for cell in itertools.chain.from_iterable(groups):
        found.setdefault(by(cell), []).append(cell)
    return [those for those in found.values() if len(those) > 1]


def _within(key: str) -> tuple[str, ...]:
    """Precision tells frameworks apart, too: the fastest in bf16 is not the faster framework."""
    return ("network", "device") if key == "precision" else ("framework", "network", "device")


def of_networks(cells: Sequence[Cell], keys: Iterable[str]) -> list[str]:
    """Those of `keys` that tell nothing of a framework's rows, but differ from network to network: what a report says once."""
    return [key for key in keys if not _differs(cells, key, ("network",)) and _differs(cells, key, ())]


def _differs(cells: Sequence[Cell], key: str, within: Sequence[str]) -> bool:
    known: dict[tuple[Any, ...], set[Any]] = {}
    for cell in cells:
        if cell.facts[key] is not None:
            known.setdefault(tuple(cell.facts[one] for one in within), set()).add(cell.facts[key])
    return any(len(values) > 1 for values in known.values())
