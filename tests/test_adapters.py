"""Every adapter in its framework's own interpreter: each op against the float64 reference, and the contract."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import contracts
from crosstrain.networks import Network, Spec
from crosstrain.networks.attributes import ATTRIBUTES
from crosstrain.networks.reference import Reference
from crosstrain.networks.spec import classes, image, itself, tokens, values, vector
from crosstrain_worker.frameworks.on_torch import has_code

HERE = Path(__file__).parent
FRAMEWORKS = contracts.NAMES
STEPS = 5
BATCH = 6
IMAGE, VECTOR, TOKENS = image(2, 6, 5), vector(4), tokens(5)
LRN_OF_8 = {"size": 5, "alpha": 1.0, "beta": 0.75, "k": 1.0}
Ops = list[tuple[str, dict[str, Any]]]

# Each entry: the input and the ops between a first layer with parameters and the head (so that input gradients count too).
CASES: dict[str, tuple[dict[str, Any], Ops]] = {
    "linear": (VECTOR, [("linear", {"out": 5})]),
    "linear without bias": (VECTOR, [("linear", {"out": 5, "bias": False})]),
    "linear over time": (TOKENS, [("linear", {"out": 5})]),
    "tied_linear": (VECTOR, [("tied_linear", {"tied": "first", "transpose": True})]),
    "tied_linear to an embedding": (TOKENS, [("tied_linear", {"tied": "first", "transpose": False, "bias": False})]),
    "conv2d": (IMAGE, [("conv2d", {"out_channels": 4, "kernel": 3, "padding": 1})]),
    "conv2d, other padding on each axis": (IMAGE, [("conv2d", {"out_channels": 4, "kernel": [5, 3], "padding": [2, 2, 0, 0]})]),
    "conv2d, one-sided": (IMAGE, [("conv2d", {"out_channels": 2, "kernel": [3, 2], "stride": 2, "padding": [0, 1, 2, 0]})]),
    "conv2d, 3x3 stride 2 on 32x32": (image(2, 33, 33), [("conv2d", {"out_channels": 3, "kernel": 3, "stride": 2, "padding": 1})]),
    "conv2d, 3x3 stride 2 on 32x32, one-sided": (
        image(2, 33, 33),
        [("conv2d", {"out_channels": 3, "kernel": 3, "stride": 2, "padding": [0, 1, 0, 1]})],
    ),
    "conv2d, dilated groups": (
        IMAGE,
        [("conv2d", {"out_channels": 6, "kernel": 2, "stride": [1, 2], "dilation": [2, 1], "groups": 3, "bias": False})],
    ),
    "max_pool": (IMAGE, [("max_pool", {"kernel": [3, 2], "stride": [2, 1], "padding": [1, 1, 0, 0]})]),
    "max_pool, one-sided": (IMAGE, [("max_pool", {"kernel": 3, "stride": 2, "padding": [1, 0, 0, 1]})]),
    "max_pool, padding over half the kernel": (IMAGE, [("max_pool", {"kernel": 3, "stride": 2, "padding": 2})]),
    "max_pool rounding up": (IMAGE, [("max_pool", {"kernel": 3, "stride": [2, 3], "ceil": True})]),
    "max_pool rounding up, one-sided": (IMAGE, [("max_pool", {"kernel": 2, "stride": 3, "padding": [0, 1, 1, 0], "ceil": True})]),
    "max_pool rounding up, last window dropped": (IMAGE, [("max_pool", {"kernel": 2, "stride": 3, "padding": 1, "ceil": True})]),
    "avg_pool": (IMAGE, [("avg_pool", {"kernel": 3, "stride": 2, "padding": 1})]),
    "avg_pool, input only": (IMAGE, [("avg_pool", {"kernel": 3, "stride": 2, "padding": 1, "count_include_pad": False})]),
    "avg_pool, one-sided": (IMAGE, [("avg_pool", {"kernel": 3, "stride": 2, "padding": [1, 0, 0, 1]})]),
    "avg_pool rounding up": (IMAGE, [("avg_pool", {"kernel": 3, "stride": [2, 3], "padding": 0, "ceil": True})]),
    "avg_pool rounding up, padded": (IMAGE, [("avg_pool", {"kernel": 3, "stride": 3, "padding": 1, "ceil": True})]),
    "avg_pool rounding up, input only": (
        IMAGE,
        [("avg_pool", {"kernel": 3, "stride": [2, 3], "padding": 1, "ceil": True, "count_include_pad": False})],
    ),
    "avg_pool, one-sided, input only": (
        IMAGE,
        [("avg_pool", {"kernel": 3, "stride": 2, "padding": [1, 0, 0, 1], "count_include_pad": False})],
    ),
    "global_avg_pool": (IMAGE, [("global_avg_pool", {})]),
    "batch_norm": (IMAGE, [("batch_norm", {"decay": 0.8, "epsilon": 1e-3})]),
    "batch_norm, biased": (IMAGE, [("batch_norm", {"variance": "biased"})]),
    "batch_norm of vectors": (VECTOR, [("batch_norm", {})]),
    "batch_norm of vectors, biased": (VECTOR, [("batch_norm", {"variance": "biased"})]),
    "layer_norm": (TOKENS, [("layer_norm", {"epsilon": 1e-3})]),
    "lrn": (IMAGE, [("lrn", {"size": 3, "alpha": 0.8, "beta": 0.75, "k": 1.5})]),
    # MXNet's own LRN gives a wrong input gradient here: 8 channels, and a convolution or a pool behind it.
    "lrn of 8 channels, pool": (
        image(3, 9, 9),
        [("conv2d", {"out_channels": 8, "kernel": 3}), ("lrn", LRN_OF_8), ("max_pool", {"kernel": 3, "stride": 2})],
    ),
    "lrn of 8 channels, conv2d": (
        image(3, 9, 9),
        [
            ("conv2d", {"out_channels": 8, "kernel": 3}),
            ("lrn", LRN_OF_8),
            ("conv2d", {"out_channels": 8, "kernel": 3}),
        ],
    ),
    "relu": (VECTOR, [("relu", {})]),
    "relu and another reader": (IMAGE, [("relu", {}), ("add", {"inputs": ["op0", "first"]})]),
    "relu after add": (IMAGE, [("tanh", {}), ("add", {"inputs": ["op0", "first"]}), ("relu", {})]),
    "tanh": (VECTOR, [("tanh", {})]),
    "sigmoid": (VECTOR, [("sigmoid", {}), ("relu", {})]),
    "softmax": (VECTOR, [("softmax", {})]),
    "gelu": (VECTOR, [("gelu", {})]),
    "gelu, tanh": (VECTOR, [("gelu", {"approximate": "tanh"})]),
    "dropout off": (VECTOR, [("dropout", {"rate": 0.0})]),
    "add of three": (IMAGE, [("tanh", {}), ("add", {"inputs": ["first", "op0", "first"]})]),
    "concat": (IMAGE, [("tanh", {}), ("concat", {"inputs": ["op0", "first"]})]),
    "channel_pad_shortcut": (IMAGE, [("channel_pad_shortcut", {"out_channels": 5, "stride": 2})]),
    "flatten": (IMAGE, [("flatten", {})]),
    "embedding": (TOKENS, []),
    "position_embedding": (TOKENS, [("position_embedding", {})]),
    "class_token": (TOKENS, [("class_token", {}), ("select_token", {"index": 0})]),
    "patches_to_tokens": (IMAGE, [("patches_to_tokens", {})]),
    "select_token": (TOKENS, [("select_token", {"index": -1})]),
    "select_token in the middle": (TOKENS, [("select_token", {"index": 2})]),
    "lstm": (TOKENS, [("lstm", {"hidden": 3})]),
    "two lstms": (TOKENS, [("lstm", {"hidden": 3}), ("lstm", {"hidden": 2})]),
    "attention": (TOKENS, [("attention", {"heads": 2, "causal": False})]),
    "causal attention": (TOKENS, [("attention", {"heads": 3, "causal": True})]),
    "masked_mean": (TOKENS, [("masked_mean", {})]),
    "squared error": (VECTOR, []),
    "autoencoder": (VECTOR, [("sigmoid", {}), ("tied_linear", {"tied": "first", "transpose": True})]),
    "names that Python keeps for itself": (VECTOR, [("tanh", {"name": "forward"}), ("tanh", {"name": "lambda"})]),
}

def net_of(given: dict[str, Any], ops: Ops, target: dict[str, Any] | None = None, loss: str = "softmax_cross_entropy") -> Spec:
    net = Network("case", given, target or classes(4))
    if given["kind"] == "image":
        net.add("conv2d", "first", out_channels=3, kernel=2)
    elif given["kind"] == "vector":
        net.add("linear", "first", out=6)
    else:
        net.add("embedding", "first", vocabulary=7, width=6)
    for i, (op, attributes) in enumerate(ops):
        net.add(op, **{"name": f"op{i}", **attributes})
    if target is None:
        if len(net.ops[-1].shape) == 3:
            net.add("flatten", "flat")
        net.add("linear", "head", out=4)
    elif target["kind"] == "values":
        net.add("linear", "head", out=3)
    return net.finish(loss=loss)


def spec_of(case: str) -> Spec:
    given, ops = CASES[case]
    if case == "autoencoder":
        return net_of(given, ops, itself(), "mean_squared_error")
    if case == "squared error":
        return net_of(given, ops, values(3), "mean_squared_error")
    return net_of(given, ops)


def small_net() -> Spec:
    """A bit of everything that a setting may change: convolution, batch norm, a branch, pooling, linear."""
    ops: Ops = [
        ("batch_norm", {}),
        ("relu", {}),
        ("conv2d", {"out_channels": 3, "kernel": 3, "padding": 1}),
        ("add", {"inputs": ["op1", "op2"]}),
        ("max_pool", {"kernel": 2, "stride": 2}),
    ]
    return net_of(IMAGE, ops)


def dropout_net() -> Spec:
    """The output is that of the dropout itself."""
    net = Network("case", image(1, 30, 30), itself())
    net.add("conv2d", "first", out_channels=1, kernel=1)
    net.add("dropout", "drop", rate=0.25)
    return net.finish(loss="mean_squared_error")


def arrays_of(spec: Spec) -> dict[str, np.ndarray[Any, Any]]:
    """Random also for biases and norms; with many inputs smaller, so that no softmax is sure of itself."""
    random = np.random.RandomState(0)
    spread = {v.name: 0.5 / max(1.0, np.sqrt(v.size / v.shape[0] / 12)) for v in spec.parameters + spec.states}
    arrays = {v.name: random.normal(0.1, 0.5, v.shape) * 2 * spread[v.name] for v in spec.parameters + spec.states}
    arrays = {name: a.astype("float32") for name, a in arrays.items()}
    return {name: np.abs(a) + np.float32(0.5) if name.endswith("running_var") else a for name, a in arrays.items()}


def batch_of(spec: Spec, n: int = BATCH) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    random = np.random.RandomState(1)
    shape = (n, *spec.input["shape"])
    if spec.input["kind"] == "tokens":
        inputs = random.randint(1, 7, shape).astype("int32")
        inputs[0, 3:] = 0
        inputs[1] = 0
    else:
        inputs = random.normal(size=shape).astype("float32")
    if spec.target["kind"] == "class":
        return inputs, random.randint(0, spec.target["classes"], (n, *spec.output_shape[:-1]))
    return inputs, None if spec.target["kind"] == "input" else random.normal(size=(n, *spec.output_shape)).astype("float32")


def run_of(name: str, spec: Spec, **changes: Any) -> dict[str, Any]:
    optimizer = {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.01, "clip_norm": 0.5}
    settings = contracts.settings(name, **changes.pop("framework", {}))
    run = {"network": spec.to_json(), "framework": settings, "optimizer": optimizer, "task": "training", "precision": "fp32"}
    run |= {"device": "cpu", "gpus": [], "threads": 1, "replicas": 1, "world_size": 1, "batch_global": BATCH, "batch_per_replica": BATCH}
    return {**run, "seed": 0, **changes}


@dataclass
class Answer:
    """What one framework said about one case: facts, and the arrays it wrote."""

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def ask(framework_python: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """ask(framework, [(spec, changes of the run)]) → [Answer], all in one process of that framework's interpreter."""
    tmp_path_factory.getbasetemp()  # here: two threads that ask first at once get two, and pytest refuses one of them

    def run(framework: str, wanted: list[tuple[Spec, dict[str, Any]]], **environment: str) -> list[Answer]:
        folder = tmp_path_factory.mktemp(framework)
        cases = [{"run": run_of(framework, spec, **changes), "steps": STEPS} for spec, changes in wanted]
        (folder / "cases.json").write_text(json.dumps(cases))
        for i, (spec, _) in enumerate(wanted):
            inputs, targets = batch_of(spec)
            given = {"inputs": inputs} if targets is None else {"inputs": inputs, "targets": targets}
            np.savez(folder / f"{i}.npz", **given, **{f"w.{name}": a for name, a in arrays_of(spec).items()})
        script = [str(framework_python(framework)), "-B", str(HERE / "adapter_worker.py")]
        done = subprocess.run(
            [*script, str(HERE.parent / "src"), str(folder)],
            capture_output=True,
            text=True,
            timeout=1500,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), **environment},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        answers = []
        for i, facts in enumerate(json.loads((folder / "results.json").read_text())):
            path = folder / f"{i}.out.npz"
            answers.append(Answer(facts, dict(np.load(path)) if path.exists() else {}))
        return answers

    return run


