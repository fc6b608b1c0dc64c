"""From the runs of the store to cells: one for each choice, its repeats together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
}  # fmt: skip
WHOLE = ("gpus", "replicas", "nodes", "batch_global", "batch_per_replica", "threads", "epochs")


@dataclass
class Cell:
    """One choice. `facts`: its params, whole numbers as int (None where unknown); `runs`: its repeats, oldest first."""

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
    def place(self) -> str:
        """`2 GPUs`, `4 threads`, `2 x 1 thread`; `16 GPUs on 2 nodes`."""
        gpus, replicas, threads, nodes = (self.facts.get(key) for key in ("gpus", "replicas", "threads", "nodes"))
        on = f" on {nodes} nodes" if (nodes or 1) > 1 else ""
        if gpus:
            return f"{gpus} GPU" + "s" * (gpus > 1) + on
        words = f"{threads} thread" + "s" * (threads != 1) if threads else "CPU"
        return (f"{replicas} x {words}" if (replicas or 1) > 1 else words) + on

    @property
    def place_order(self) -> tuple[int, int, int]:
        gpus, replicas, threads = (self.facts.get(key) or 0 for key in ("gpus", "replicas", "threads"))
        return gpus, replicas, 0 if gpus else threads  # as `place` names them


def cells_of(runs: Iterable[TrackedRun]) -> list[Cell]:
    """The cells, in the order in which they were first run. Report runs are left out, and runs without numbers that were done again.

    A run that ended before its framework was asked for its version counts for the version of the others, where these have one.
    """
    found: dict[tuple[Any, ...], Cell] = {}
    measured = sorted((run for run in runs if run.tags.get("kind") != "report"), key=lambda run: run.start_ms)
    versions: dict[str, set[str]] = {}
    for run in measured:
        versions.setdefault(run.params["framework"], set()).update(filter(None, [run.params.get("framework_version")]))
    for run in measured:
        known = {**run.params, "nodes": run.tags.get("nodes", "1")}  # a tag; older runs have none
        if not known.get("framework_version") and len(versions[run.params["framework"]]) == 1:
            known["framework_version"] = min(versions[run.params["framework"]])
        facts = {key: _fact(key, known.get(key, "")) for key in IDENTITY}
        found.setdefault(tuple(facts.values()), Cell(facts)).runs.append(run)
    for cell in found.values():
        cell.runs = [run for number, run in enumerate(cell.runs) if not _done_again(run, cell.runs[number + 1 :])]
    return list(found.values())


def _done_again(run: TrackedRun, later: Iterable[TrackedRun]) -> bool:
    """Whether a run without numbers is followed by one of the same repeat."""
    return not _has_numbers(run) and any(other.params.get("repeat") == run.params.get("repeat") for other in later)


def _has_numbers(run: TrackedRun) -> bool:
    return run.tags.get("outcome") in PUBLISHED and "step_ms" in run.metrics


def _fact(key: str, text: str) -> Any:
    if key not in WHOLE:
        return text
    return int(text) if text.isdigit() else None


def varying(cells: Sequence[Cell], keys: Iterable[str]) -> list[str]:
    """Those of `keys` in which cells of the same framework, network and kind of device differ: what a row has to name beside these."""
    return [key for key in keys if _differs(cells, key, ("framework", "network", "device"))]


def naming(cells: Sequence[Cell], but: Iterable[str] = ()) -> Callable[[Cell], list[str]]:
    """What names of a cell the SETTINGS (all `but` some) in which these cells differ: `["bf16", "compile=on"]`."""
    keys = varying(cells, [key for key in SETTINGS if key not in but])
    return lambda cell: [SETTINGS[key].format(cell.facts[key]) for key in keys if cell.facts[key] not in ("", None)]


def of_networks(cells: Sequence[Cell], keys: Iterable[str]) -> list[str]:
    """Those of `keys` that tell nothing of a framework's rows, but differ from network to network: what a report says once."""
    return [key for key in keys if not _differs(cells, key, ("network",)) and _differs(cells, key, ())]


def _differs(cells: Sequence[Cell], key: str, within: Sequence[str]) -> bool:
    known: dict[tuple[Any, ...], set[Any]] = {}
    for cell in cells:
        known.setdefault(tuple(cell.facts[one] for one in within), set()).add(cell.facts[key])
    return any(len(values) > 1 for values in known.values())
