"""The README's table of what is proven: kept as JSON by `crosstrain parity --record`, never written by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from crosstrain import parity_table, paths
from crosstrain.errors import ConfigError, OutcomeError

RECORD, README = ROOT / "docs" / "parity.json", ROOT / "README.md"


def test_the_readme_s_table_is_the_record_s() -> None:
    table = README.read_text().partition(parity_table.BEGIN)[2].partition(parity_table.END)[0]
    assert table and table == parity_table.markdown(parity_table.read(RECORD))


def test_every_framework_and_network_is_in_it_and_none_failed() -> None:
    rows = parity_table.read(RECORD)
    frameworks = {path.stem for path in (paths.conf_dir() / "framework").glob("*.yaml") if not path.stem.startswith("fake")}
    networks = {path.stem for path in (paths.conf_dir() / "network").glob("*.yaml")}
    assert {(row["framework"].split(" ")[0], row["network"]) for row in rows} == {(f, n) for f in frameworks for n in networks}
    wrong = [row for row in rows if row["verdict"] not in ("proven", "unsupported", "env_missing")]
    assert wrong == []


def test_a_reason_is_told_once_and_a_newer_verdict_replaces_the_old(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    refusal = OutcomeError("unsupported", "no attention", "")
    for network in ("vit_b16", "gpt2_small", "vit_b16"):
        parity_table.record(path, parity_table.row_of("theano", network, refusal))
    parity_table.record(path, parity_table.row_of("caffe", "vit_b16", refusal))
    table = parity_table.markdown(parity_table.read(path))
    assert "| gpt2_small |  | – (1) |" in table and "| vit_b16 | – (2) | – (1) |" in table
    assert table.endswith("1. theano: unsupported: no attention\n2. caffe: unsupported: no attention\n")


def test_a_page_without_marks_and_a_file_that_is_no_record_are_told(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="has no lines"):
        parity_table.put_into(page, "table\n")
    page.write_text(f"# a\n{parity_table.BEGIN}old\n{parity_table.END}\nb\n")
    parity_table.put_into(page, "new\n")
    assert page.read_text() == f"# a\n{parity_table.BEGIN}new\n{parity_table.END}\nb\n"
    done = subprocess.run(
        [sys.executable, "-m", "crosstrain.cli", "parity", "framework=fake", "network=lenet", "--record", str(page)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, f"error: --record {page}: is no record of `crosstrain parity`\n")


def test_what_comes_out_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    subprocess.run(
        [sys.executable, "-m", "crosstrain.cli", "parity", "framework=fake", "network=lenet", "--record", str(path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    (row,) = json.loads(path.read_text())
    assert (row["framework"], row["network"]) == ("fake", "lenet") and row["verdict"] in ("FAILED", "crashed")
