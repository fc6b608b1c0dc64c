"""Sweeps and studies through the front door: which cells, in which order, where their files go, exit codes."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

from conftest import PUBLISHED, QUICK, Result, Train, command, run_train

FAKE = ["framework=fake", "framework.step_ms=1", "data=synthetic", *QUICK]

NETWORKS = '''\
from crosstrain.networks.spec import Network, classes, vector


def tiny(width: int):
    net = Network("tiny", vector(6), classes(3))
    net.add("linear", "hidden", out=width)
    net.add("linear", "logits", out=3)
    return net.finish()
'''
MINE = "name: mine\n_target_: my_networks.tiny\nwidth: 4\nrecommended: {batch_size: 32, data: synthetic}\n"
STUDY = """\
# @package _global_
study: own
seed: 5
hydra:
  mode: MULTIRUN
  sweeper:
    cells:
      - {network: mine, batch_size: "8,16"}
      - {network: lenet, batch_size: 4, data: synthetic}
"""


@pytest.fixture
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user's own: settings/ for --config-dir, and beside it the module its networks are in."""
    folder = tmp_path_factory.mktemp("own")
    for name, text in {"my_networks.py": NETWORKS, "settings/network/mine.yaml": MINE, "settings/study/own.yaml": STUDY}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "settings"


def planned(tmp_path: Path, *arguments: str) -> list[tuple[str, str, str]]:
    """(run name, what was swept, batch size) of each cell, in order, as dry_run=true shows them."""
    result = run_train(tmp_path, *arguments, "dry_run=true")
    assert (result.code, result.err, list(tmp_path.iterdir())) == (0, "", []), result
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.out.splitlines() if line.startswith("│")]
    assert [row[0].split(". ")[0] for row in rows] == [str(number) for number in range(1, len(rows) + 1)]
    swept = [row[1] if len(row) == 6 else "" for row in rows]
    return [(row[0].split(". ")[1], what, row[-4]) for row, what in zip(rows, swept, strict=True)]


# -- which cells -----------------------------------------------------------------------------------------------------------


def test_the_first_key_turns_slowest(tmp_path: Path) -> None:
    """repeat first interleaves the frameworks: a slow drift of the machine then hits all of them alike."""
    cells = planned(tmp_path, "-m", "repeat=1,2,3", "framework=fake,torch")
    assert cells == [(f"lenet-{name}-auto", f"repeat={n}", "64") for n in (1, 2, 3) for name in ("fake", "torch")]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_m_may_stand_anywhere(tmp_path: Path, place: int) -> None:
    arguments = ["framework=fake", "batch_size=2,4"]
    arguments.insert(place, "-m")
    assert [batch for _, _, batch in planned(tmp_path, *arguments)] == ["2", "4"]


def test_study_of_the_users_own(tmp_path: Path, own: Path) -> None:
    expected = [("mine-fake-auto", "batch_size=8", "8"), ("mine-fake-auto", "batch_size=16", "16"), ("lenet-fake-auto", "", "4")]
    assert planned(tmp_path, "--config-dir", str(own), "+study=own", "framework=fake") == expected
    assert planned(tmp_path, "+study=own", "framework=fake", f"--config-dir={own}", "-m") == expected


def test_command_line_replaces_the_key_in_every_cell(tmp_path: Path, own: Path) -> None:
    cells = planned(tmp_path, "--config-dir", str(own), "+study=own", "framework=fake", "network=lenet")
    assert [(name, batch) for name, _, batch in cells] == [("lenet-fake-auto", n) for n in ("8", "16", "4")]
    # Both cells of the first network are now one, the other differs still.
    cells = planned(tmp_path, "--config-dir", str(own), "+study=own", "framework=fake", "batch_size=2")
    assert [(name, batch) for name, _, batch in cells] == [("mine-fake-auto", "2"), ("lenet-fake-auto", "2")]


def test_cells_made_equal_are_one_and_doubles_on_purpose_stay(tmp_path: Path, own: Path) -> None:
    study = own / "study" / "own.yaml"
    cells = "[{network: lenet, batch_size: 2}, {network: fcn_r, batch_size: 2}, {batch_size: 2, network: alexnet_r}]"
    study.write_text(f"# @package _global_\nhydra: {{mode: MULTIRUN, sweeper: {{cells: {cells}}}}}\n")
    arguments = ["--config-dir", str(own), "+study=own", "framework=fake"]
    assert [name for name, _, _ in planned(tmp_path, *arguments)] == ["lenet-fake-auto", "fcn_r-fake-auto", "alexnet_r-fake-auto"]
    assert [name for name, _, _ in planned(tmp_path, *arguments, "network=fcn_r")] == ["fcn_r-fake-auto"]
    assert len(planned(tmp_path, *arguments, "network=fcn_r", "repeat=1,2")) == 2
    study.write_text("# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {cells: [{seed: 2}, {seed: 2}]}}\n")
    assert len(planned(tmp_path, *arguments)) == 2
    assert len(planned(tmp_path, "-m", "framework=fake", "seed=1,1")) == 2


def test_command_line_wins_over_a_studys_own_values(tmp_path: Path) -> None:
    result = run_train(tmp_path, "+study=quick_look", "measure=standard", "framework=fake", "dry_run=true")
    assert result.out.count("5 s - 60 s") == 3
    assert run_train(tmp_path, "+study=quick_look", "framework=fake", "dry_run=true").out.count("0 s - 10 s") == 3


def test_glob_takes_all_options(tmp_path: Path) -> None:
    assert len(planned(tmp_path, "-m", "framework=glob(fake*)")) == 4


# -- running them ----------------------------------------------------------------------------------------------------------