def questions(framework: str) -> dict[tuple[str, str], tuple[Spec, dict[str, Any]]]:
    """Everything this file asks one framework, by (kind, name): (network, changes of the run)."""
    contract = contracts.OF[framework]
    asked: dict[tuple[str, str], tuple[Spec, dict[str, Any]]] = {}
    for compiled in contract.MODES:
        asked |= {(compiled, case): (spec_of(case), {"framework": {"compile": compiled}}) for case in CASES}
    asked |= {("setting", name): (small_net(), changes) for name, (changes, _) in contract.SETTINGS.items()}
    asked |= {("refused", name): (small_net(), changes) for name, (changes, _) in contract.REFUSED.items()}
    return asked | {("dropout", ""): (dropout_net(), {})}


def cases(done: bool) -> list[tuple[str, str, str]]:
    """(framework, compile, case) of everything that a framework does, or has to refuse."""
    return [
        (framework, mode, case)
        for framework in FRAMEWORKS
        for mode in contracts.OF[framework].MODES
        for case in CASES
        if (case not in contracts.OF[framework].UNSUPPORTED) is done
    ]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, ask: Any, framework_python: Callable[[str], Path]) -> Iterator[Any]:
    """answers(framework)[kind, name] → Answer: asked once, in one process of each framework, some at a time."""
    with ThreadPoolExecutor(contracts.AT_A_TIME) as pool:
        asked = {framework: questions(framework) for framework in contracts.chosen(request, framework_python)}
        told = {framework: pool.submit(ask, framework, list(wanted.values())) for framework, wanted in asked.items()}

        def get(framework: str) -> dict[tuple[str, str], Answer]:
            framework_python(framework)  # or skipped
            return dict(zip(asked[framework], told[framework].result(), strict=True))

        yield get
        pool.shutdown(cancel_futures=True)


