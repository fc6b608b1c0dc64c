"""The figures of a report. Colours, one for each framework: Okabe and Ito's palette (2008), which colour-blind readers tell apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from crosstrain.report.cells import Cell, naming

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("-", "--", ":", "-.")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vP*X"
#: more lines than this have their legend below the panel, more rows are left out of a figure
MOST_INSIDE, MOST_ROWS = 5, 120
#: (framework, network) → [(epoch, accuracy, seconds of training)]
Curves = Mapping[tuple[str, str], Sequence[tuple[float, float, float]]]


def figures_of(cells: Sequence[Cell], curves: Curves) -> dict[str, Figure]:
    """Every figure that the cells fill, by file name. `curves`: accuracy over epochs and time."""
    trained = [cell for cell in cells if cell.published]
    frameworks = sorted({cell.facts["framework"] for cell in trained})
    look = {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 5}
        for i, name in enumerate(frameworks)
    }
    made = {
        "time_by_batch": _by_batch(trained, look),
        "speedup": _speedup(trained, look),
        "accuracy": _accuracy(curves, look),
        "distribution": _distribution(trained, look),
        "memory": _memory(trained, look),
        "forward_and_gradient": _forward_and_gradient(trained, look),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def _grid(titles: Sequence[str], height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """A figure with one panel for each title, three in a row."""
    from matplotlib.figure import Figure

    columns = min(3, len(titles))
    lines = -(-len(titles) // columns)
    figure = Figure(figsize=(max(4.2, 3.6 * columns), height * lines + 0.5), dpi=110, layout="constrained")
    axes = np.atleast_1d(figure.subplots(lines, columns)).ravel()
    for axis, title in zip(axes, titles, strict=False):
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
    for axis in axes[len(titles) :]:
        axis.set_visible(False)
    return figure, list(axes[: len(titles)])


def _label(cell: Cell) -> str:
    return f"{cell.facts['framework']}, {cell.place}"


def _settings(cells: Sequence[Cell]) -> Callable[[Cell], list[str]]:
    """What names a cell beside its panel, label and batch."""
    return naming(cells, lambda cell: (_panel(cell), _label(cell), cell.facts["batch_global"]))


def _lines(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells of one line: the same framework, place and settings."""
    lines: dict[str, list[Cell]] = {}
    settings = _settings(cells)
    for cell in cells:
        lines.setdefault(" ".join([_label(cell), *settings(cell)]), []).append(cell)
    return dict(sorted(lines.items()))


def _by_name(cells: Sequence[Cell]) -> list[tuple[str, Cell]]:
    """The cells with names that tell them apart, those of a network and a framework together."""
    settings = _settings(cells)
    named = [(" ".join([_panel(cell), _label(cell), *settings(cell)]), cell) for cell in cells]
    named.sort(key=lambda one: (_panel(one[1]), one[1].facts["framework"], one[0], one[1].facts["batch_global"] or 0))
    return [(f"{name}, batch {cell.facts['batch_global']}", cell) for name, cell in named]


def _by_batch(cells: Sequence[Cell], look: Mapping[str, dict[str, Any]]) -> Figure | None:
    """Time per iteration over the batch size, a panel for each network and task."""
    panels: dict[str, list[Cell]] = {}
    for cell in cells:
        panels.setdefault(_panel(cell), []).append(cell)
    drawn = {title: _lines(own) for title, own in panels.items()}
    drawn = {title: lines for title, lines in drawn.items() if any(len(line) > 1 for line in lines.values())}
    if not drawn:
        return None
    most = max(len(lines) for lines in drawn.values())
    figure, axes = _grid(list(drawn), height=2.9 + 0.08 * most * (most > MOST_INSIDE))
    for axis, lines in zip(axes, drawn.values(), strict=True):
        styles = _told_apart(list(lines), look)
        for (label, line), style in zip(lines.items(), styles, strict=True):
            line.sort(key=lambda cell: cell.facts["batch_global"] or 0)
            axis.plot(_batches(line), [cell.value("step_ms") or 0.0 for cell in line], label=label, linewidth=1.2, **style)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            formatter("{x:g}")
        axis.tick_params(which="minor", labelsize=7)
        axis.set_xlabel("batch size", fontsize=8)
        axis.set_ylabel("ms per iteration", fontsize=8)
        ticks = sorted({batch for line in lines.values() for batch in _batches(line) if batch})
        axis.set_xticks(ticks, [str(t) for t in ticks])
        if len(lines) > MOST_INSIDE:
            axis.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
        else:
            axis.legend(fontsize=7)
    return figure


