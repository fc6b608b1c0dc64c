"""A report as files in a folder: Markdown, HTML (all in one file), each table as CSV and LaTeX, each figure as PNG and SVG."""

from __future__ import annotations

import base64
import html
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from crosstrain.report import figures, formats, published, tables
from crosstrain.report.cells import SETTINGS, Cell, cells_of, measured, naming, of_networks
from crosstrain.report.tables import Table
from crosstrain.tracking.store import TrackedRun, Tracker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: most runs whose accuracy over time is asked of the store, one question each
MOST_CURVES = 40
CAPTIONS = {
    "time_by_batch": "Time per iteration over the batch size",
    "speedup": "Speed-up over devices; dashed: ideal",
    "accuracy": "Test accuracy over training time (evaluation left out) and over epochs",
    "distribution": "How single iterations are spread (one sync each)",
    "memory": "Memory",
    "forward_and_gradient": "Forward pass and gradients",
}
MADE_BY = "made by crosstrain"
STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:.6em 0}th,td{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}"
    "tbody th,thead th{text-align:left;font-weight:normal}thead th{border-bottom:2px solid #888;font-weight:600}"
    "td.best{font-weight:700}td.none{color:#999}img{max-width:100%}ul{color:#555;font-size:13px}"
)


@dataclass(frozen=True)
class Report:
    """What a report is made of."""

    title: str
    facts: list[str]
    cells: list[Cell]
    tables: list[Table]
    figures: dict[str, Figure]


def of_runs(title: str, runs: Sequence[TrackedRun], tracker: Tracker | None) -> Report:
    """The report of these runs. `tracker`: asked for accuracy over time; None leaves that figure out."""
    cells = cells_of(runs)
    made = tables.tables_of(cells)
    studies = sorted({run.tags["study"] for run in runs if run.tags.get("study")})
    for study in studies:
        own = [cell for cell in cells if any(r.tags.get("study") == study for r in cell.runs)]
        if published.has(study):
            made += filter(None, [published.pretraining_of(own, study), published.table_of(own, study)])
    return Report(title, _facts(runs, cells, studies), cells, made, figures.figures_of(cells, _curves(cells, tracker)))


def _facts(runs: Sequence[TrackedRun], cells: Sequence[Cell], studies: Sequence[str]) -> list[str]:
    """What holds for all of it: machine, versions, commit, how the cells ended."""
    ours = measured(runs)

    def known(key: str, tags: bool = False) -> str:
        return ", ".join(sorted({value for run in ours if (value := (run.tags if tags else run.params).get(key))}))

    frameworks = sorted({f"{c.facts['framework']} {c.facts['framework_version']}" for c in cells if c.facts["framework_version"]})
    ended = Counter(cell.outcome for cell in cells).most_common()
    lines = [
        f"{len(ours)} runs of {len(cells)} cells: {', '.join(f'{number} {outcome}' for outcome, number in ended)}",
        f"device: {known('device_name') or 'not known'}; host: {known('host', tags=True) or 'not known'}",
        f"frameworks: {', '.join(frameworks) or 'not known'}",
        f"sweep: {known('sweep', tags=True)}; crosstrain commit: {known('crosstrain_commit', tags=True) or 'not known'}",
    ]
    if varied := of_networks(cells, SETTINGS):
        told: dict[str, dict[str, str]] = {}  # by network
        for cell, key in itertools.product(cells, varied):
            if cell.facts[key] not in ("", None):
                told.setdefault(cell.facts["network"], {}).setdefault(key, SETTINGS[key].format(cell.facts[key]))
        settings = {network: ", ".join(words[key] for key in varied if key in words) for network, words in told.items()}
        lines.append(f"settings: {'; '.join(f'{network}: {words}' for network, words in settings.items() if words)}")
    if studies:
        lines.append(f"study: {', '.join(studies)}; effort: {known('effort')}")
        replaced = sorted({words for cell in cells if (words := published.substitute(cell))})
        lines += [f"substitute data, not comparable with the study: {'; '.join(replaced)}"] if replaced else []
    if again := len(ours) - sum(len(cell.runs) for cell in cells):
        lines.append(f"{again} runs without numbers were done again and are left out")
    if (trained := len(_trained(cells))) > MOST_CURVES:
        lines.append(f"accuracy over time: the first {MOST_CURVES} of {trained} cells")
    unproven = sorted({f"{run.params['framework']} {run.params['network']}" for run in ours
                       if run.tags.get("outcome") == "ok" and not run.tags.get("parity", "").startswith("proven")})  # fmt: skip
    if unproven:
        lines.append(f"not proven equal to the network as written (crosstrain parity proves it): {', '.join(unproven)}")
    return lines


