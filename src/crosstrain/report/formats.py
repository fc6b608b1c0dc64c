"""A table as Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import html
import io

from crosstrain.report.tables import Entry, Table

LATEX = str.maketrans({"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
                       "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "→": r"$\to$", "×": r"$\times$"})  # fmt: skip


def markdown(table: Table) -> str:
    def cell(entry: Entry) -> str:
        text = entry.text.replace("|", "\\|")
        return f"**{text}**" if entry.best and text else text

    def row(texts: list[str]) -> str:
        return "| " + " | ".join(texts) + " |"

    lines = [row([*table.heads, *table.columns]), "|" + "---|" * len(table.heads) + "--:|" * len(table.columns)]
    lines += [row([*(name.replace("|", "\\|") for name in names), *map(cell, entries)]) for names, entries in table.rows]
    notes = [f"- {note}" for note in table.notes]
    return "\n".join([f"### {table.title}", "", *lines, *([""] if notes else []), *notes]) + "\n"


def as_csv(table: Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*table.heads, *table.columns])
    writer.writerows([*names, *(entry.text for entry in entries)] for names, entries in table.rows)
    return out.getvalue()


def latex(table: Table) -> str:
    """A table of the package booktabs."""

    def cell(entry: Entry) -> str:
        text = entry.text.translate(LATEX)
        return rf"\textbf{{{text}}}" if entry.best and text else text

    def row(texts: list[str]) -> str:
        return " & ".join(texts) + r" \\"

    lines = [r"\begin{table}", r"\centering", rf"\caption{{{table.title.translate(LATEX)}}}"]
    lines += [rf"\begin{{tabular}}{{{'l' * len(table.heads)}{'r' * len(table.columns)}}}", r"\toprule"]
    lines += [row([text.translate(LATEX) for text in [*table.heads, *table.columns]]), r"\midrule"]
    lines += [row([*(name.translate(LATEX) for name in names), *map(cell, entries)]) for names, entries in table.rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def as_html(table: Table) -> str:
    def cell(entry: Entry) -> str:
        kind = ' class="best"' if entry.best else "" if any(c.isdigit() for c in entry.text) else ' class="none"'
        return f"<td{kind}>{html.escape(entry.text)}</td>"

    head = "".join(f"<th>{html.escape(text)}</th>" for text in [*table.heads, *table.columns])
    body = "".join(
        "<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in names) + "".join(map(cell, entries)) + "</tr>\n"
        for names, entries in table.rows
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    return (
        f"<h3>{html.escape(table.title)}</h3>\n<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>\n"
        + (f"<ul>{notes}</ul>\n" if notes else "")
    )  # fmt: skip
