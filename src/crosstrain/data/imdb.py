"""Large Movie Review Dataset (Maas et al. 2011): 25,000 + 25,000 reviews, negative (0) or positive (1)."""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np

from crosstrain.data.download import File, Source, obtain
from crosstrain.data.language import UNKNOWN, ids, sequence, split, vocabulary
from crosstrain.data.recipe import Arrays, Recipe, Request

# Size and SHA-256 as in tensorflow/datasets, url_checksums/imdb_reviews.txt.
SOURCE = Source(
    "imdb",
    ("https://ai.stanford.edu/~amaas/data/sentiment",),
    (File("aclImdb_v1.tar.gz", 84125825, "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"),),
)

PADDING = "<pad>"
LABELS = {"neg": 0, "pos": 1}
#: aclImdb/<part>/<label>/<number>_<stars>.txt; train/unsup and the lists beside it are not used
_REVIEW = re.compile(r"(?:.*/)?(train|test)/(neg|pos)/\d+_\d+\.txt")
_LINE_BREAK = re.compile(r"<br\s*/?>")


def imdb(request: Request) -> Recipe:
    """int32 tokens of the network's length, 2 classes; the official split.

    Ids: 0 padding at the end, 1 unknown, then by frequency in the training reviews, as many as the network's embedding has. Longer
    reviews are cut off at their end.
    """
    return imdb_recipe(SOURCE, request)


def imdb_recipe(source: Source, request: Request) -> Recipe:
    length, size = sequence("imdb", request)

    def load() -> Arrays:
        path = obtain(source, request.data_dir, request.report)[source.files[0].name]
        request.report(f"imdb: reading {path.name}")
        reviews, counts = _reviews(path, length)
        known = vocabulary(counts, size, (PADDING, UNKNOWN))
        arrays: Arrays = {}
        for part, own in reviews.items():
            arrays[f"{part}_inputs"] = padded([ids(words, known) for words, _ in own], length)
            arrays[f"{part}_targets"] = np.array([label for _, label in own], np.int64)
        return arrays

    version = f"1 {source.version} length {length} vocabulary {size}"
    return Recipe("tokens", (length,), 2, version, [], [], load)


def _reviews(path: Path, length: int) -> tuple[dict[str, list[tuple[list[str], int]]], Counter[str]]:
    """({train or test: [(first words, label), …]} in the order of the files' names, how often each word is in the training reviews)."""
    counts: Counter[str] = Counter()
    found: dict[str, dict[str, tuple[list[str], int]]] = {"train": {}, "test": {}}
    with tarfile.open(path) as archive:
        for entry in archive:
            match = _REVIEW.fullmatch(entry.name)
            file = archive.extractfile(entry) if match else None
            if match and file:
                words = split(_LINE_BREAK.sub(" ", file.read().decode("utf-8")))
                found[match[1]][entry.name] = (words[:length], LABELS[match[2]])
                if match[1] == "train":
                    counts.update(words)
    return {part: [own[name] for name in sorted(own)] for part, own in found.items()}, counts


def padded(sequences: list[np.ndarray], length: int) -> np.ndarray:
    """int32 (n, length), zeros behind each sequence."""
    result = np.zeros((len(sequences), length), np.int32)
    for row, tokens in zip(result, sequences, strict=True):
        row[: len(tokens)] = tokens
    return result
