"""Texts as data: words, vocabularies and windows; the official formats of ptb and imdb, and any plain text."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from crosstrain.data import DataSet, Request, prepare
from crosstrain.data import imdb as imdb_module
from crosstrain.data import ptb as ptb_module
from crosstrain.data.download import File, Source
from crosstrain.data.language import language_arrays, split, vocabulary, windows
from crosstrain.errors import OutcomeError
from crosstrain.networks.lstm import lstm_classifier, lstm_language
from crosstrain.networks.transformer import gpt2

CONF = Path(__file__).parents[1] / "conf" / "data"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CROSSTRAIN_DATA_MIRROR", "http://127.0.0.1:9")


def make(name: str, network: dict[str, Any], data_dir: Path | None, batch: int = 2, **changes: Any) -> DataSet:
    config = {**yaml.safe_load((CONF / f"{name}.yaml").read_text()), **changes}
    return prepare(config, network, 0, data_dir, lambda line: None, batch)


def language(steps: int = 3, vocabulary: int = 50) -> dict[str, Any]:
    return lstm_language(steps=steps, vocabulary=vocabulary, width=4, layers=1).to_json()


def classifier(length: int = 5, vocabulary: int = 50) -> dict[str, Any]:
    return lstm_classifier(length=length, vocabulary=vocabulary, width=4).to_json()


def both(data: DataSet) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    assert data.test is not None and data.train.targets is not None and data.test.targets is not None
    paths = (data.train.inputs, data.train.targets, data.test.inputs, data.test.targets)
    a, b, c, d = (np.load(path) for path in paths)
    return a, b, c, d


def missing(make_it: Callable[[], Any]) -> OutcomeError:
    with pytest.raises(OutcomeError) as caught:
        make_it()
    assert "\n" not in caught.value.message
    return caught.value


# -- words, vocabulary, windows --------------------------------------------------------------------------------------------


def test_words_keep_apostrophes_and_signs_are_words() -> None:
    assert split("Don't stop: 3.5 “Grün”!") == ["don't", "stop", ":", "3", ".", "5", "“", "grün", "”", "!"]


def test_the_vocabulary_is_by_frequency_then_by_code_points() -> None:
    words = ["b", "a", "c", "c", "<unk>", "<unk>", "<unk>", "d"]
    assert vocabulary(Counter(words), 5, ("<pad>", "<unk>")) == {"<pad>": 0, "<unk>": 1, "c": 2, "a": 3, "b": 4}


def test_windows_follow_each_other_and_the_target_is_the_next_token() -> None:
    inputs, targets = windows(np.arange(10, dtype=np.int32), 3)
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]] and targets.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert (inputs.dtype, targets.dtype) == (np.int32, np.int64)
    # a window needs the token behind it
    assert len(windows(np.arange(9, dtype=np.int32), 3)[0]) == 2
    assert len(windows(np.arange(0, dtype=np.int32), 3)[0]) == 0


def test_words_of_the_test_text_alone_are_unknown() -> None:
    arrays = language_arrays("toy", ["a", "a", "b", "a"], ["b", "z", "a"], 2, 50)
    assert arrays["test_inputs"].tolist() == [[3, 0]] and arrays["test_targets"].tolist() == [[0, 2]]  # type: ignore[union-attr]


# -- any text ----------------------------------------------------------------------------------------------------------------


def test_a_text_file_is_split_90_to_10(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("Aa bb cc\n\naa bb dd\n" * 5)  # 40 words, 10 of them line ends
    data = make("text", language(), path)
    inputs, targets, test_inputs, test_targets = both(data)
    # eos 9 (1), aa 9 (2), bb 9 (3), cc 5 (4), dd 4 (5)
    assert inputs[:3].tolist() == [[2, 3, 4], [1, 2, 3], [5, 1, 2]] and targets[:2].tolist() == [[3, 4, 1], [2, 3, 5]]
    assert (len(inputs), len(test_inputs)) == (11, 1)  # 36 and 4 words
    assert test_inputs.tolist() == [[2, 3, 5]] and test_targets.tolist() == [[3, 5, 1]]
    assert (data.kind, data.shape, data.classes, data.scale, data.placement) == ("tokens", (3,), 50, [], "host")


def test_the_vocabulary_is_the_networks(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("aa bb cc aa bb aa\n" * 20)
    inputs, targets, *_ = both(make("text", language(vocabulary=4), path))
    assert inputs.max() == targets.max() == 3 and inputs[0].tolist() == [2, 3, 0]  # cc is unknown
    assert make("text", language(vocabulary=4), path).key != make("text", language(vocabulary=5), path).key


def test_a_folder_gives_its_texts_once_each(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text("one two three\n" * 10)
    (folder / "b" / "c").write_text("four\n" * 10)
    plain = make("text", language(), folder)
    (folder / "a-link.txt").symlink_to("a.txt")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / ".hidden").write_text("hidden")
    same = make("text", language(), folder)
    assert same.key == plain.key
    inputs = both(plain)[0]
    assert len(inputs) == (60 - 6 - 1) // 3
    assert inputs[0].tolist() == [2, 4, 3] and inputs[-1].tolist() == [5, 1, 5]  # first a.txt, then b/c
    (folder / "b" / "c").write_text("five\n" * 10)
    assert make("text", language(), folder).key != plain.key


def test_the_folder_named_text_comes_first(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_text("one two\n" * 20)
    inside = make("text", language(), tmp_path / "text").key
    (tmp_path / "other").write_text("three\n" * 99)
    assert make("text", language(), tmp_path).key == inside


def test_what_is_no_text_is_said(tmp_path: Path) -> None:
    error = missing(lambda: make("text", language(), None))
    assert (error.outcome, "data_dir is null" in error.message, "data_dir=FILE" in error.hint) == ("data_missing", True, True)
    assert "has no text file" in missing(lambda: make("text", language(), tmp_path / "nothing")).message
    (tmp_path / "short").write_text("one two\n")
    error = missing(lambda: make("text", language(), tmp_path / "short"))
    assert error.outcome == "data_missing" and "3 words are no sequence of 4 tokens" in error.message


def test_a_text_without_room_for_a_test_window_has_no_test_set(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one two\n" * 5)
    assert make("text", language(), tmp_path / "a").test is None


def test_bytes_that_are_no_utf8_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("größe one\n".encode("latin-1") * 20)
    assert make("text", language(), tmp_path / "latin").train.count > 5


def test_networks_without_tokens_or_with_other_targets_are_unsupported(tmp_path: Path) -> None:
    from crosstrain.networks.fcn import fcn

    (tmp_path / "a").write_text("one two three four five\n" * 20)
    for name in ("text", "ptb", "imdb"):
        error = missing(lambda name=name: make(name, fcn(784, [4], 10).to_json(), tmp_path / "a"))  # type: ignore[misc]
        assert (error.outcome, error.message) == ("unsupported", f"fcn takes 784 values; {name} gives tokens")
    assert missing(lambda: make("text", classifier(), tmp_path / "a")).outcome == "unsupported"
    error = missing(lambda: make("imdb", language(), None))
    assert (error.outcome, "lstm learns 50 classes for each of 3 tokens" in error.message) == ("unsupported", True)


def test_another_language_model_takes_the_same_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one two three\n" * 30)
    network = gpt2(steps=7, vocabulary=20, width=8, layers=1, heads=2).to_json()
    assert both(make("text", network, tmp_path / "a"))[0].shape == ((120 - 12 - 1) // 7, 7)


def test_samples_limit_the_training_sequences(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one two three\n" * 30)
    data = make("text", language(), tmp_path / "a", samples=6)
    assert data.train.count == 6 and data.test is not None and data.test.count == 3


# -- the official formats ----------------------------------------------------------------------------------------------------


def official(name: str, contents: dict[str, bytes]) -> Source:
    files = tuple(File(key, len(value), hashlib.sha256(value).hexdigest()) for key, value in contents.items())
    return Source(name, ("http://127.0.0.1:9",), files)


def request(network: dict[str, Any], data_dir: Path) -> Request:
    return Request(network, 2, 0, None, data_dir, {}, lambda line: None)


def test_ptb_lines_end_with_a_word_and_unknown_is_0(tmp_path: Path) -> None:
    train = " no it was n't <unk> \n <unk> N it was \n"
    contents = {"ptb.train.txt": train.encode(), "ptb.test.txt": b" was it <unk> \n"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    recipe = ptb_module.ptb_recipe(official("ptb", contents), request(language(), tmp_path))
    arrays = recipe.load()
    # it, was: twice; N, n't, no: once, by code points
    assert arrays["train_inputs"].tolist() == [[6, 2, 3], [5, 0, 1], [0, 4, 2]]  # type: ignore[union-attr]
    assert arrays["train_targets"].tolist() == [[2, 3, 5], [0, 1, 0], [4, 2, 3]]  # type: ignore[union-attr]
    assert arrays["test_inputs"].tolist() == [[3, 2, 0]] and arrays["test_targets"].tolist() == [[2, 0, 1]]  # type: ignore[union-attr]
    assert (recipe.kind, recipe.shape, recipe.target_shape, recipe.classes) == ("tokens", (3,), (3,), 50)


def review_archive(path: Path, reviews: dict[str, str]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in reviews.items():
            entry = tarfile.TarInfo(f"aclImdb/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))


def test_imdb_reviews_are_cut_and_padded_and_only_labelled_ones_count(tmp_path: Path) -> None:
    path = tmp_path / "aclImdb_v1.tar.gz"
    reviews = {
        "train/urls_pos.txt": "nothing",
        "train/pos/1_9.txt": "Good good<br /><br />film, good good good",
        "train/neg/0_2.txt": "Bad film",
        "train/unsup/0_0.txt": "good " * 50,
        "test/pos/0_10.txt": "A good film",
        "test/neg/0_1.txt": "",
    }
    review_archive(path, reviews)
    recipe = imdb_module.imdb_recipe(official("imdb", {path.name: path.read_bytes()}), request(classifier(), tmp_path))
    arrays = {name: np.asarray(value) for name, value in recipe.load().items()}
    # good 5 (2), film 2 (3), "," 1 (4), bad 1 (5)
    assert arrays["train_inputs"].tolist() == [[5, 3, 0, 0, 0], [2, 2, 3, 4, 2]] and arrays["train_targets"].tolist() == [0, 1]
    assert arrays["test_inputs"].tolist() == [[0, 0, 0, 0, 0], [1, 2, 3, 0, 0]] and arrays["test_targets"].tolist() == [0, 1]
    assert arrays["train_inputs"].dtype == np.int32 and arrays["train_targets"].dtype == np.int64
    assert (recipe.kind, recipe.shape, recipe.target_shape, recipe.classes) == ("tokens", (5,), (), 2)


def test_the_official_sources() -> None:
    for source, name, size in ((ptb_module.SOURCE, "ptb", 5101618), (imdb_module.SOURCE, "imdb", 84125825)):
        assert (source.name, source.files[0].size) == (name, size)
        assert all(len(file.sha256) == 64 for file in source.files)
        assert all(address.startswith("https://") for address in source.addresses)


@pytest.mark.parametrize(("name", "network", "file"), [("ptb", language(), "ptb.train.txt"), ("imdb", classifier(), "aclImdb_v1")])
def test_without_network_or_files_it_says_what_to_do(name: str, network: dict[str, Any], file: str) -> None:
    error = missing(lambda: make(name, network, None))
    assert error.outcome == "data_missing" and file in error.message and f"DIR/{name}" in error.hint


# -- synthetic ---------------------------------------------------------------------------------------------------------------


def test_synthetic_sequences_have_the_networks_length_and_vocabulary() -> None:
    data = make("synthetic", language(steps=7, vocabulary=30), None, batch=64)
    inputs, targets = np.load(data.train.inputs), np.load(data.train.targets)  # type: ignore[arg-type]
    # the batch counts sequences: 4 batches of 64 sequences, not of 64 tokens
    assert inputs.shape == targets.shape == (256, 7)
    assert (inputs.min(), inputs.max(), targets.min(), targets.max()) == (0, 29, 0, 29)
    data = make("synthetic", classifier(length=9, vocabulary=30), None, batch=64)
    inputs, targets = np.load(data.train.inputs), np.load(data.train.targets)  # type: ignore[arg-type]
    assert inputs.shape == (256, 9) and targets.shape == (256,)
    assert (inputs.min(), inputs.max(), targets.max()) == (1, 29, 1)  # 0 is padding, and there is none
