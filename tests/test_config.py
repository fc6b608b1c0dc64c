"""The configuration front door: every wrong input is one line and exit code 2 and leaves nothing; every config composes; --help."""

from __future__ import annotations

import dataclasses
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from conftest import ROOT, Train
from crosstrain import app, runspec
from crosstrain import config as schema

CONF = ROOT / "conf"
GROUPS = ["framework", "network", "data", "device", "parallelism", "measure", "tracking", "launcher", "study"]
OPTIONS = sorted((path.parent.name, path.stem) for path in CONF.glob("*/*.yaml"))

#: DESIGN: the root keys are a promise to users and scripts.
ROOT_KEYS = [
    *("gpus", "replicas", "threads", "batch_size", "scaling", "precision", "task", "epochs", "optimizer", "learning_rate"),
    *("momentum", "weight_decay", "seed", "repeat", "target_accuracy", "timeout_s", "data_dir", "skip_finished", "dry_run", "effort"),
]

Front = Callable[..., tuple[int, str, str]]


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Front]:
    """front(*arguments) -> (exit code, stdout, stderr) of train.py's main in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = signal.getsignal(signal.SIGTERM)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = app.main(list(arguments), CONF)
        return code, *capsys.readouterr()

    yield call
    signal.signal(signal.SIGTERM, before)


def composed(*overrides: str) -> DictConfig:
    schema.register()
    runspec.config_dirs[:] = [CONF]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose("train", overrides=list(overrides))


# -- wrong inputs ----------------------------------------------------------------------------------------------------------

#: The command line -> what the one line must begin with. Each is tried without and with -m.
WRONG = {
    # a misspelt key, group or option: the closest valid name
    "bacth_size=3": "bacth_size=3: unknown key; did you mean batch_size?",
    "max_s=20": "max_s=20: unknown key; did you mean measure.max_s?",
    "measure.timeouts.imprt_s=3": "measure.timeouts.imprt_s=3: unknown key; did you mean measure.timeouts.import_s?",
    "measure.timeouts={imprt_s:3}": "measure.timeouts={imprt_s:3}: unknown key measure.timeouts.imprt_s; did you mean",
    "network=fcn_r network.hiden=[3]": "network.hiden=[3]: unknown key; did you mean network.hidden?",
    "framework=fake framework.step=3": "framework.step=3: unknown key; did you mean framework.step_ms?",
    "zzz=3": "zzz=3: unknown key; --cfg job shows all keys",
    "seed.foo=3": "seed.foo=3: must be a whole number",
    "hydra.foo=3": "hydra.foo=3: unknown key",
    "networks=lenet": "networks=lenet: unknown key; did you mean network?",
    "network=lenett": "network=lenett: unknown; did you mean lenet?",
    "measure=fast": "measure=fast: unknown; there is smoke, standard, thorough",
    "network=": "network=: unknown; there is",
    "device=tpu": "device=tpu: unknown; did you mean gpu?",
    "+study=quick_lok": "study=quick_lok: unknown; did you mean quick_look?",
    "hydra/launcher=joblob": "hydra/launcher=joblob: unknown; ",
    # a key added or deleted that is not to be
    "+foo=3": "foo: unknown key; --cfg job shows all keys",
    "++bach_size=3": "bach_size: unknown key; did you mean batch_size?",
    "+framework.compil=on": "framework.compil: unknown key; did you mean framework.compile?",
    "+network.foo=3": "network lenet: ",
    "+network.recommended.batchsize=3": "network.recommended.batchsize: unknown key; did you mean batch_size?",
    "~seed": "seed: is missing",
    "~network": "network: is missing",
    "~foo": "can not delete: 'foo' does not exist",
    "framework.env.A=1": "framework.env.A=1: a new entry takes a +: +framework.env.A=1",
    "study=quick_look": "study=quick_look: nothing is chosen there, so it takes a +: +study=quick_look",
    "+network=lenet": "network: has a choice already",
    # what is no override at all
    "foo": "foo: can not be read; must be key=value",
    "=3": "=3: must be key=value",
    "data_dir=(x)": "data_dir=(x): can not be read; quote the value: 'data_dir=\"(x)\"'",
    "foo=bar=x": "foo=bar=x: can not be read; quote the value",
    "network=null": "network=null: must be one option; there is alexnet",
    "framework=[torch,mxnet]": "framework=[torch,mxnet]: must be one option; there is ",
    # a wrong type or a value outside an enumeration: what is allowed
    "precision=fp8": "precision=fp8: must be one of fp32, tf32, bf16, fp16",
    "precision=1": "precision=1: must be one of fp32",
    "precision=null": "precision=null: must be one of fp32",
    "task=train": "task=train: must be one of training, gradient, forward",
    "scaling=big": "scaling=big: must be one of strong, weak",
    "effort=none": "effort=none: must be one of full, smoke",
    "optimizer=adam": "optimizer=adam: must be one of sgd or null",
    "framework.compile=true": "framework.compile=true: must be one of off, on, max",
    "framework.lstm=fast framework=jax": "framework.lstm=fast: must be one of auto, scan, cudnn",
    "framework.space_to_depth=often framework=torch": "framework.space_to_depth=often: must be true or false",
    "framework.fault=nan framework=fake": "framework.fault=nan: must be one of none, raise, nan_loss",
    "data.fit=stretch": "data.fit=stretch: must be one of none, pad, scale",
    "gpus=x": "gpus=x: must be a whole number or null",
    "gpus=1.5": "gpus=1.5: must be a whole number",
    "seed=null": "seed=null: must be a whole number",
    "seed=true": "seed=true: must be a whole number",
    "seed=[1]": "seed=[1]: must be a whole number",
    "dry_run=maybe": "dry_run=maybe: must be true or false",
    "skip_finished=2.5": "skip_finished=2.5: must be true or false",
    "learning_rate=fast": "learning_rate=fast: must be a number or null",
    "measure.timeouts=3": "measure.timeouts=3: must be a mapping with the keys import_s, ",
    "framework.env=3": "framework.env=3: must be a mapping",
    "+framework.env={A:null}": "+framework.env={A:null}: must be a text",
    "+framework.env={A:[1]}": "framework.env={'A': [1]}: must be a mapping of names to texts",
    "seed=${foo}": "seed: Interpolation key 'foo' not found",
    # out of range
    "batch_size=0": "batch_size=0: must be a whole number >= 1, or max",
    "batch_size=": "batch_size=: must be a whole number >= 1, or max",
    "batch_size=1.5": "batch_size=1.5: must be a whole number >= 1, or max",
    "batch_size=true": "batch_size=True: must be a whole number >= 1, or max",
    "batch_size=[8,16]": "batch_size=[8, 16]: must be a whole number >= 1, or max",
    "batch_size=nan": "batch_size=nan: must be a whole number >= 1, or max",
    "gpus=-1": "gpus=-1: must be a number of GPUs >= 1",
    "gpus=0": "gpus=0: must be a number of GPUs >= 1; for the CPU say device=cpu",
    "replicas=0": "replicas=0: must be a number >= 1",
    "threads=0": "threads=0: must be a number >= 1",
    "epochs=-1": "epochs=-1: must be a number >= 0",
    "seed=-1": "seed=-1: must be a number in [0, 2^32)",
    "seed=4294967296": "seed=4294967296: must be",
    "repeat=0": "repeat=0: must be a number >= 1",
    "learning_rate=nan": "learning_rate=nan: must be a number > 0",
    "learning_rate=inf": "learning_rate=inf: must be a number > 0",
    "learning_rate=0": "learning_rate=0.0: must be a number > 0",
    "momentum=1": "momentum=1.0: must be a number in [0, 1)",
    "momentum=nan": "momentum=nan: must be",
    "weight_decay=-0.1": "weight_decay=-0.1: must be a number >= 0",
    "weight_decay=inf": "weight_decay=inf: must be",
    "target_accuracy=97": "target_accuracy=97.0: must be a fraction in (0, 1]",
    "timeout_s=0": "timeout_s=0.0: must be seconds > 0",
    "timeout_s=nan": "timeout_s=nan: must be seconds > 0",
    "measure.min_s=nan": "measure.min_s=nan: must be seconds >= 0",
    "measure.timeouts.stall_s=-1": "measure.timeouts.stall_s=-1.0: must be seconds > 0",
    "data.samples=0": "data.samples=0: must be a number >= 1",
    "framework=fake framework.fault_rank=-1": "framework.fault_rank=-1: must be a number >= 0",
    "device.name=tpu": "device.name=tpu: must be one of auto, cpu, gpu",
    "framework.name=torchh": "framework.name=torchh: must be one of ",
    "network.name=a/b": "network.name=a/b: must be a name",
    "framework.version=2.10": "framework.version=2.1: must have three components, e.g. 2.10.0",
    "+network.recommended.clip_norm=0": "network.recommended.clip_norm=0: must be a number > 0",
    "network.recommended.learning_rate=x": "network.recommended.learning_rate=x: must be a number > 0",
    "network.recommended.data=syntetic": "network.recommended.data=syntetic: unknown; did you mean synthetic?",
    "network._target_=no.such": "network lenet: _target_=no.such can not be loaded",
    "data=digits data._target_=no.such": "data._target_=no.such: ",
    "data._target_=crosstrain.data.digits.digits": "data._target_=crosstrain.data.digits.digits: data=auto takes",
    # fine alone, wrong together
    "device=cpu gpus=2": "gpus=2: device=cpu has no GPUs",
    "device=gpu replicas=2": "replicas=2: is for device=cpu",
    "replicas=3 batch_size=64": "batch_size=64: must be a multiple of the 3 replicas",
    "epochs=1 task=forward": "epochs=1: task=forward trains nothing",
    "target_accuracy=0.9 epochs=0": "target_accuracy=0.9: needs epochs >= 1",
    "measure.iterations=3 measure.warmup=3": "measure.warmup=3: must be < measure.iterations=3",
    "measure.min_s=5 measure.max_s=4": "measure.max_s=4.0: must be >= measure.min_s=5.0",
    # flags and folders
    "--foo": "--foo: unknown flag; ",
    "--config-dir": "--config-dir/-cd: expected one argument",
    "--config-dir /no/such/folder": "--config-dir /no/such/folder: there is no such folder",
    "--config-name trian": "--config-name trian: there is no such file",
    "hydra.run.dir=/dev/null/x hydra.sweep.dir=/dev/null/x": "the output folder /dev/null/x can not be made: Not a directory",
}


#: Those of WRONG that are tried with -m as well: one of each way an error takes.
WRONG_IN_A_SWEEP = [
    *("bacth_size=3", "network=lenett", "+study=quick_lok", "+foo=3", "~seed", "~foo", "framework.env.A=1", "study=quick_look", "foo"),
    *("network=null", "precision=fp8", "framework.fault=nan framework=fake", "seed=null", "seed=${foo}", "batch_size=0", "gpus=-1"),
    *("learning_rate=nan", "network._target_=no.such", "replicas=3 batch_size=64", "--foo", "--config-dir /no/such/folder"),
    "hydra.run.dir=/dev/null/x hydra.sweep.dir=/dev/null/x",
]


@pytest.mark.parametrize("line", [*WRONG, *(f"{line} -m" for line in WRONG_IN_A_SWEEP)])
def test_wrong_input_is_one_line_and_starts_nothing(front: Front, tmp_path: Path, line: str) -> None:
    code, out, err = front(*line.split(" "))
    assert code == 2
    assert err.startswith(f"error: {WRONG[line.removesuffix(' -m')]}"), err
    assert err.count("\n") == 1, err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["gpus=1,2", "framework=torch,mxnet", "repeat=range(1,3)"])
def test_several_values_need_m(front: Front, tmp_path: Path, line: str) -> None:
    assert front(line) == (2, "", f"error: {line}: several values make a sweep: add -m\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("repeat=1,2,", "repeat=1,2,: can not be read"),
        ("framework=torch,mxnett", "framework=mxnett: unknown; did you mean mxnet? (in cell 2: framework=mxnett)"),
        ("batch_size=glob(*)", "this sweep has no cell"),
        ("learning_rate=interval(0,1)", "learning_rate=interval(0,1): give the values, learning_rate=A,B,C"),
        ("seed=1,2 batch_size=8,0", "batch_size=0: must be a whole number >= 1, or max (in cell 2: seed=1 batch_size=0)"),
        ("--cfg job", "Only one of --run, --multirun, --cfg"),
    ],
)
def test_wrong_sweep(front: Front, tmp_path: Path, line: str, says: str) -> None:
    code, out, err = front("-m", *line.split(" "))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {says}"), err
    assert list(tmp_path.iterdir()) == []


def test_verbose_adds_the_traceback(front: Front) -> None:
    _, _, err = front("seed=-1", "hydra.verbose=true")
    assert "Traceback" in err and "error: seed=-1" in err


@pytest.mark.parametrize(
    "arguments", [["precision=fp8"], ["gpus=1,2"], ["-m", "seed=1,-1"], ["foo"], ["hydra.run.dir=/dev/null/x"]], ids=" ".join
)
def test_wrong_input_in_a_process_of_its_own(train: Train, tmp_path: Path, arguments: list[str]) -> None:
    result = train(*arguments)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1), result
    assert list(tmp_path.iterdir()) == []


# -- a user's own files ----------------------------------------------------------------------------------------------------

OWN_FILES = {
    "framework=own": {
        "name: torch\ncompile: off\n": "framework/own.yaml: framework.compile=False: must be one of off, on, max (YAML reads on and off",
        "name: torch\ncompilee: 'off'\n": "framework/own.yaml: framework.compilee: unknown key; did you mean framework.compile?",
        "name: torch\nautotune: maybe\n": "framework/own.yaml: framework.autotune=maybe: must be true or false",
        "name: torch\nname: mxnet\n": "{file}, line 2: can not be read: ",
        "name: torch\n\tautotune: true\n": "{file}, line 2: can not be read: ",
        "name: torch: x\n": "{file}, line 1: can not be read: ",
        "defaults: [torchh, _self_]\n": "framework=torchh: unknown; did you mean torch?",
        "compile: 'on'\n": "framework.name: is missing",
        "": "framework.name: is missing",
    },
    "network=own": {
        "name: own\n": "network own: _target_=None must be the dotted path of a function",
        "name: own\n_target_: nosuch.net\n": "network own: _target_=nosuch.net can not be loaded: ",
        "name: own\n_target_: crosstrain.networks.lenet.lenet\nrecommended: {batchsize: 3}\n": "network.recommended.batchsize: unknown key",
    },
    "measure=own": {"name: own\n": "measure.min_s: is missing"},
    "+study=own": {
        "study: own\nseed: 2\n": "study/own.yaml: must begin with the line '# @package _global_'",
        "# @package _global_\nstudy: own\nsed: 2\n": "study/own.yaml: sed: unknown key; did you mean seed?",
        **{
            f"# @package _global_\nstudy: own\n{group}: {value}\n": (
                f"study/own.yaml: {group}: must be a mapping; to choose {value}, list `override /{group}: {value}` under defaults"
            )
            for group, value in (("framework", "torch"), ("network", "lenet"), ("measure", "smoke"), ("data", "digits"))
        },
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {cells: {seed: 2}}}\n": (
            "study/own.yaml: hydra.sweeper.cells and .smoke: must be"
        ),
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {cells: [2]}}\n": (
            "study/own.yaml: hydra.sweeper.cells and .smoke: must be"
        ),
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {cels: [{seed: 2}]}}\n": "study/own.yaml: hydra.sweeper.cels: unknown key",
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {cells: [{seed: 2}, {}, {sed: '3,4'}]}}\n": (
            "sed=3: unknown key; did you mean seed? (in cell 3: "
        ),
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {cells: [{network: }]}}\n": "network=null: must be one option",
    },
}


@pytest.mark.parametrize(("choice", "content"), [(choice, content) for choice, files in OWN_FILES.items() for content in files])
def test_wrong_own_file(
    front: Front, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, choice: str, content: str
) -> None:
    folder = tmp_path_factory.mktemp("own")
    file = folder / choice.split("=")[0].lstrip("+") / "own.yaml"
    file.parent.mkdir()
    file.write_text(content)
    code, out, err = front(f"--config-dir={folder}", choice)
    assert (code, out) == (2, "")
    assert err.startswith("error: " + OWN_FILES[choice][content].replace("{file}", str(file))), err
    assert err.count("\n") == 1, err
    assert list(tmp_path.iterdir()) == []


# -- what there is ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "option"), [(g, o) for g, o in OPTIONS if g != "study"])
def test_every_config_composes(group: str, option: str) -> None:
    spec = runspec.from_config(composed(f"{group}={option}"))
    assert composed(f"{group}={option}")[group].name == option or option.startswith("fake_")
    assert spec.seed == 1


@pytest.mark.parametrize("effort", ["smoke", pytest.param("full", marks=pytest.mark.long)])
@pytest.mark.parametrize("option", [option for group, option in OPTIONS if group == "study"])
def test_every_study_composes(front: Front, tmp_path: Path, option: str, effort: str) -> None:
    # with one framework: composing a cell takes 0.1 s
    code, out, err = front(f"+study={option}", "framework=torch", f"effort={effort}", "dry_run=true")
    assert (code, err) == (0, "")
    assert "nothing was started" in out
    assert list(tmp_path.iterdir()) == []


def test_groups_and_root_keys() -> None:
    assert {group for group, _ in OPTIONS} == set(GROUPS)
    assert set(composed()) == {*GROUPS, *ROOT_KEYS}


def test_every_framework_has_the_same_keys() -> None:
    keys = ["name", "python", "version", "compile", "memory_format", "autotune", "deterministic", "env", "replicas_per_rank", "started_by"]
    for group, option in OPTIONS:
        if group == "framework":
            extra = ["step_ms", "fault", "fault_phase", "fault_rank", "fault_iteration", "fault_batch"] if option.startswith("fake") else []
            extra += {"jax": ["lstm", "space_to_depth"], "torch": ["space_to_depth"]}.get(option, [])
            assert list(composed(f"framework={option}").framework) == [*keys, *extra]


def test_recommendations_count_where_the_root_value_is_null() -> None:
    own = runspec.from_config(composed("network=lenet", "batch_size=8", "momentum=0"))
    assert (own.batch_size, own.optimizer["momentum"]) == (8, 0.0)
    assert (own.data["name"], own.epochs, own.optimizer["learning_rate"]) == ("digits", 15, 0.02)
    other_data = runspec.from_config(composed("network=lenet", "data=synthetic"))
    assert (other_data.batch_size, other_data.epochs) == (64, 0)


def test_effort_smoke_shrinks() -> None:
    full, smoke = (runspec.from_config(composed("measure=thorough", f"effort={effort}")) for effort in ("full", "smoke"))
    assert (full.measure["min_s"], full.epochs) == (30.0, 15)
    assert (smoke.measure["max_s"], smoke.measure["min_blocks"], smoke.epochs) == (10.0, 1, 1)


# -- help ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def help_text() -> str:
    done = subprocess.run([sys.executable, ROOT / "train.py", "--help"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_help_fits_two_screens(help_text: str) -> None:
    lines = help_text.splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 120


def test_help_names_every_group_option_and_key(help_text: str) -> None:
    words = set(re.findall(r"[\w.]+", help_text))
    assert set(ROOT_KEYS) <= words
    listed = dict(re.findall(r"^(\w+): +((?:.|\n {13})*)$", help_text, re.M))
    assert {group: re.split(r",\s+", listed[group]) for group in GROUPS} == {
        group: [option for g, option in OPTIONS if g == group] for group in GROUPS
    }
    for field in dataclasses.fields(schema.TrainConfig):
        node = composed()[field.name]
        text = help_text.partition(f"\n{field.name}.*")[2].partition("*")[0]
        if field.name in GROUPS and dataclasses.is_dataclass(OmegaConf.get_type(node)) and len(node) > 1:
            assert {key for key in node if not key.startswith("_")} <= set(re.findall(r"\w+", text)), field.name
    assert {field.name for field in dataclasses.fields(schema.TimeoutsConfig)} <= set(re.findall(r"\w+", help_text))


def test_help_tells_the_true_defaults(help_text: str) -> None:
    config = composed()
    stated = dict(re.findall(r"^(\w+) .*?\[(\w+)[\]:]", help_text, re.M))
    stated |= {"epochs": "null"}
    assert len(stated) >= 15
    assert {key: value for key, value in stated.items() if str(OmegaConf.to_container(config, enum_to_str=True)[key]).lower().replace(
        "none", "null") != value} == {}  # fmt: skip
    choices = dict(re.findall(r"\b(\w+)=(\w+)", help_text.partition("The defaults:")[2].partition("\n\n")[0]))
    assert choices == {group: config[group].name for group in GROUPS if group != "study"}


def test_cfg_job_prints_the_configuration(train: Train, tmp_path: Path) -> None:
    result = train("--cfg", "job", "network=fcn_r", "threads=2")
    assert result.code == 0
    printed = OmegaConf.create(result.out)
    assert (printed.network.name, printed.threads, set(printed)) == ("fcn_r", 2, {*GROUPS, *ROOT_KEYS})
    assert list(tmp_path.iterdir()) == []


# -- crosstrain ------------------------------------------------------------------------------------------------------------


def crosstrain(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "crosstrain.cli", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_plan_shows_expectations_and_makes_nothing(tmp_path: Path) -> None:
    done = crosstrain(tmp_path, "plan", "-m", "framework=fake,torch", "gpus=null,64", "dry_run=false")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["1. lenet-fake-auto", "2. lenet-fake-64gpu", "3. lenet-torch-auto", "4. lenet-torch-64gpu"]
    assert rows[0][1:4] == ["64", "ok, then 15 epochs", "5 s - 60 s"]
    assert rows[0][4] == "2 MB"
    assert rows[1][2].startswith("unsupported: asked for 64 GPUs; this machine has ")
    assert "nothing was started" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_plan_expects_a_missing_interpreter(front: Front) -> None:
    code, out, _ = front("framework=torch", "framework.python=/no/such/python", "dry_run=true")
    assert code == 0
    assert "env_missing: framework.python=/no/such/python" in out


@pytest.mark.parametrize("arguments", [["bacth_size=3"], ["-m", "seed=1,-1"], ["--foo"]], ids=" ".join)
def test_plan_tells_wrong_input_as_train_does(tmp_path: Path, arguments: list[str]) -> None:
    done = crosstrain(tmp_path, "plan", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


def test_crosstrain_command_itself(tmp_path: Path) -> None:
    assert crosstrain(tmp_path, "--help").returncode == 0
    bare = crosstrain(tmp_path)
    assert bare.returncode == 2
    assert "plan" in bare.stdout and "parity" in bare.stdout
    unknown = crosstrain(tmp_path, "plam")
    assert unknown.returncode == 2
    assert "'plam'" in unknown.stderr and "plan" in unknown.stderr
    assert "batch_size" in crosstrain(tmp_path, "plan", "--help").stdout
