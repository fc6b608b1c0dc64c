"""What is CNTK's own: which of its learners it takes, what it does about its kernels' limits, and that mpirun starts its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstrain.environments import Environment
from crosstrain.errors import OutcomeError
from crosstrain.launch import mpi
from crosstrain.networks import Network, Spec
from crosstrain.networks.reference import Reference
from crosstrain.networks.spec import classes, image, tokens
from test_adapters import STEPS, Answer, arrays_of, ask, batch_of, close, run_of, small_net

__all__ = ["ask"]  # the fixture


def agrees(answer: Answer, spec: Spec, optimizer: dict[str, Any]) -> None:
    """Losses and parameters after some steps are the reference's."""
    assert answer.arrays, answer.facts
    reference = Reference(spec, arrays_of(spec), optimizer)
    close(np.array(answer.facts["losses"]), np.array([reference.step(*batch_of(spec)) for _ in range(STEPS)]))
    for name, value in {**reference.parameters, **reference.states}.items():
        close(answer.arrays["last." + name], value)


def test_its_own_learners_and_the_clipping_one_are_the_one_form_of_sgd(ask: Any) -> None:
    """Without clipping these are momentum_sgd and sgd, one for the parameters that decay and one for the others."""
    rules = [
        {"name": "sgd", "learning_rate": 0.05, "momentum": momentum, "weight_decay": decay, "clip_norm": clip}
        for momentum in (0.0, 0.9)
        for decay in (0.0, 0.1)
        for clip in (None, 0.3)
    ]
    spec = small_net()
    assert {parameter.decay for parameter in spec.parameters} == {True, False}
    for rule, answer in zip(rules, ask("cntk", [(spec, {"optimizer": rule}) for rule in rules]), strict=True):
        agrees(answer, spec, rule)


def grouped(groups: int, channels: int, out: int) -> Spec:
    net = Network("case", image(2, 6, 5), classes(4))
    net.add("conv2d", "first", out_channels=channels, kernel=1)
    net.add("relu", "relu")
    net.add("conv2d", "groups", out_channels=out, kernel=3, padding=1, groups=groups)
    net.add("flatten", "flat")
    net.add("linear", "head", out=4)
    return net.finish()


def test_groups_are_the_references_whether_mkl_can_do_them_or_not(ask: Any) -> None:
    specs = [grouped(2, 32, 64), grouped(2, 24, 24), grouped(3, 3, 6), grouped(2, 32, 24)]
    for spec, answer in zip(specs, ask("cntk", [(spec, {"threads": 2}) for spec in specs]), strict=True):
        agrees(answer, spec, run_of("cntk", spec)["optimizer"])


def test_a_frozen_lstm_stays(ask: Any) -> None:
    net = Network("case", tokens(5), classes(4))
    net.add("embedding", "first", vocabulary=7, width=6)
    net.add("lstm", "frozen", hidden=3, trained=False)
    net.add("lstm", "lstm", hidden=3)
    net.add("select_token", "last", index=-1)
    net.add("linear", "head", out=4)
    spec = net.finish()
    (answer,) = ask("cntk", [(spec, {})])
    agrees(answer, spec, run_of("cntk", spec)["optimizer"])
    assert "g.frozen.weight_ih" not in answer.arrays and "g.lstm.weight_ih" in answer.arrays


def test_without_mpirun_there_are_no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = {"framework": {"name": "cntk"}, "folder": str(tmp_path), "world_size": 2}
    with pytest.raises(OutcomeError) as caught:
        mpi.start(run, Environment(tmp_path / "python", "", managed=True, isolated=True), {})
    assert (caught.value.outcome, caught.value.hint) == ("env_missing", "apt-get install openmpi-bin")
    assert list(tmp_path.iterdir()) == []