def close(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], tolerance: float = 1e-4) -> None:
    """max|a−b| / max|b| within the tolerance; a gradient that is 0 but for rounding is compared with 1."""
    assert got.shape == wanted.shape
    scale = np.abs(wanted).max()
    assert np.abs(got - wanted).max() <= tolerance * (scale if scale > 1e-6 else 1.0)


@pytest.mark.parametrize(("framework", "compiled", "case"), cases(done=True))
def test_each_op_is_that_of_the_reference(framework: str, compiled: str, case: str, answers: Any) -> None:
    answer = answers(framework)[compiled, case]
    assert answer.arrays, answer.facts
    spec, weights = spec_of(case), arrays_of(spec_of(case))
    inputs, targets = batch_of(spec)
    optimizer = run_of(framework, spec)["optimizer"]
    close(answer.arrays["output"], Reference(spec, weights).output(inputs))
    close(answer.arrays["training_output"], Reference(spec, weights).output(inputs, training=True))
    reference = Reference(spec, weights, optimizer)
    for name, gradient in reference.gradients(inputs, targets)[1].items():
        close(answer.arrays["g." + name], gradient)
    losses = [reference.step(inputs, targets)]
    for name, value in reference.parameters.items():
        close(answer.arrays["one." + name], value)
    losses += [reference.step(inputs, targets) for _ in range(STEPS - 1)]
    close(np.array(answer.facts["losses"]), np.array(losses))
    for name, value in reference.parameters.items():
        close(answer.arrays["last." + name], value)
    for name, value in reference.states.items():
        deviates = name.endswith("running_var") and name.split(".")[0] in answer.facts["deviations"]
        got = answer.arrays["last." + name]
        if deviates:
            # a declared difference must be one
            assert np.abs(got - value).max() > 1e-3 * np.abs(value).max()
        else:
            close(got, value)