def _trained(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.value("accuracy") is not None and cell.facts["epochs"]]


def _curves(cells: Sequence[Cell], tracker: Tracker | None) -> dict[tuple[str, str], list[tuple[float, float, float]]]:
    """Test accuracy of each trained cell's first repeat: (epoch, accuracy, seconds since training began)."""
    trained = _trained(cells)
    settings = naming(trained, lambda cell: (cell.facts["network"], cell.facts["framework"], cell.place))
    if tracker is None:
        return {}
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for cell in trained[:MOST_CURVES]:
        points = tracker.accuracy_over_time(cell.published[0].run_id)
        if points:
            found[", ".join([cell.facts["framework"], cell.place, *settings(cell)]), cell.facts["network"]] = points
    return found


def write(report: Report, folder: Path) -> list[Path]:
    """Write all files of the report; what an older one had more of goes. Returns them, report.md and report.html first."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    older = set(_parts(folder)) if page.is_file() and MADE_BY in page.read_text(encoding="utf-8", errors="replace") else set()
    files = []
    for number, table in enumerate(report.tables, 1):
        stem = f"table{number:02d}"
        for suffix, text in ((".csv", formats.as_csv(table)), (".tex", formats.latex(table))):
            files.append(_text(folder / f"{stem}{suffix}", text))
    for name, figure in report.figures.items():
        for suffix in (".png", ".svg"):
            figure.savefig(folder / f"{name}{suffix}")
            files.append(folder / f"{name}{suffix}")
    pages = [_text(folder / "report.md", as_markdown(report)), _text(page, as_html(report, folder))]
    for path in older - set(files):
        path.unlink()
    return [*pages, *files]


def _parts(folder: Path) -> list[Path]:
    """What a report may have beside its pages."""
    kinds = {"table[0-9][0-9]": (".csv", ".tex"), **dict.fromkeys(CAPTIONS, (".png", ".svg"))}
    return [path for stem, suffixes in kinds.items() for suffix in suffixes for path in folder.glob(stem + suffix)]


def _text(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def as_markdown(report: Report) -> str:
    parts = [f"# {report.title}", "\n".join(f"- {fact}" for fact in report.facts)]
    parts += [formats.markdown(table) for table in report.tables]
    parts += [f"### {CAPTIONS[name]}\n\n![{CAPTIONS[name]}]({name}.png)\n" for name in report.figures]
    return "\n\n".join([*parts, failures(report)]).rstrip() + "\n"


def failures(report: Report) -> str:
    """Each cell without numbers, with its reason."""
    failed = [cell for cell in report.cells if not cell.published]
    lines = [f"- {c.facts['network']} {c.facts['framework']}, {c.place}: {c.outcome}: {c.reason}" for c in failed]
    return "### Cells without numbers\n\n" + "\n".join(dict.fromkeys(lines)) if lines else ""


def as_html(report: Report, folder: Path) -> str:
    """One file that needs nothing else: the pictures are inside."""
    title = html.escape(report.title)
    parts = [f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{title}</title><style>{STYLE}</style></head>"]
    parts.append(f"<body><h1>{title}</h1>")
    parts.append("<ul>" + "".join(f"<li>{html.escape(fact)}</li>" for fact in report.facts) + "</ul>")
    parts += [formats.as_html(table) for table in report.tables]
    for name in report.figures:
        picture = base64.b64encode((folder / f"{name}.png").read_bytes()).decode()
        parts.append(f"<h3>{CAPTIONS[name]}</h3><img alt='{CAPTIONS[name]}' src='data:image/png;base64,{picture}'>")
    failed = failures(report)
    if failed:
        lines = [line.removeprefix("- ") for line in failed.splitlines()[2:]]
        parts.append("<h3>Cells without numbers</h3><ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>")
    parts.append(f"<p>{MADE_BY}, {time.strftime('%Y-%m-%d %H:%M')}</p></body></html>")
    return "\n".join(parts)
