"""The report of a sweep: its tables, figures, formats, the run in the store; through the front door and from a made-up store."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import QUICK, Train, store
from crosstrain import cli, publish
from crosstrain.report import build, figures, formats, published, tables
from crosstrain.report.cells import cells_of
from crosstrain.tracking import Tracker
from crosstrain.tracking.store import TrackedRun
from stores import PARAMS, new_store, put


def crosstrain(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "crosstrain.cli", *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Tracker:
    """Sweeps `repeats`, `scaled`, `batches`, `tasks` and `trained`."""
    tracker = new_store(tmp_path_factory.mktemp("filled"))
    for repeat in range(1, 6):
        put(tracker, "repeats", 10.0 + 0.01 * repeat, repeat=repeat, framework="torch")
        put(tracker, "repeats", 10.0 + 0.011 * repeat, repeat=repeat, framework="mxnet")
        put(tracker, "repeats", 20.0 + 0.01 * repeat, repeat=repeat, framework="jax")
    put(tracker, "repeats", 5.0, "contaminated", "others used 30 % of the leased CPUs", framework="fake")
    put(tracker, "repeats", None, "unsupported", "caffe has no attention", framework="caffe")
    for replicas, step_ms in ((1, 40.0), (2, 25.0), (4, 20.0)):
        speedup = 40 / step_ms
        put(tracker, "scaled", step_ms, replicas=replicas, metrics={"speedup": speedup, "efficiency": speedup / replicas})
    for framework, factor in (("torch", 1.0), ("mxnet", 1.5)):
        for batch in (8, 16, 32):
            put(tracker, "batches", factor * batch, framework=framework, batch_global=batch, batch_per_replica=batch, network="vgg_a")
    for task, step_ms in (("forward", 3.0), ("gradient", 9.0)):
        put(tracker, "tasks", step_ms, task=task, batch_global=64, study="bahrampour2016_lenet")
    put(tracker, "trained", 10.0, epochs=3, accuracies=[0.5, 0.7, 0.9])
    return tracker


Shared = tuple[Tracker, str]


@pytest.fixture(scope="module")
def one_store(tmp_path_factory: pytest.TempPathFactory) -> Tracker:
    return new_store(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def shared(one_store: Tracker, request: pytest.FixtureRequest) -> Shared:
    """(a store, the name of a sweep that is this test's alone): making a store takes seconds."""
    return one_store, request.node.name


def report_of(tracker: Tracker, sweep: str) -> build.Report:
    return build.of_runs(f"Sweep {sweep}", tracker.runs_of_sweep(sweep), tracker)


def rows_of(table: tables.Table) -> dict[str, list[tuple[str, bool]]]:
    """By the framework's name."""
    return {names[-1]: [(entry.text, entry.best) for entry in entries] for names, entries in table.rows}


def test_repeats_are_one_cell_and_what_is_not_separated_is_best_together(filled: Tracker) -> None:
    table = report_of(filled, "repeats").tables[0]
    assert table.columns == ["1 thread"]
    found = rows_of(table)
    assert found["torch"] == [("10.03", True)] and found["mxnet"] == [("10.03", True)]
    assert found["jax"] == [("20.03", False)]
    assert found["fake"] == [("5 (contaminated)", False)], "flagged is never best"
    assert found["caffe"] == [("unsupported", False)]
    assert any("no difference shown between" in note and "torch" in note and "mxnet" in note for note in table.notes)
    assert any("others used 30 %" in note for note in table.notes)


def test_without_enough_repeats_bold_is_said_to_be_untested(filled: Tracker) -> None:
    table = report_of(filled, "batches").tables[0]
    assert table.columns == ["batch 8", "batch 16", "batch 32"]
    assert rows_of(table) == {"torch": [("8", True), ("16", True), ("32", True)], "mxnet": [("12", False), ("24", False), ("48", False)]}
    assert any("not tested" in note for note in table.notes)


def test_places_are_columns_and_scaling_has_its_tables_and_figure(filled: Tracker) -> None:
    report = report_of(filled, "scaled")
    titles = {table.title.partition(": ")[2]: table for table in report.tables}
    efficiency = titles["efficiency (speed-up / devices)"]
    assert efficiency.columns == ["1 thread", "2 x 1 thread", "4 x 1 thread"]
    assert [text for text, _ in rows_of(efficiency)["torch"]] == ["100 %", "80 %", "50 %"]
    assert "speedup" in report.figures
    lines = {line.get_label(): line.get_xydata().tolist() for line in report.figures["speedup"].axes[0].get_lines()}
    assert lines["ideal"] == [[1, 1], [4, 4]] and lines["torch"] == [[1, 1], [2, 1.6], [4, 2]]


def test_each_figure_appears_where_there_is_something_to_show(filled: Tracker) -> None:
    shown = {sweep: set(report_of(filled, sweep).figures) - {"distribution", "memory"}
             for sweep in ("repeats", "scaled", "batches", "tasks", "trained")}  # fmt: skip
    assert shown == {"repeats": set(), "scaled": {"speedup"}, "batches": {"time_by_batch"}, "tasks": {"forward_and_gradient"},
                     "trained": {"accuracy"}}  # fmt: skip


def test_accuracy_is_drawn_over_training_time_and_epochs(filled: Tracker) -> None:
    time, epochs = report_of(filled, "trained").figures["accuracy"].axes
    assert time.get_lines()[0].get_xydata().tolist() == [[2, 50], [4, 70], [6, 90]]
    assert epochs.get_lines()[0].get_xydata().tolist() == [[1, 50], [2, 70], [3, 90]]


def test_published_numbers_stand_beside_ours(filled: Tracker) -> None:
    table = report_of(filled, "tasks").tables[-1]
    found = {(names[1], names[3]): [entry.text for entry in entries] for names, entries in table.rows}
    assert found["forward", "torch"] == ["3", "some CPU, 1 thread", "0.5 (Tesla M40, cuDNN 4)"]
    assert found["gradient", "theano"] == ["", "not run here", "1.6 (Tesla M40, cuDNN 4)"]
    assert any("DL-Benchmarks" in note for note in table.notes)
    other = published.table_of(cells_of(filled.runs_of_sweep("trained")), "bahrampour2016_lenet")
    assert other.rows[0][1][2].text == published.NONE, "training with the update is not what the study has measured"


#: of two choices that differ in one thing alone, each has its own row and its own point
TOLD_APART = {
    "precision": ("fp32", "bf16"),
    "framework_settings": ("", "lstm=scan"),
    "device_name": ("some GPU", "another GPU"),
    "compile": ("off", "on"),
    "data_placement": ("host", "device"),
    "target_accuracy": ("", "0.9"),
    "threads": (4, 16),
}


@pytest.mark.parametrize("key", TOLD_APART)
def test_cells_that_differ_in_anything_are_never_one(key: str, shared: Shared) -> None:
    """In every table and figure both are there, with names and lines of their own. On GPUs: on the CPU threads are a place."""
    tracker, sweep = shared
    gpu = {"device": "gpu", "device_name": "some GPU", "gpus": 1}
    for step_ms, value in zip((10.0, 30.0), TOLD_APART[key], strict=True):
        put(tracker, sweep, step_ms, framework="jax", accuracies=[0.5], **{**gpu, "epochs": 1, key: value})
        for replicas in (1, 2):
            facts = {**gpu, "gpus": replicas, "replicas": replicas, "network": "vgg_a", key: value}
            put(tracker, sweep, step_ms / replicas, metrics={"speedup": replicas - step_ms / 100}, **facts)
        for batch in (8, 16):
            put(tracker, sweep, step_ms * batch, **{**gpu, "network": "overfeat", "batch_global": batch, key: value})
    report = report_of(tracker, sweep)
    times = [(names[-1], entry.text) for names, entries in report.tables[0].rows if names[0] == "lenet" for entry in entries if entry.text]
    assert sorted(time for _, time in times) == ["10", "30"]
    assert len({name for name, _ in times}) == 2
    for figure in ("memory", "distribution"):
        (axis,) = report.figures[figure].axes
        names = [label.get_text() for label in axis.get_yticklabels()]
        assert len(set(names)) == len(names) == 10
    for figure, count in (("speedup", 3), ("accuracy", 2)):  # of the speed-up the ideal, too
        drawn = report.figures[figure].axes[0].get_lines()
        assert len({(line.get_marker(), line.get_linestyle()) for line in drawn}) == len({line.get_label() for line in drawn}) == count
    (batches,) = (axis for axis in report.figures["time_by_batch"].axes if axis.get_title() == "overfeat")
    assert sorted(line.get_ydata().tolist() for line in batches.get_lines()) == [[80, 160], [240, 480]]


def test_curves_of_several_batches_are_several(shared: Shared) -> None:
    tracker, sweep = shared
    for batch in (64, 128):
        put(tracker, sweep, 10.0, epochs=1, accuracies=[batch / 200], batch_global=batch)
    lines = report_of(tracker, sweep).figures["accuracy"].axes[0].get_lines()
    assert {line.get_label(): line.get_ydata().tolist() for line in lines} == {
        "torch, 1 thread, batch 64": [32], "torch, 1 thread, batch 128": [64],
    }  # fmt: skip


def test_speed_ups_of_other_places_are_other_lines(shared: Shared) -> None:
    tracker, sweep = shared
    for facts, speedup in (({"threads": 1}, 1.9), ({"threads": 2}, 1.2), ({"device": "gpu", "gpus": 2, "device_name": "some GPU"}, 1.5)):
        put(tracker, sweep, 10.0, replicas=2, metrics={"speedup": speedup}, **facts)
    lines = report_of(tracker, sweep).figures["speedup"].axes[0].get_lines()
    assert sorted(line.get_ydata().tolist()[-1] for line in lines) == [1.2, 1.5, 1.9, 2]


def test_bold_is_the_fastest_of_its_precision(shared: Shared) -> None:
    tracker, sweep = shared
    for framework, fp32, bf16 in (("torch", 10.0, 6.0), ("jax", 9.0, 7.0)):
        put(tracker, sweep, fp32, framework=framework)
        put(tracker, sweep, bf16, framework=framework, precision="bf16")
    put(tracker, sweep + "between", 10.0)
    put(tracker, sweep + "between", 6.0, framework="jax", precision="bf16")
    assert rows_of(report_of(tracker, sweep).tables[0]) == {
        "torch fp32": [("10", False)], "torch bf16": [("6", True)], "jax fp32": [("9", True)], "jax bf16": [("7", False)],
    }  # fmt: skip
    assert rows_of(report_of(tracker, sweep + "between").tables[0]) == {"torch fp32": [("10", False)], "jax bf16": [("6", False)]}


def test_a_run_that_was_done_again_counts_once(shared: Shared) -> None:
    """As what it was at last, also where it ended early; and the report says so. A repeat or seed that failed for good stays."""
    tracker, sweep = shared
    put(tracker, sweep, None, "interrupted", "stopped by SIGTERM", **EARLY)
    put(tracker, sweep, None, "crashed", "once")
    put(tracker, sweep, 10.0)
    put(tracker, sweep, None, "crashed", "for good", **EARLY, repeat=2)
    put(tracker, sweep, 20.0, network="vgg_a")
    put(tracker, sweep, None, "crashed", "later", network="vgg_a")
    put(tracker, sweep, None, "diverged", "the loss is NaN", network="vgg_b", seed=1)
    put(tracker, sweep, 30.0, network="vgg_b", seed=2)
    lenet, vgg_a, vgg_b = cells_of(tracker.runs_of_sweep(sweep))
    assert (lenet.values("step_ms"), lenet.outcome, lenet.reason, len(lenet.runs)) == ([10.0], "crashed", "for good", 2)
    assert (vgg_a.values("step_ms"), vgg_a.outcome) == ([20.0], "crashed"), "what failed last is not hidden by what was before"
    assert (vgg_b.values("step_ms"), vgg_b.outcome) == ([30.0], "diverged"), "another seed is no repetition"
    assert "2 runs without numbers were done again and are left out" in report_of(tracker, sweep).facts


#: the params of a run that ended before its place was chosen, as `publish.params` gives them where device=auto
EARLY = dict.fromkeys(("framework_version", "device", "device_name", "gpus", "data_placement", "threads"), "")


def test_what_ended_early_is_in_the_row_of_the_others(shared: Shared) -> None:
    """Without a place, a device's name or a version it is no row and no table of its own."""
    tracker, sweep = shared
    gpu = {"device": "gpu", "device_name": "some GPU", "threads": 8}
    for gpus in (1, 2):
        put(tracker, sweep + "gpus", 10.0 / gpus, **gpu, gpus=gpus, replicas=gpus)
    put(tracker, sweep + "gpus", None, "unsupported", "there are 2 GPUs", **{**EARLY, "device": "gpu", "gpus": 4}, replicas=4)
    (table, *_) = report_of(tracker, sweep + "gpus").tables
    assert table.columns == ["1 GPU", "2 GPUs", "4 GPUs"]
    assert rows_of(table) == {"torch": [("10", False), ("5", False), ("unsupported", False)]}
    for batch in (64, 128):
        put(tracker, sweep + "batches", batch / 10, batch_global=batch)
    put(tracker, sweep + "batches", None, "interrupted", "early", batch_global=256, **EARLY)
    (table, *others) = report_of(tracker, sweep + "batches").tables
    assert table.columns == ["batch 64", "batch 128", "batch 256"] and not any("time per" in other.title for other in others)
    assert rows_of(table) == {"torch": [("6.4", False), ("12.8", False), ("interrupted", False)]}
    put(tracker, sweep + "none", None, "unsupported", "no", **EARLY)
    older = {**EARLY, "device": "auto", "gpus": "0"}
    put(tracker, sweep + "none", None, "unsupported", "no", **older, network="vgg_a")
    (table,) = report_of(tracker, sweep + "none").tables
    assert [(names[0], [entry.text for entry in entries]) for names, entries in table.rows] == [
        ("lenet", ["unsupported"]), ("vgg_a", ["unsupported"]),
    ]  # fmt: skip


def test_what_ended_early_joins_only_what_it_surely_is(shared: Shared) -> None:
    tracker, sweep = shared
    for version in ("2.13.0", "2.14.0"):
        put(tracker, sweep + "two", 10.0, framework_version=version)
    put(tracker, sweep + "two", None, "crashed", "early", **EARLY)
    assert [cell.outcome for cell in cells_of(tracker.runs_of_sweep(sweep + "two"))] == ["ok", "ok", "crashed"]
    assert "frameworks: torch 2.13.0, torch 2.14.0" in report_of(tracker, sweep + "two").facts
    put(tracker, sweep + "settings", None, "interrupted", "killed", **EARLY)
    put(tracker, sweep + "settings", 8.0, framework_settings="lstm=scan")
    assert [cell.outcome for cell in cells_of(tracker.runs_of_sweep(sweep + "settings"))] == ["interrupted", "ok"]
    put(tracker, sweep + "max", 10.0)
    put(tracker, sweep + "max", None, "device_oom", "too large", batch_global="max")
    assert [cell.outcome for cell in cells_of(tracker.runs_of_sweep(sweep + "max"))] == ["ok", "device_oom"]
    table = report_of(tracker, sweep + "settings").tables[0]
    assert rows_of(table) == {"torch": [("interrupted", False)], "torch lstm=scan": [("8", False)]}


def test_what_can_not_be_told_apart_is_not_lost(shared: Shared) -> None:
    """A run without a param (of an older version, or another tool's kind of run) beside those that have it."""
    tracker, sweep = shared
    for step_ms, placement in ((10.0, "host"), (20.0, "device"), (30.0, "")):
        put(tracker, sweep, step_ms, data_placement=placement)
    put(tracker, sweep, 40.0, measure="smoke", data_placement="", device_name="")
    report = report_of(tracker, sweep)
    assert sorted(entries[0].text for _, entries in report.tables[0].rows) == ["10", "20", "30", "40"]


def test_runs_of_others_are_no_cells(shared: Shared) -> None:
    tracker, sweep = shared
    put(tracker, sweep, 10.0)
    other = TrackedRun("1", "theirs", "FINISHED", 1, 2, {}, {"outcome": "ok", "sweep": sweep}, {"step_ms": 1.0})
    runs = [*tracker.runs_of_sweep(sweep), other]
    report = build.of_runs("s", runs, tracker)
    assert report.facts[0] == "1 runs of 1 cells: 1 ok" and len(report.tables[0].rows) == 1


def test_a_figure_says_what_it_has_no_room_for() -> None:
    metrics, tags = {"step_ms": 1.0, "device_memory_mb": 100.0}, {"kind": "run", "outcome": "ok"}
    runs = [TrackedRun(str(n), "", "FINISHED", n, n, {**PARAMS, "batch_global": str(n)}, tags, metrics) for n in range(1, 131)]
    cells = cells_of(runs)
    (axis,) = figures.figures_of(cells, {})["memory"].axes
    assert "(the first 120 of 130 cells)" in axis.get_title() and len(axis.patches) == len(axis.get_yticklabels()) == 120
    (axis,) = figures.figures_of(cells[:120], {})["memory"].axes
    assert "first" not in axis.get_title() and axis.get_yticklabels()[-1].get_text() == "lenet torch, 1 thread, batch 1"


def test_published_numbers_stand_beside_rows_that_are_told_apart(shared: Shared) -> None:
    tracker, sweep = shared
    for precision, times in (("fp32", (10.0, None, 10.0)), ("bf16", (1.0, 2.0, 4.0))):
        for stage, step_ms in zip(("ae1", "ae2", "ae3"), times, strict=True):
            network = f"autoencoder_small stage={stage}"
            outcome = "ok" if step_ms else "device_oom"
            put(tracker, sweep, step_ms, outcome, task="gradient", network=network, precision=precision, study="bahrampour2016_autoencoder")
    made = {table.title.split(",")[0]: table for table in report_of(tracker, sweep).tables}
    assert {names[-1]: entries[0].text for names, entries in made["Pre-training"].rows} == {"torch": "7"}, "no sum of two precisions"
    ours = [(names[-1], entries[0].text) for names, entries in made["Published numbers beside ours"].rows if "ae1" in names[0]]
    assert {("torch fp32", "10"), ("torch bf16", "1")} <= set(ours)


def test_a_study_without_published_numbers_has_no_table_of_them(shared: Shared, tmp_path: Path) -> None:
    """And a report that is written where an older one was leaves nothing of it."""
    tracker, sweep = shared
    put(tracker, sweep, 10.0, study="one_gpu")
    report = report_of(tracker, sweep)
    assert not [table.title for table in report.tables if "Published" in table.title]
    folder = tmp_path / "report"
    folder.mkdir()
    for name in ("table99.csv", "speedup.png", "notes.txt", "memory.xlsx"):
        (folder / name).touch()
    build.write(report, folder)
    assert (folder / "speedup.png").exists(), "there was no report: it is not one's own"
    build.write(report, folder)
    assert {"notes.txt", "memory.xlsx", "memory.png"} <= {path.name for path in folder.iterdir()}
    assert not (folder / "table99.csv").exists() and not (folder / "speedup.png").exists()


def test_what_differs_between_networks_only_is_said_once(shared: Shared) -> None:
    tracker, sweep = shared
    for framework in ("torch", "mxnet"):
        put(tracker, sweep, 1.0, framework=framework, network="lenet", learning_rate="0.1")
        put(tracker, sweep, 1.0, framework=framework, network="fcn_r", learning_rate="0.5", accuracies=[0.5])
    put(tracker, sweep, 1.0, framework="torch", network="lenet", learning_rate="0.1", precision="bf16")
    put(tracker, sweep, 1.0, "contaminated", "others were busy", framework="jax", network="fcn_r", learning_rate="0.5", accuracies=[0.5])
    report = report_of(tracker, sweep)
    assert "settings: lenet: lr 0.1; fcn_r: lr 0.5" in report.facts
    times, *others = report.tables
    assert [names[-1] for names, _ in times.rows] == ["jax fp32", "mxnet fp32", "torch fp32", "mxnet fp32", "torch bf16", "torch fp32"]
    accuracy = next(table for table in others if table.title == "Training: accuracy")
    assert [names[0] for names, _ in accuracy.rows] == ["fcn_r"] * 3, "no row without a number"
    assert any("others were busy" in note for note in times.notes) and not any("busy" in note for t in others for note in t.notes)


def test_substitute_data_is_said_and_never_beside_a_published_number(shared: Shared) -> None:
    tracker, sweep = shared
    for data, step_ms in (("synthetic", 70.0), ("ptb", 71.0), ("text", 72.0)):
        put(tracker, sweep, step_ms, network="lstm_ptb", data=data, batch_global=128, framework="tensorflow", study="shi2017_convergence")
    report = report_of(tracker, sweep)
    assert "substitute data, not comparable with the study: lstm_ptb: text instead of ptb" in report.facts
    theirs = {entries[0].text: entries[2].text for _, entries in report.tables[-1].rows if entries[0].text}
    assert "74.0 (GTX Titan X" in theirs["70"] and "74.0" in theirs["71"]
    assert theirs["72"] == "not compared: lstm_ptb: text instead of ptb"


def test_pre_training_is_the_sum_of_its_stages(shared: Shared) -> None:
    tracker, sweep = shared
    options = {"task": "gradient", "batch_global": 64, "study": "bahrampour2016_autoencoder"}
    for framework, times in {"torch": (1.0, 2.0, 4.0), "theano": (1.0, None, 4.0), "jax": (3.0, 3.0, 3.0)}.items():
        for stage, step_ms in zip(("ae1", "ae2", "ae3"), times, strict=True):
            put(
                tracker,
                sweep,
                step_ms,
                "ok" if step_ms else "crashed",
                "",
                framework=framework,
                network=f"autoencoder_small stage={stage}",
                **options,
            )
    (table,) = (table for table in report_of(tracker, sweep).tables if table.title.startswith("Pre-training"))
    assert {names[-1]: [entry.text for entry in entries] for names, entries in table.rows} == {
        "torch": ["7", "1 thread", "1.5 (Tesla M40, cuDNN 4)"],
        "jax": ["9", "1 thread", published.NONE],
    }


def test_the_file_of_published_numbers_is_whole() -> None:
    rows = published.read()
    assert len(rows) == 178 and all(float(row["step_ms"]) > 0 and row["hardware"] and row["source"] for row in rows)
    assert len({tuple(row.values()) for row in rows}) == len(rows)
    one = next(row for row in rows if (row["network"], row["framework"], row["batch_global"]) == ("vgg_a", "tensorflow", "128"))
    assert one["step_ms"] == "899.86"


def test_formats_say_the_same(filled: Tracker) -> None:
    table = report_of(filled, "repeats").tables[0]
    read = list(csv.reader(io.StringIO(formats.as_csv(table))))
    assert read[0] == ["network", "batch", "framework", "1 thread"] and ["lenet", "64", "caffe", "unsupported"] in read
    assert "| lenet | 64 | torch | **10.03** |" in formats.markdown(table)
    assert r"lenet & 64 & torch & \textbf{10.03} \\" in formats.latex(table)
    assert '<td class="best">10.03</td>' in formats.as_html(table)
    strange = tables.Table("50 % & a_b", ["n"], ["{x}"], [(["<b>|"], [tables.Entry("1 % #")])])
    assert r"\caption{50 \% \& a\_b}" in formats.latex(strange) and r"\{x\}" in formats.latex(strange)
    assert "&lt;b&gt;|" in formats.as_html(strange) and "<b>\\|" in formats.markdown(strange)


def test_the_page_needs_no_other_file_and_names_what_failed(filled: Tracker, tmp_path: Path) -> None:
    files = build.write(report_of(filled, "repeats"), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "data:image/png;base64," in page and not re.search(r"(src|href)=[\"'](?!data:)", page)
    text = (tmp_path / "report.md").read_text()
    assert "caffe, 1 thread: unsupported: caffe has no attention" in text and "caffe has no attention" in page
    assert {path.suffix for path in files} == {".md", ".html", ".csv", ".tex", ".png", ".svg"}
    assert all(path.stat().st_size for path in files)
    for name in re.findall(r"\]\((.*?)\)", text):
        assert (tmp_path / name).is_file()


def test_a_network_s_stage_is_a_network_of_its_own(train: Train) -> None:
    result = train("-m", "framework=fake", "framework.step_ms=1", "network=autoencoder_small", "network.stage=ae1,finetune", *QUICK)
    assert [run.data.params["network"] for run in result.runs] == ["autoencoder_small stage=ae1", "autoencoder_small"]


def test_every_choice_of_a_framework_is_in_a_param(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without a param of their own in framework_settings, where they are not the default."""
    chosen = ["framework.autotune=true,false", "framework.step_ms=1", "+framework.env.B=x y", "+framework.env.A=1"]
    result = train("-m", "framework=fake", "data=synthetic", *chosen, "framework.compile=on", *QUICK)
    told = [run.data.params["framework_settings"] for run in result.runs]
    assert told == ["autotune step_ms=1.0 env.A=1 env.B=x y", "step_ms=1.0 env.A=1 env.B=x y"], "compile has its own"
    monkeypatch.setattr(publish, "config_dirs", [Path(__file__).parents[1] / "conf"])
    usual = {"name": "jax", "autotune": True, "lstm": "auto", "space_to_depth": False, "deterministic": False, "env": {}}
    changed = {"autotune": False, "lstm": "scan", "env": {"A": "1"}}
    assert [publish.framework_settings(one) for one in (usual, {**usual, **changed})] == ["", "autotune=off lstm=scan env.A=1"]


def test_a_sweep_ends_with_its_report_and_the_command_makes_it_again(train: Train, tmp_path: Path) -> None:
    sweep = ["-m", "framework=fake", "framework.step_ms=1", "data=synthetic", "batch_size=16,32", *QUICK, "tracking.report=true"]
    result = train(*sweep)
    assert result.code == 0, result
    (page,) = tmp_path.glob("outputs/*/*-sweep-*/report/report.html")
    assert f"report: {page}" in result.out
    client = store(tmp_path)
    (report,) = client.search_runs([e.experiment_id for e in client.search_experiments()], "tags.kind = 'report'")
    assert (report.info.status, report.data.tags["sweep"]) == ("FINISHED", page.parents[1].name)
    names = {item.path for item in client.list_artifacts(report.info.run_id)}
    assert {"report.md", "report.html", "tables", "time_by_batch.png"} <= names
    again = crosstrain("report", "--no-upload", "--to", "again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "table01.csv").read_text() == (page.parent / "table01.csv").read_text()
    assert crosstrain("list", cwd=tmp_path).returncode == 0


WRONG: dict[str, Any] = {
    "report no-such-sweep": "no-such-sweep: there are no runs",
    "report --study=none": "none: there are no runs",
    "report --to=mlruns/mlflow.db": "--to mlruns/mlflow.db: File exists",
    "report --to=mlruns/mlflow.db/here": "--to mlruns/mlflow.db/here: Not a directory",
    "report --no-upload": "--no-upload: without --to DIR nothing would be kept",
}


@pytest.mark.parametrize("line", WRONG)
def test_nothing_to_report_is_one_line(
    line: str, filled: Tracker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(filled.uri.removeprefix("sqlite:///")).parents[1])
    code, (out, err) = cli.main(line.split(" ")), capsys.readouterr()
    assert (code, out) == (2, "") and err.startswith(f"error: {WRONG[line]}") and err.count("\n") == 1
