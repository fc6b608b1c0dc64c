"""`crosstrain parity`: its table, networks of one's own, errors as one line; and the tag that runs carry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import QUICK, Train


def crosstrain(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "crosstrain.cli", *arguments], cwd=cwd, capture_output=True, text=True, timeout=600)


def rows(printed: str) -> list[list[str]]:
    """The table's rows, cell by cell."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a user's networks, from functions in a module beside it. Theirs alone: no other test's certificate is for them."""
    folder = tmp_path / "my project" / "conf"
    (folder / "network").mkdir(parents=True)
    (folder.parent / "my_package.py").write_text(
        "from crosstrain.networks import Network\n"
        "from crosstrain.networks.spec import classes, image\n\n\n"
        "def my_net(width=40, kernel=3, flat='flatten'):\n"
        "    net = Network('mine', image(1, 28, 28), classes(10))\n"
        "    net.add('conv2d', 'first', out_channels=4, kernel=kernel, stride=2)\n"
        "    net.add('relu', 'relu1')\n"
        "    net.add(flat, 'flat')\n"
        "    net.add('linear', 'hidden', out=width)\n"
        "    net.add('tanh', 'tanh1')\n"
        "    net.add('linear', 'last', out=10)\n"
        "    return net.finish()\n"
    )
    target = "_target_: my_package.my_net\n"
    (folder / "network" / "mine.yaml").write_text(f"name: mine\n{target}width: 40\nladder: {{width: 6}}\n")
    (folder / "network" / "too_large.yaml").write_text(f"name: too_large\n{target}kernel: 29\n")
    (folder / "network" / "misfit.yaml").write_text(f"name: misfit\n{target}flat: relu\n")
    (folder / "network" / "unknown.yaml").write_text(f"name: unknown\n{target}flat: flaten\n")
    (folder / "network" / "lesser.yaml").write_text(f"name: lesser\n{target}ladder: {{flat: global_avg_pool}}\n")
    (folder / "network" / "odd_ladder.yaml").write_text(f"name: odd_ladder\n{target}ladder: {{widht: 6}}\n")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("framework", ["torch", "mxnet"])
def test_one_s_own_large_network_is_proven_and_runs_say_so(
    train: Train, tmp_path: Path, own: Path, framework_python, framework: str
) -> None:  # type: ignore[no-untyped-def]
    framework_python(framework)
    chosen = [f"framework={framework}", "network=mine", "device=cpu", "threads=1"]
    done = crosstrain("parity", *chosen, "--config-dir", str(own), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = rows(done.stdout)
    name = {"torch": "torch", "mxnet": "mxnet compile=on"}[framework]
    flops = {"torch": "✓*", "mxnet": "-"}[framework]
    assert row == [name, "mine", "✓", "✓", "✓*", "✓*", "✓*", "✓*", "✓*", "-", "✓*", flops, "✓*", "proven"]
    says = "proven: levels 1-6, 8-9 (levels 3-8 on a reduced variant, 9 too); executed FLOPs "
    says += {"torch": "are the spec's", "mxnet": "not counted"}[framework]
    assert says in done.stdout
    other = {"torch": "framework.memory_format=channels_last", "mxnet": "framework.compile=off"}[framework]
    for arguments in ([], [other]):
        result = train(*chosen, *arguments, f"--config-dir={own}", "data=synthetic", "epochs=0", *QUICK)
    tags = [run.data.tags["parity"] for run in result.runs]
    assert tags == [says, "not proven"]


@pytest.mark.long
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_each_way_to_compute_a_network_is_proven_by_itself(  # type: ignore[no-untyped-def]
    framework: str, train: Train, tmp_path: Path, own: Path, framework_python
) -> None:
    """Another layout of the same sums (framework.space_to_depth): its certificate is not that of the plain layer."""
    framework_python(framework)
    chosen = [f"framework={framework}", "network=mine", "network.width=38", "device=cpu", "threads=1"]
    way = ["framework.space_to_depth=true", "framework.memory_format=channels_last"]
    done = crosstrain("parity", *chosen, *way, "--config-dir", str(own), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = rows(done.stdout)
    compiled = {"torch": "", "jax": "compile=on "}[framework]
    name = f"{framework} {compiled}memory_format=channels_last space_to_depth=True"
    assert row == [name, "mine width=38", "✓", "✓", "✓*", "✓*", "✓*", "✓*", "✓*", "-", "✓*", "-", "✓*", "proven"]
    for arguments in (way, way[1:]):
        result = train(*chosen, *arguments, f"--config-dir={own}", "data=synthetic", "epochs=0", *QUICK)
    tags = [run.data.tags["parity"] for run in result.runs]
    assert [tag.partition(":")[0] for tag in tags] == ["proven", "not proven"]
    assert [run.data.params["framework_settings"] for run in result.runs] == ["space_to_depth", ""]


def test_a_missing_certificate_is_shown(train: Train) -> None:
    (run,) = train("framework=fake", "data=synthetic", *QUICK).runs
    assert run.data.tags["parity"] == "not proven"


def test_a_framework_that_computes_nothing_fails(tmp_path: Path) -> None:
    done = crosstrain("parity", "framework=fake", "network=lenet", cwd=tmp_path)
    assert done.returncode == 1
    assert "proven: levels" not in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    (row,) = rows(done.stdout)
    assert row[:2] == ["fake", "lenet"] and row[-1] in ("FAILED", "crashed")


BAD_SPECS = {
    "too_large": "op first (conv2d): kernel [29, 29] with dilation [1, 1] and padding [0, 0, 0, 0] is larger than its input, "
    "got (1, 28, 28)",
    "misfit": "op hidden (linear): wants one input (D,) or (T, D), got (4, 13, 13)",
    "unknown": "op flat: unknown op 'flaten', known are linear, ",
}


@pytest.mark.parametrize("network", BAD_SPECS)
def test_a_spec_that_can_not_be_built_names_op_and_shapes(train: Train, tmp_path: Path, own: Path, network: str) -> None:
    trained = train(f"network={network}", f"--config-dir={own}", "framework=fake")
    # all networks are built before the first is proven
    climbed = crosstrain("parity", f"network=lenet,{network}", f"--config-dir={own}", "framework=fake", cwd=tmp_path)
    for code, out, err in ((trained.code, trained.out, trained.err), (climbed.returncode, climbed.stdout, climbed.stderr)):
        assert (code, out) == (2, ""), err
        assert err.startswith(f"error: {BAD_SPECS[network]}") and err.count("\n") == 1, err


WRONG = {
    "network=lente": "network=lente: unknown; did you mean lenet?",
    "lenet": "lenet: can not be read; must be key=value",
    "network=fcn_r network.hiden=[3,4]": "network.hiden=[3,4]: unknown key; did you mean network.hidden?",
    "learning_rate=interval(0,1)": "learning_rate=interval(0,1): give the values, KEY=A,B,C",
    "--config-dir /no/such/folder": "--config-dir /no/such/folder: there is no such folder",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_one_line(tmp_path: Path, line: str) -> None:
    done = crosstrain("parity", *line.split(" "), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {WRONG[line]}") and done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("network", "says"),
    [
        ("lesser", "network.ladder: the reduced variant of lesser has no flatten, so it proves less"),
        ("odd_ladder", "network odd_ladder: _target_=my_package.my_net: got an unexpected keyword argument 'widht'"),
    ],
)
def test_a_wrong_reduced_variant_is_one_line(tmp_path: Path, own: Path, network: str, says: str) -> None:
    done = crosstrain("parity", f"network={network}", f"--config-dir={own}", "framework=fake", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"error: {says}")