def _told_apart(names: Sequence[str], look: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """How lines whose names begin `framework, ` are drawn: those of one framework in its colour, with markers and dashes of their own."""
    seen: dict[str, int] = {}
    styles = []
    for name in names:
        own = look.get(name.split(",")[0], {"color": "black", "marker": MARKERS[0], "markersize": 5})
        number = seen[own["color"]] = seen.get(own["color"], -1) + 1
        marker = MARKERS[(MARKERS.index(own["marker"]) + number) % len(MARKERS)]  # a line may be one point
        dashes = STYLES[(number + number // len(MARKERS)) % len(STYLES)]
        styles.append({**own, "marker": marker, "linestyle": dashes})
    return styles


def _panel(cell: Cell) -> str:
    task = cell.facts["task"]
    return cell.facts["network"] + (f", {task}" if task != "training" else "")


def _batches(line: Sequence[Cell]) -> list[int]:
    return [cell.facts["batch_global"] or 0 for cell in line]


def _speedup(cells: Sequence[Cell], look: Mapping[str, dict[str, Any]]) -> Figure | None:
    """Speed-up over devices, with the ideal line, a panel for each network."""
    scaled = [cell for cell in cells if cell.value("speedup") is not None]
    networks = sorted({_panel(cell) for cell in scaled if (cell.facts["replicas"] or 1) > 1})
    if not networks:
        return None
    figure, axes = _grid(networks)
    for axis, network in zip(axes, networks, strict=True):
        own = [cell for cell in scaled if _panel(cell) == network]
        most = max(cell.facts["replicas"] or 1 for cell in own)
        axis.plot([1, most], [1, most], "--", color="0.6", linewidth=1, label="ideal")
        lines = _speedup_lines([cell for cell in own if (cell.facts["replicas"] or 1) > 1])
        for (label, line), style in zip(lines.items(), _told_apart(list(lines), look), strict=True):
            # one device has the speed-up 1
            points = {1: 1.0} | {cell.facts["replicas"] or 1: cell.value("speedup") or 0.0 for cell in line}
            x = sorted(points)
            axis.plot(x, [points[n] for n in x], label=label.replace(",", "", 1), linewidth=1.2, **style)
        axis.set_xticks(range(1, most + 1) if most <= 8 else sorted({cell.facts["replicas"] or 1 for cell in own}))
        axis.set_xlabel("devices", fontsize=8)
        axis.set_ylabel("speed-up", fontsize=8)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    return figure


def _speedup_lines(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells of one line: the same but for the number of devices. The batch is that of a replica where that stays the same."""

    def batch(cell: Cell) -> int:
        return cell.facts["batch_per_replica" if cell.facts["scaling"] == "weak" else "batch_global"] or 0

    def way(cell: Cell) -> list[str]:
        through, kind = cell.facts["parallelism"], cell.facts["scaling"]
        return [through] * (through != "native") + [kind] * (kind == "weak") + [f"batch {batch(cell)}"] * several

    several = len({batch(cell) for cell in cells}) > 1
    settings = naming(cells, lambda cell: (cell.facts["framework"], *way(cell), cell.facts["replicas"]), but=("parallelism", "scaling"))
    lines: dict[str, list[Cell]] = {}
    for cell in cells:
        more = [*way(cell), *settings(cell)]
        lines.setdefault(f"{cell.facts['framework']}{',' * bool(more)} {' '.join(more)}".strip(), []).append(cell)
    return dict(sorted(lines.items()))


def _accuracy(curves: Curves, look: Mapping[str, dict[str, Any]]) -> Figure | None:
    """Test accuracy over training time and over epochs, two panels for each network."""
    networks = sorted({network for _, network in curves})
    if not networks:
        return None
    figure, axes = _grid([f"{network} over {what}" for network in networks for what in ("time", "epochs")])
    for index, network in enumerate(networks):
        by_time, by_epoch = axes[2 * index : 2 * index + 2]
        own = {name: points for (name, of), points in sorted(curves.items()) if of == network}
        for (name, points), style in zip(own.items(), _told_apart(list(own), look), strict=True):
            epochs, accuracy, seconds = zip(*points, strict=True)
            by_time.plot(seconds, [100 * a for a in accuracy], label=name, linewidth=1.2, **style)
            by_epoch.plot(epochs, [100 * a for a in accuracy], label=name, linewidth=1.2, **style)
        by_time.set_xlabel("seconds of training", fontsize=8)
        by_epoch.set_xlabel("epoch", fontsize=8)
        for axis in (by_time, by_epoch):
            axis.set_ylabel("test accuracy, %", fontsize=8)
            axis.legend(fontsize=7)
    return figure


def _distribution(cells: Sequence[Cell], look: Mapping[str, dict[str, Any]]) -> Figure | None:
    """Time of single iterations: median, the middle 90 % and the 99 % of each cell, in units of its median."""
    known = [cell for cell in cells if cell.value("step_ms_p5") is not None and cell.value("step_sync_ms")]
    if not known:
        return None
    title = "single iterations: 5 % to 95 % (thick), to 99 % (thin), in units of the cell's median"
    figure, axis, rows = _rows(known, title, "time / median")
    for row, cell in enumerate(rows):
        middle = cell.value("step_sync_ms") or 1.0
        low, high, most = ((cell.value(f"step_ms_p{p}") or middle) / middle for p in (5, 95, 99))
        colour = look[cell.facts["framework"]]["color"]
        axis.plot([low, high], [row, row], color=colour, linewidth=5, solid_capstyle="butt")
        axis.plot([high, most], [row, row], color=colour, linewidth=1)
        axis.plot([1], [row], "|", color="white", markersize=8)
    return figure


def _rows(cells: Sequence[Cell], title: str, words: str) -> tuple[Figure, Axes, list[Cell]]:
    """A figure with a named row for each cell, and the cells from the lowest row up. It says how many it has no room for."""
    named = _by_name(cells)
    shown = list(reversed(named[:MOST_ROWS]))
    figure, (axis,) = _grid([""], height=0.2 * len(shown) + 0.9)
    figure.set_figwidth(8)
    left_out = f"\n(the first {len(shown)} of {len(named)} cells)" if len(named) > len(shown) else ""
    axis.set_title(title + left_out, fontsize=9)
    axis.set_yticks(range(len(shown)), [name for name, _ in shown], fontsize=7)
    axis.set_ylim(-0.7, len(shown) - 0.3)
    axis.set_xlabel(words, fontsize=8)
    return figure, axis, [cell for _, cell in shown]


def _memory(cells: Sequence[Cell], look: Mapping[str, dict[str, Any]]) -> Figure | None:
    return _bars(cells, look, "device_memory_mb", "memory on the device, MB", "memory: GPUs: rise on the device; CPU: resident memory")


def _bars(cells: Sequence[Cell], look: Mapping[str, dict[str, Any]], metric: str, words: str, title: str) -> Figure | None:
    known = [cell for cell in cells if cell.value(metric)]
    if not known:
        return None
    figure, axis, rows = _rows(known, title, words)
    axis.barh(range(len(rows)), [cell.value(metric) or 0 for cell in rows], color=[look[cell.facts["framework"]]["color"] for cell in rows])
    return figure


def _forward_and_gradient(cells: Sequence[Cell], look: Mapping[str, dict[str, Any]]) -> Figure | None:
    """The time of a forward pass and of the gradients (which holds a forward pass), side by side, a panel for each network."""
    pairs: dict[str, dict[str, dict[str, float]]] = {}
    settings = _settings(cells)
    for cell in cells:
        name = " ".join([f"{_label(cell)}, batch {cell.facts['batch_global']}", *settings(cell)])
        pairs.setdefault(cell.facts["network"], {}).setdefault(name, {})[cell.facts["task"]] = cell.value("step_ms") or 0.0
    pairs = {network: {k: v for k, v in own.items() if {"forward", "gradient"} <= set(v)} for network, own in pairs.items()}
    pairs = {network: own for network, own in pairs.items() if own}
    if not pairs:
        return None
    most = max(len(own) for own in pairs.values())
    figure, axes = _grid(list(pairs), height=0.35 * most + 1.2)
    for axis, own in zip(axes, pairs.values(), strict=True):
        names = list(reversed(own))
        for offset, task, alpha in ((0.2, "forward", 0.55), (-0.2, "gradient", 1.0)):
            colours = [look[name.split(",")[0]]["color"] for name in names]
            bars = axis.barh([y + offset for y in range(len(names))], [own[n][task] for n in names], 0.38, color=colours, alpha=alpha)
            axis.bar_label(bars, [f" {task}"] * len(names), fontsize=6)
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.margins(x=0.2)
        axis.set_xlabel("ms", fontsize=8)
    return figure