@pytest.mark.parametrize(("framework", "compiled", "case"), cases(done=True))
def test_the_contract_holds(framework: str, compiled: str, case: str, answers: Any) -> None:
    facts = answers(framework)[compiled, case].facts
    spec, weights = spec_of(case), arrays_of(spec_of(case))
    inputs, targets = batch_of(spec)
    output = Reference(spec, weights).output(inputs)
    assert facts["loaded"], "read back is not bit-equal"
    assert facts["untouched"], "output, gradients, forward or evaluate changed a parameter or state"
    assert facts["gradient_untouched"], "gradient changed a parameter"
    assert facts["forward_correct"] is None
    assert facts["forward"] == pytest.approx(output.flat[0], rel=1e-3, abs=1e-4)
    loss, correct = facts["evaluated"]
    assert loss == pytest.approx(Reference(spec, weights).loss(inputs, targets, training=False), rel=1e-4)
    assert correct == (0 if spec.target["kind"] != "class" else int((output.argmax(-1) == targets).sum()))
    assert facts["losses"][-1] < facts["losses"][0]
    assert facts["again"] == facts["losses"], "the trajectory after load is another one"
    assert facts["same_end"]
    assert facts["probe"][0] != facts["probe"][1]
    assert facts["counted"][0] == pytest.approx(facts["losses"][0], rel=1e-6)
    if spec.target["kind"] == "class":
        training = Reference(spec, weights).output(inputs, training=True)
        assert facts["counted"][1] == int((training.argmax(-1) == targets).sum())
    assert facts["peak"] is None


