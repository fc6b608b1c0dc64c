"""Any plain text as a language model's data: `data=text data_dir=FILE`, or a folder of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from crosstrain.data.language import END_OF_LINE, language_arrays, sequence, split
from crosstrain.data.recipe import Arrays, Recipe, Request
from crosstrain.errors import OutcomeError

TEST_PART = 10  # the last tenth


def text(request: Request) -> Recipe:
    """int32 windows of the network's length, targets the next tokens; the first 90 % of the words for training, the rest the test.

    `data_dir` is a UTF-8 text file or a folder (its folder `text` where it has one): all its files in the order of their paths, but
    for hidden ones, binary ones (they hold a zero byte) and second names of one file. Words as `language.split` has them, the end of a line
    that is not blank is one; ids: 0 unknown, 1 end of a line, then by frequency in the training part, as many as the network's
    embedding has. Raises OutcomeError `data_missing` (also when the text is too short) or `unsupported`.
    """
    length, size = sequence("text", request)
    files = _files(request.data_dir)
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())

    def load() -> Arrays:
        words = [word for file in files for word in _words(file)]
        train = len(words) - len(words) // TEST_PART
        request.report(f"text: {len(files)} files, {len(words):,} words")
        return language_arrays("text", words[:train], words[train:], length, size)

    version = f"1 {digest.hexdigest()} length {length} vocabulary {size}"
    return Recipe("tokens", (length,), size, version, [], [], load, target_shape=(length,))


def _files(place: Path | None) -> list[Path]:
    hint = "data_dir=FILE: a plain text, or a folder of them, e.g. data_dir=/usr/share/common-licenses"
    if place is None:
        raise OutcomeError("data_missing", "text: which text? data_dir is null", hint)
    place = place.expanduser()
    if place.is_file():
        found = [place]
    else:
        folder = place / "text" if (place / "text").is_dir() else place
        visible = (p for p in sorted(folder.rglob("*")) if not any(part.startswith(".") for part in p.relative_to(folder).parts))
        found = list(dict.fromkeys(path.resolve() for path in visible if path.is_file()))
    texts = [path for path in found if b"\0" not in path.read_bytes()]
    if not texts:
        raise OutcomeError("data_missing", f"text: data_dir={place} has no text file", hint)
    return texts


def _words(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [word for line in lines if line.strip() for word in (*split(line), END_OF_LINE)]