def test_no_gpus_gives_six_clear_reasons(tmp_path: Path) -> None:
    result = run_train(tmp_path, "-m", "framework=torch,mxnet", "gpus=1,2,4", env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.code == 1
    assert [row["outcome"] for row in result.outcomes] == ["unsupported"] * 6
    expected = [f"asked for {n} GPU{'s' if n > 1 else ''}; this machine has 0" for n in (1, 2, 4)]
    assert [row["message"] for row in result.outcomes] == 2 * expected
    assert "Traceback" not in result.out + result.err


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("swept")
    return run_train(folder, "-m", *FAKE, "framework.step_ms=2,4", "network=lenet,fcn_r")


def test_run_folders_are_in_the_order_of_the_runs(swept: Result) -> None:
    assert swept.code == 0, swept
    folders = [Path(row["folder"]) for row in swept.outcomes]
    assert [folder.name for folder in folders] == ["000-lenet-fake", "001-fcn_r-fake", "002-lenet-fake", "003-fcn_r-fake"]
    sweep = folders[0].parent
    assert {folder.parent for folder in folders} == {sweep}
    assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-sweep-[0-9a-f]{6}", str(sweep.relative_to(swept.folder)))
    assert (sweep / "multirun.yaml").is_file()


def test_table_tells_runs_of_the_same_name_apart(swept: Result) -> None:
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in swept.out.splitlines() if line.startswith("│")]
    steps = ["framework.step_ms=2", "framework.step_ms=2", "framework.step_ms=4", "framework.step_ms=4"]
    assert [row[1] for row in table] == steps
    assert all(step in row["overrides"] for step, row in zip(steps, swept.outcomes, strict=True))


def test_table_has_no_such_column_where_names_are_enough(train: Train) -> None:
    result = train(*FAKE)
    assert result.code == 0, result
    assert "swept" not in result.out


def test_own_network_from_outside_the_repository(tmp_path: Path, own: Path) -> None:
    result = run_train(tmp_path, "--config-dir", str(own), "network=mine", "network.width=3", *FAKE)
    assert result.code == 0, result
    assert result.only["run"].startswith("mine-fake-")
    assert result.runs[0].data.params["network"] == "mine width=3"


def test_a_wrong_last_cell_starts_nothing(tmp_path: Path, own: Path) -> None:
    study = own / "study" / "own.yaml"
    study.write_text(STUDY.replace("batch_size: 4", "batch_size: 0"))
    result = run_train(tmp_path, "--config-dir", str(own), "+study=own", *FAKE)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: batch_size=0: must be a whole number >= 1, or max (in cell 3: ")
    assert list(tmp_path.iterdir()) == []


def test_two_drivers_in_the_same_second_share_no_folder(tmp_path: Path) -> None:
    """The suffix, not the second, keeps them apart: both are told the same time."""
    same = [*FAKE, "hydra.run.dir=outputs/day/second-${crosstrain.unique:}"]
    drivers = [subprocess.Popen(command(*same), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]
    said = [driver.communicate(timeout=120)[0].decode() for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0], said
    folders = list((tmp_path / "outputs" / "day").iterdir())
    assert len(folders) == 2
    assert all(len((folder / "outcomes.jsonl").read_text().splitlines()) == 1 for folder in folders)
    assert len(Result(0, "", "", tmp_path).runs) == 2


def test_default_folders_carry_the_suffix(train: Train) -> None:
    folder = Path(train(*FAKE).only["folder"])
    assert re.fullmatch(r"\d\d-\d\d-\d\d-[0-9a-f]{6}", folder.name)


@pytest.mark.parametrize("multirun", [[], ["-m"]], ids=["run", "sweep"])
def test_unreachable_tracking_server_is_3_and_starts_nothing(tmp_path: Path, multirun: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    begin = time.monotonic()
    result = run_train(tmp_path, *FAKE, *multirun, env={"MLFLOW_TRACKING_URI": address})
    assert (result.code, result.out, result.err.count("\n")) == (3, "", 1), result
    assert address in result.err
    assert list(tmp_path.iterdir()) == []
    assert time.monotonic() - begin < 30  # the preflight takes at most 15 s; the rest is a busy machine


def test_one_bad_run_makes_the_exit_code_1(train: Train) -> None:
    result = train("-m", *FAKE, "framework.fault=raise,none", "framework.fault_iteration=2")
    assert result.code == 1
    assert [row["ok"] for row in result.outcomes] == [False, True]


# -- skip_finished ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_skip_finished_runs_only_what_has_no_ok_run(train: Train) -> None:
    sweep = ["-m", *FAKE, "skip_finished=true"]
    first = train(*sweep, "seed=1,2")
    assert (first.code, len(first.runs)) == (0, 2), first
    again = train(*sweep, "seed=1,2")
    assert (again.code, len(again.runs)) == (0, 2), again
    assert again.out.count("skipped, an ok run with the same key exists") == 2
    more = train(*sweep, "seed=1,2,3")
    assert (more.code, len(more.runs)) == (0, 3), more
    assert [row["outcome"] in PUBLISHED for row in more.outcomes] == [True]
    assert "seed=3" in more.only["overrides"]
    changed = train(*FAKE, "skip_finished=true", "batch_size=8")
    assert (changed.code, len(changed.runs)) == (0, 4), changed


def test_skip_finished_repeats_what_was_not_ok(train: Train) -> None:
    bad = [*FAKE, "framework.fault=raise", "framework.fault_iteration=2", "skip_finished=true"]
    assert train(*bad).code == 1
    again = train(*bad)
    assert (again.code, len(again.runs)) == (1, 2)


@pytest.mark.long
def test_without_skip_finished_everything_runs_again(train: Train) -> None:
    train(*FAKE)
    assert len(train(*FAKE).runs) == 2