def test_the_cases_cover_every_op_of_the_design() -> None:
    assert {op.op for case in CASES for op in spec_of(case).ops} == set(ATTRIBUTES)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_the_framework_differs_in_is_declared(framework: str, answers: Any) -> None:
    for mode, case in ((mode, case) for f, mode, case in cases(done=True) if f == framework):
        told, expected = answers(framework)[mode, case].facts["deviations"], contracts.deviations(framework, spec_of(case))
        assert set(told) == set(expected), case
        assert all(words in told[op] for op, words in expected.items()), case


@pytest.mark.parametrize(("framework", "compiled", "case"), cases(done=False))
def test_an_op_that_can_not_be_mapped_is_named(framework: str, compiled: str, case: str, answers: Any) -> None:
    reason = answers(framework)[compiled, case].facts["unsupported"]
    assert contracts.OF[framework].UNSUPPORTED[case] in reason and "\n" not in reason
    assert any(op.name in reason for op in spec_of(case).ops) or "loss" in reason


@pytest.mark.parametrize(("framework", "what"), [(f, what) for f in FRAMEWORKS for what in contracts.OF[f].REFUSED])
def test_what_can_not_be_done_is_refused_with_its_reason(framework: str, what: str, answers: Any) -> None:
    facts = answers(framework)["refused", what].facts
    reason, hint = facts["unsupported"], facts["hint"]
    assert contracts.OF[framework].REFUSED[what][1] in reason
    assert "\n" not in reason + hint


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (["sm_80", "sm_90"], (9, 0), True),
        (["sm_50", "sm_86"], (8, 9), True),
        (["sm_50", "sm_86"], (9, 0), False),
        (["sm_89"], (8, 6), False),
        (["sm_50", "compute_86"], (9, 0), True),
        (["compute_90"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_90a"], (10, 0), False),
        (["sm_120"], (12, 1), True),
        ([], (9, 0), False),
    ],
)
def test_a_gpu_without_code_in_this_build_is_told(architectures: list[str], capability: tuple[int, int], runs: bool) -> None:
    assert has_code(architectures, capability) is runs


