"""Texts as token ids: splitting into words, the vocabulary, and the windows that a language model learns from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

from crosstrain.data import fit
from crosstrain.data.recipe import Arrays, Request
from crosstrain.errors import OutcomeError

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
#: a word with its apostrophes, or one other sign
_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


def sequence(name: str, request: Request) -> tuple[int, int]:
    """(tokens of a sequence, vocabulary of the embedding) of the network, from which the data takes both.

    Raises OutcomeError `unsupported` for a network whose input is no sequence of tokens.
    """
    taken, network = request.network["input"], request.network["name"]
    if taken["kind"] != "tokens":
        raise OutcomeError(
            "unsupported",
            f"{network} takes {fit.words(taken['kind'], tuple(taken['shape']))}; {name} gives tokens",
            f"choose other data (data=synthetic always fits) or another network than {network}",
        )
    return taken["shape"][0], min(op["vocabulary"] for op in request.network["ops"] if op["op"] == "embedding")


def split(text: str) -> list[str]:
    """Words and other signs, in lower case."""
    return _WORD.findall(text.lower())


def vocabulary(counts: Counter[str], size: int, first: tuple[str, ...]) -> dict[str, int]:
    """{word: id}: `first` as they are, then the most frequent words, equally frequent ones by their code points; `size` at most."""
    ordered = sorted((word for word in counts if word not in first), key=lambda word: (-counts[word], word))
    return {word: i for i, word in enumerate((*first, *ordered)[:size])}


def ids(words: Iterable[str], known: dict[str, int]) -> np.ndarray:
    """int32 ids; what is not known gets that of UNKNOWN."""
    unknown = known[UNKNOWN]
    return np.fromiter((known.get(word, unknown) for word in words), np.int32)


def language_arrays(name: str, train: list[str], test: list[str], length: int, size: int) -> Arrays:
    """Windows of `length` tokens, one behind the other, with the next token as each token's target.

    Ids: 0 unknown, 1 end of a line, then the words of the training text by their frequency. Raises OutcomeError `data_missing`
    when the training text has not one window.
    """
    known = vocabulary(Counter(train), size, (UNKNOWN, END_OF_LINE))
    arrays: Arrays = {}
    for part, words in (("train", train), ("test", test)):
        inputs, targets = windows(ids(words, known), length)
        if len(inputs):
            arrays |= {f"{part}_inputs": inputs, f"{part}_targets": targets}
        elif part == "train":
            raise OutcomeError(
                "data_missing", f"{name}: {len(words)} words are no sequence of {length + 1} tokens", "give a longer text (data_dir)"
            )
    return arrays


def windows(stream: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(inputs int32 (n, length), targets int64 (n, length)) of a stream of ids; what is left at its end is dropped."""
    count = max(0, len(stream) - 1) // length
    inputs = stream[: count * length].reshape(count, length)
    return inputs, stream[1 : count * length + 1].reshape(count, length).astype(np.int64)
