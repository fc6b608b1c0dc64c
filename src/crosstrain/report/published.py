"""Numbers that the three studies, or independent re-runs of them, have published: with their hardware and source (published.csv)."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crosstrain.progress import number
from crosstrain.report.cells import Cell, naming
from crosstrain.report.tables import Entry, Table

FILE = Path(__file__).with_name("published.csv")
NONE = "no published number on file"
#: what Shi et al. trained these networks on; other real data is a substitute, whose numbers never stand beside published ones
TRAINED_ON = {"fcn_r": "mnist", "alexnet_r": "cifar10", "resnet56": "cifar10", "lstm_ptb": "ptb"}
STAGES = ("ae1", "ae2", "ae3")


def read() -> list[dict[str, str]]:
    """Rows of published.csv; step_ms in milliseconds per iteration."""
    with open(FILE, encoding="utf-8", newline="") as source:
        return list(csv.DictReader(source))


def has(study: str) -> bool:
    """Whether a study's authors, or others after them, have published any number."""
    return any(row["study"] == study.split("_")[0] for row in read())


def substitute(cell: Cell) -> str:
    """What this cell's data stands for, in words; "" where it is the study's own, or synthetic."""
    network, data = cell.facts["network"].split(" ")[0], cell.facts["data"]
    wanted = TRAINED_ON.get(network, data)
    return "" if data in (wanted, "synthetic") else f"{network}: {data} instead of {wanted}"


def table_of(cells: Sequence[Cell], study: str) -> Table:
    """Ours beside theirs, for each cell of a study's sweep: network, task and batch size must be the same, the framework by its name.

    A number of other frameworks on the same network is a row, too: half of them can not be run any more.
    """
    rows: list[tuple[list[str], list[Entry]]] = []
    groups: dict[tuple[str, str, int], list[Cell]] = {}
    settings = naming(cells, lambda cell: tuple(cell.facts[key] for key in ("network", "task", "batch_global", "framework")))
    for cell in cells:
        groups.setdefault((cell.facts["network"], cell.facts["task"], cell.facts["batch_global"] or 0), []).append(cell)
    for (network, task, batch), ours in groups.items():
        known = [row for row in read() if _is(row, study, network, task, batch)]
        names = [network, task, str(batch)]
        for cell in ours:
            value = cell.value("step_ms")
            text = " ".join([*([number(value)] if value is not None else []), *([cell.outcome] if cell.outcome != "ok" else [])])
            where = f"{cell.facts['device_name'] or cell.facts['device']}, {cell.place}"
            own = [row for row in known if row["framework"].split(" ")[0] in (cell.facts["framework"], cell.facts["framework"] + "7")]
            theirs = "; ".join(f"{row['step_ms']} ({row['hardware']})" for row in own) or NONE
            if substitute(cell):
                theirs = f"not compared: {substitute(cell)}"
            rows.append(([*names, " ".join([cell.facts["framework"], *settings(cell)])], [Entry(text), Entry(where), Entry(theirs)]))
        ran = {cell.facts["framework"] for cell in ours} | {f"{cell.facts['framework']}7" for cell in ours}
        for row in known:
            if row["framework"].split(" ")[0] not in ran:
                theirs = f"{row['step_ms']} ({row['hardware']})"
                rows.append(([*names, row["framework"]], [Entry(""), Entry("not run here"), Entry(theirs)]))
    notes = [f"source: {source}" for source in sorted({row["source"] for row in read() if row["study"] == study.split("_")[0]})]
    heads, columns = ["network", "task", "batch", "framework"], ["ours, ms", "on", "published, ms"]
    return Table("Published numbers beside ours", heads, columns, rows, notes)


def pretraining_of(cells: Sequence[Cell], study: str) -> Table | None:
    """The stacked autoencoders' pre-training: the sum of its three stages' gradients, ours beside theirs. None without whole sums."""
    groups: dict[tuple[Any, ...], dict[str, Cell]] = {}
    for cell in cells:
        network, _, stage = cell.facts["network"].partition(" stage=")
        if stage in STAGES and cell.facts["task"] == "gradient" and cell.value("step_ms") is not None:
            groups.setdefault(tuple({**cell.facts, "network": network}.values()), {})[stage] = cell
    whole = [stages for stages in groups.values() if len(stages) == len(STAGES)]
    settings = naming([cell for stages in whole for cell in stages.values()], lambda cell: (cell.facts["network"], cell.place))
    rows: list[tuple[list[str], list[Entry]]] = []
    for stages in whole:
        first = stages[STAGES[0]]
        network, framework = first.facts["network"].partition(" stage=")[0], first.facts["framework"]
        batch = first.facts["batch_global"] or 0
        known = [row for stage in STAGES for row in read() if _is(row, study, f"{network} stage={stage}", "gradient", batch)]
        own = [row for row in known if row["framework"] in (framework, framework + "7")]
        total = sum(float(row["step_ms"]) for row in own)
        theirs = f"{total:.1f} ({own[0]['hardware']})" if len(own) == len(STAGES) else NONE
        ours = number(sum(cell.value("step_ms") or 0.0 for cell in stages.values()))
        flags = sorted({cell.outcome for cell in stages.values()} - {"ok"})
        names = [network, str(batch), " ".join([framework, *settings(first)])]
        rows.append((names, [Entry(" ".join([ours, *flags])), Entry(first.place), Entry(theirs)]))
    heads, columns = ["network", "batch", "framework"], ["ours, ms", "on", "published, ms"]
    return Table("Pre-training, the sum of its three stages", heads, columns, rows) if rows else None


def _is(row: dict[str, str], study: str, network: str, task: str, batch: int) -> bool:
    wanted = (study.split("_")[0], network, task, str(batch))
    return (row["study"], row["network"], row["task"], row["batch_global"]) == wanted