@pytest.mark.parametrize(("framework", "setting"), [(f, s) for f in FRAMEWORKS for s in contracts.OF[f].SETTINGS])
def test_a_setting_takes_effect_and_changes_no_number(framework: str, setting: str, answers: Any) -> None:
    spec, effective = small_net(), contracts.OF[framework].SETTINGS[setting][1]
    answer = answers(framework)["setting", setting]
    assert {key: answer.facts["effective"][key] for key in effective} == effective
    assert {"framework", "python", "numpy"} <= set(answer.facts["versions"])
    reference = Reference(spec, arrays_of(spec), run_of(framework, spec)["optimizer"])
    losses = np.array([reference.step(*batch_of(spec)) for _ in range(STEPS)])
    # bfloat16 has 8 bits of mantissa
    tolerance = 5e-2 if setting == "bf16" else 1e-4
    close(np.array(answer.facts["losses"]), losses, tolerance)
    if setting == "bf16":
        assert np.abs(np.array(answer.facts["losses"]) - losses).max() > 1e-5, "as exact as fp32: autocast did nothing"
    assert answer.facts["loaded"] and answer.facts["untouched"] and answer.facts["same_end"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_threads_asked_for_are_taken(framework: str, ask: Any) -> None:
    """In a process of its own: most frameworks take them when they are imported."""
    (answer,) = ask(framework, [(small_net(), {"threads": 2})])
    assert answer.facts["effective"]["threads"] == 2


def test_compile_needs_a_compiler(ask: Any, tmp_path: Path) -> None:
    changes = {"framework": {"compile": "on"}}
    (answer,) = ask("torch", [(small_net(), changes)], CXX=str(tmp_path / "none"))
    assert "C++ compiler" in answer.facts["unsupported"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dropout_keeps_its_share_scaled_and_is_off_in_evaluation(framework: str, answers: Any) -> None:
    spec, answer = dropout_net(), answers(framework)["dropout", ""]
    close(answer.arrays["output"], Reference(spec, arrays_of(spec)).output(batch_of(spec)[0]))
    kept = answer.arrays["training_output"] != 0
    assert kept.mean() == pytest.approx(0.75, abs=0.02)
    np.testing.assert_allclose(answer.arrays["training_output"][kept], answer.arrays["output"][kept] / 0.75, rtol=1e-5)
    assert answer.facts["again"] == answer.facts["losses"], "other dropout masks after load"
    assert len(set(answer.facts["losses"])) == STEPS
