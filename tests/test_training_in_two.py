"""A language model and a stage of an autoencoder, trained through the front door in two frameworks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import PUBLISHED, QUICK, Train, store

# -- through the front door ----------------------------------------------------------------------------------------------------

FRAMEWORKS = ("torch", "mxnet")
TINY_LSTM = ["network=lstm_ptb", "network.vocabulary=60", "network.width=24", "network.steps=8", "batch_size=16"]


@pytest.mark.long
def test_a_language_model_learns_a_text(train: Train, framework_python: Callable[[str], Path], tmp_path: Path) -> None:
    """Falling perplexity = exp(test loss); accuracy is per token; the batch counts sequences."""
    for name in FRAMEWORKS:
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
    for name in FRAMEWORKS:
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
