"""Autoencoder stages, recurrent nets and transformers in PyTorch and MXNet: proven on the ladder, and trained through the front door."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import PUBLISHED, QUICK, Train, store
from crosstrain.certificates import Certificate
from crosstrain.networks import Spec
from crosstrain.networks.autoencoder import autoencoder
from crosstrain.networks.lstm import lstm_classifier, lstm_language
from crosstrain.networks.transformer import gpt2, vit
from ladders import COMPILE, climb

SMALL: dict[str, Spec] = {
    "ae1": autoencoder("ae1", widths=(12, 8, 6), inputs=20),
    "ae3": autoencoder("ae3", widths=(12, 8, 6), inputs=20),
    "finetune": autoencoder("finetune", widths=(12, 8, 6), inputs=20),
    "lstm_ptb": lstm_language(steps=8, vocabulary=50, width=16),
    "lstm_imdb": lstm_classifier(length=10, vocabulary=50, width=16),
    "gpt2_small": gpt2(steps=8, vocabulary=50, width=24, layers=2, heads=3, embedding_dropout=0.1, residual_dropout=0.1),
    "vit_b16": vit(image_size=16, patch=4, width=24, layers=2, heads=3, num_classes=10),
}


@pytest.fixture(scope="module", params=["torch", "mxnet"])
def framework(request: pytest.FixtureRequest, framework_python: Callable[[str], Path]) -> tuple[str, Path]:
    """Name and interpreter. Of the module, so that it is looked up in the user's own cache."""
    return request.param, framework_python(request.param)


def failed(certificate: Certificate) -> list[str]:
    return [level.level for level in certificate.levels if level.state == "failed"]


@pytest.mark.parametrize("name", SMALL)
def test_a_framework_is_proven(name: str, framework: tuple[str, Path], tmp_path: Path) -> None:
    certificate = climb(SMALL[name], framework, tmp_path)
    assert certificate.proven, certificate.tag()
    assert set(certificate.deviations) == {op.name for op in SMALL[name].ops if op.op == "lstm"}


def melt(run: dict[str, Any]) -> None:
    for parameter in run["network"]["parameters"]:
        parameter["trained"] = True


def test_a_frozen_layer_that_is_trained_all_the_same_fails(framework: tuple[str, Path], tmp_path: Path) -> None:
    assert "6" in failed(climb(SMALL["ae3"], framework, tmp_path, melt))


def test_another_target_fails(framework: tuple[str, Path], tmp_path: Path) -> None:
    """Reconstructing a layer of the same width that is not the one below."""
    spec = autoencoder("ae3", widths=(12, 8, 8), inputs=20)

    def deeper(run: dict[str, Any]) -> None:
        run["network"]["target"]["name"] = "code3"

    assert failed(climb(spec, framework, tmp_path, deeper))[0] == "5"


# -- through the front door ----------------------------------------------------------------------------------------------------

TINY_LSTM = ["network=lstm_ptb", "network.vocabulary=60", "network.width=24", "network.steps=8", "batch_size=16"]


def test_a_language_model_learns_a_text(train: Train, framework_python: Callable[[str], Path], tmp_path: Path) -> None:
    """Falling perplexity = exp(test loss); accuracy is per token; the batch counts sequences."""
    for name in COMPILE:
        framework_python(name)
    verse = "the cat sat on the mat and the dog sat on the log\n"
    (tmp_path / "verse.txt").write_text(verse * 1000)
    data = ["data=text", f"data_dir={tmp_path / 'verse.txt'}", "epochs=3"]
    result = train("-m", "framework=torch,mxnet", *TINY_LSTM, *data, *QUICK, "threads=1", "device=cpu")
    assert result.code == 0, result
    client = store(tmp_path)
    assert len(result.runs) == 2
    ends = []
    for run in result.runs:
        assert run.data.tags["outcome"] in PUBLISHED
        history = client.get_metric_history(run.info.run_id, "epoch/perplexity")
        perplexities = [m.value for m in sorted(history, key=lambda m: m.step)]
        losses = [m.value for m in sorted(client.get_metric_history(run.info.run_id, "epoch/test_loss"), key=lambda m: m.step)]
        assert [m.step for m in history] == [1, 2, 3]
        assert perplexities == pytest.approx([math.exp(loss) for loss in losses], rel=1e-3)
        # knowing how frequent each word is gives 7.7
        assert perplexities[0] > perplexities[-1] and perplexities[-1] < 4
        assert run.data.metrics["perplexity"] == pytest.approx(perplexities[-1], rel=1e-3)
        # per token: counted per sequence it would be up to 8
        assert 0.05 < run.data.metrics["accuracy"] <= 1
        epoch_accuracy = client.get_metric_history(run.info.run_id, "iter/accuracy")
        assert epoch_accuracy and all(0 <= m.value <= 1 for m in epoch_accuracy)
        assert (run.data.params["batch_global"], run.data.params["data"]) == ("16", "text")
        ends.append(perplexities[-1])
    assert ends[0] == pytest.approx(ends[1], rel=0.02)


def test_a_stage_of_an_autoencoder_is_trained_and_has_no_perplexity(
    train: Train, framework_python: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in COMPILE:
        framework_python(name)
    network = ["network=autoencoder_small", "network.stage=ae2", "network.widths=[32,16,8]", "data=digits", "epochs=3"]
    result = train("-m", "framework=torch,mxnet", *network, *QUICK, "threads=1", "device=cpu")
    assert result.code == 0, result
    client = store(tmp_path)
    ends = []
    for run in result.runs:
        losses = [m.value for m in sorted(client.get_metric_history(run.info.run_id, "epoch/test_loss"), key=lambda m: m.step)]
        assert len(losses) == 3 and losses[-1] < losses[0]
        assert not {"perplexity", "accuracy"} & set(run.data.metrics)
        ends.append(losses[-1])
    assert len(ends) == 2 and ends[0] == pytest.approx(ends[1], rel=1e-3)
