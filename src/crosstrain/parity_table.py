"""What was proven, kept as a file of the repository, and the table of framework × network that the README shows of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from crosstrain.certificates import Certificate, code_hash
from crosstrain.errors import ConfigError, OutcomeError

Row = dict[str, Any]
#: verdicts that need no second look
SETTLED = ("proven", "unsupported", "env_missing")


def row_of(framework: str, network: str, verdict: Certificate | OutcomeError) -> Row:
    """What is kept of one verdict. `framework`: with its settings, as the table names it."""
    row: Row = {"framework": framework, "network": network, "code": code_hash(framework.split(" ")[0])}
    if isinstance(verdict, OutcomeError):
        return {**row, "verdict": verdict.outcome, "words": verdict.message}
    proven = "proven" if verdict.proven else "FAILED"
    return {**row, "version": verdict.version, "verdict": proven, "reduced": bool(verdict.variant), "words": verdict.tag()}


def read(path: Path) -> list[Row]:
    """The kept rows; none where there is no file. Raises ConfigError when it can not be read."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(rows, list) and all({"framework", "network", "verdict", "words"} <= set(row) for row in rows)
        return rows
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"--record {path}: is no record of `crosstrain parity`") from error


def record(path: Path, row: Row) -> None:
    """Put one row into the file; it replaces what was known of this framework and network. Raises OSError."""
    rows = {(kept["framework"], kept["network"]): kept for kept in read(path)}
    rows[row["framework"], row["network"]] = row
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps([rows[key] for key in sorted(rows)], indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def is_current(path: Path, framework: str, network: str) -> bool:
    """Whether the file has a verdict, and no failure, of the worker's code as it is now."""
    code = code_hash(framework.split(" ")[0])
    wanted = (framework, network, code)
    return any((row["framework"], row["network"], row.get("code")) == wanted and row["verdict"] in SETTLED for row in read(path))


def markdown(rows: Iterable[Row]) -> str:
    """The table: a row for each network, a column for each framework; the reasons of what is not proven below it."""
    rows = list(rows)
    frameworks = sorted({row["framework"] for row in rows})
    versions = {row["framework"]: row["version"] for row in rows if row.get("version")}
    of = {(row["framework"], row["network"]): row for row in rows}
    # one number for the same words about one framework, however many networks they concern
    reasons: dict[tuple[str, str], int] = {}

    def cell(row: Row | None) -> str:
        if row is None:
            return ""
        if row["verdict"] == "proven":
            return "✓*" if row["reduced"] else "✓"
        number = reasons.setdefault((row["framework"], f"{row['verdict']}: {row['words']}"), len(reasons) + 1)
        return f"– ({number})"

    # settings (compile=on …) are named only where a framework is there with several
    short = {name: name.split(" ")[0] for name in frameworks}
    heads = {name: short[name] if list(short.values()).count(short[name]) == 1 else name for name in frameworks}
    lines = ["| network | " + " | ".join(f"{heads[name]} {versions.get(name, '')}".strip() for name in frameworks) + " |"]
    lines.append("|---|" + ":-:|" * len(frameworks))
    for network in sorted({row["network"] for row in rows}):
        lines.append(f"| {network} | " + " | ".join(cell(of.get((name, network))) for name in frameworks) + " |")
    legend = "✓ all levels proven · ✓* on a reduced variant of the network (names, shapes and counts: the full one's)"
    lines += ["", legend + (" · – not proven:" if reasons else ""), ""]
    lines += [f"{number}. {heads[framework]}: {words}" for (framework, words), number in reasons.items()]
    return "\n".join(lines).rstrip() + "\n"


BEGIN, END = "<!-- parity: written by `crosstrain parity --record`, do not edit -->\n", "<!-- /parity -->"


def put_into(page: Path, table: str) -> None:
    """Write the table between its two marks in a page. Raises ConfigError where they are missing."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"--page {page}: has no lines `{BEGIN.strip()}` and `{END}`")
    page.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")
