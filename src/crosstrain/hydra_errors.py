"""Hydra's and OmegaConf's errors as one line that names the key, the value, and the closest valid name or what is allowed."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from crosstrain import config as schema
from crosstrain.errors import ConfigError


def parse(override: str, config_dirs: Sequence[Path], config_loader: ConfigLoader | None = None) -> Override:
    """One override of the command line or of a study's cell (glob(*) needs the loader). Raises ConfigError when it is none."""
    key, _, value = override.partition("=")
    try:
        parsed = OverridesParser.create(config_loader).parse_overrides([override])[0]
    except HydraException:
        how = f"quote the value: '{key}=\"{value}\"'" if key and value else "must be key=value"
        raise ConfigError(f"{override}: can not be read; {how}") from None
    if not parsed.key_or_group:
        raise ConfigError(f"{override}: must be key=value")
    options = groups(config_dirs).get(parsed.key_or_group)
    if options and not (parsed.is_sweep_override() or parsed.is_delete() or isinstance(parsed.value(), str | dict)):
        raise ConfigError(f"{override}: must be one option; there is {', '.join(options)}")
    return parsed


@dataclasses.dataclass(frozen=True)
class Failure:
    """What is known of a failed composition."""

    #: the messages of the error and of its causes
    text: str
    #: the overrides of the command line
    arguments: Sequence[str]
    #: folders with configuration groups, ours last
    config_dirs: Sequence[Path]

    def find(self, pattern: str) -> str:
        match = re.search(pattern, self.text)
        return match[1] if match else ""

    @property
    def file(self) -> str:
        """`framework/mine.yaml: ` when a file is to blame, else nothing."""
        name = self.find(r"In '([^']+)': \w+ raised while composing")
        return f"{name}.yaml: " if name else ""

    @property
    def key(self) -> str:
        """The key to blame, in full."""
        return self.find(r"full_key: (\S+)") or self.find(r"Could not override '([^']*)'")

    @property
    def argument(self) -> str:
        """The override to blame, as the user wrote it; else key=value or the key, as far as the text knows them."""
        named = self.find(r"Error merging override (.*)")
        if named:
            return named
        for argument in self.arguments if self.key and not self.file else ():
            given, _, value = argument.lstrip("+~").partition("=")
            inside = value.startswith("{") and self.key.startswith(f"{given}.")
            if inside or f"{given}.".startswith(f"{self.key}."):
                return argument
        value = self.find(r"[Vv]alue:? '([^']*)'")
        return f"{self.key}={value}" if value else self.key


#: Pattern in the text of an error -> the line to show, from the match and the failure. The first that is found counts.
EXPLANATIONS: list[tuple[str, Callable[[re.Match[str], Failure], str]]] = [
    (r"(?s)(.*?) *\n.*in \"([^\"]+)\", line (\d+)", lambda m, f: f"{m[2]}, line {m[3]}: can not be read: {_yaml_problem(f.text)}"),
    (r"Could not (?:find|load) '([^']+)'", lambda m, f: _missing_option(m[1], f)),
    (r"Could not override '([\w/@]+)'. No match in the defaults list", lambda m, f: _not_in_defaults(m[1], f)),
    (r"Key '[^']*' (?:is not in struct|not in ')", lambda m, f: _unknown_key(f)),
    (r"Could not override '", lambda m, f: _unknown_key(f)),
    (r"Ambiguous value for argument '([^']*)'", lambda m, f: f"{m[1]}: several values make a sweep: add -m"),
    (r"Sweep parameters '([^']*)' requires --multirun", lambda m, f: f"{m[1]}: several values make a sweep: add -m"),
    (r"full_key: \d|Cannot merge DictConfig with ListConfig\s+full_key: \n", lambda m, f: _bad_cells(f)),
    (
        r"str is not a subclass of \w+\. value: .*\s+full_key: \n|Cannot assign str to Dict.*\s+full_key: \w+\n",
        lambda m, f: _option_as_a_value(f),
    ),
    (r"to string.*\n +full_key: study", lambda m, f: f"{f.file}must begin with the line '# @package _global_'"),
    (
        r"(?s)(?:[Vv]alue|not Optional|Cannot (?:assign|convert|merge)|Invalid type).*full_key: \S",
        lambda m, f: f"{f.file}{f.argument}: must be {allowed(f.key)}{_yaml_hint(f)}",
    ),
    (r"Could not delete from config\. (.*)", lambda m, f: f"can not delete: {m[1].rstrip('.')}"),
    (
        r"^(\S+) appears more than once in the final defaults list",
        lambda m, f: f"{m[1]}: has a choice already, change it without +: {m[1]}=OPTION",
    ),
    (r"Additional config directory '([^']*)' not found", lambda m, f: f"--config-dir {m[1]}: there is no such folder"),
    (r"Cannot find primary config '([^']*)'", lambda m, f: f"--config-name {m[1]}: there is no such file; leave it out for train"),
]


def one_line(error: BaseException, arguments: Sequence[str], config_dirs: Sequence[Path]) -> str:
    """One line for an error of composing `arguments` (the overrides of the command line)."""
    text = "\n".join(str(e) for e in _chain(error))
    failure = Failure(text, arguments, config_dirs)
    for pattern, explain in EXPLANATIONS:
        match = re.search(pattern, text)
        if match:
            return explain(match, failure)
    where = f"{failure.key}: " if failure.key else ""
    return where + " ".join(text.split("\n")[0].split())


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def closest(name: str, valid: Iterable[str]) -> str:
    """`did you mean X?`, or the list of what is valid."""
    valid = sorted(set(valid))
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there is {', '.join(valid)}"


def groups(config_dirs: Sequence[Path]) -> dict[str, list[str]]:
    """The groups and their options."""
    found: dict[str, list[str]] = {}
    for path in [path for folder in config_dirs for path in sorted(folder.glob("*/*.yaml"))]:
        found.setdefault(path.parent.name, []).append(path.stem)
    return found


# -- a wrong option of a group ---------------------------------------------------------------------------------------------


def _missing_option(path: str, failure: Failure) -> str:
    group, _, option = path.rpartition("/")
    # Hydra's own groups are in no folder of ours; its text lists them.
    listed = re.search(r"Available options in '[^']*':\n((?:\t\S+\n?)+)", failure.text)
    options = groups(failure.config_dirs).get(group) or (listed[1].split() if listed else [])
    if not options:
        return f"{path}: there is no such group"
    return f"{group}={option}: unknown; {closest(option, options)}"


def _not_in_defaults(key: str, failure: Failure) -> str:
    argument = failure.argument
    if key in groups(failure.config_dirs):
        return f"{argument}: nothing is chosen there, so it takes a +: +{argument}"
    return _unknown_key(failure)


# -- a wrong key -----------------------------------------------------------------------------------------------------------


def _unknown_key(failure: Failure) -> str:
    if failure.key.startswith("framework.env."):
        return f"{failure.argument}: a new entry takes a +: +{failure.argument}"
    argument, key = failure.argument, failure.key
    which = "" if argument.split("=")[0].lstrip("+~") == key else f" {key}"
    return f"{failure.file}{argument}: unknown key{which}; {near_key(key, failure.arguments, failure.config_dirs)}"


def near_key(name: str, arguments: Sequence[str], config_dirs: Sequence[Path]) -> str:
    """`did you mean KEY?`: one of the same name elsewhere, or one of a similar name beside it."""
    parent, _, last = name.rpartition(".")
    keys = [key.rpartition(".") for key in _all_keys(arguments, config_dirs)]
    elsewhere = [f"{above}.{key}" for above, _, key in keys if key == last and above not in ("", parent)]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return near_sibling(name, [key for above, _, key in keys if above == parent])


def near_sibling(name: str, siblings: Iterable[str]) -> str:
    """`did you mean KEY?` with one of `siblings` (last parts), or where all keys are listed (the list itself would be a page)."""
    parent, dot, last = name.rpartition(".")
    near = difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)
    return f"did you mean {parent}{dot}{near[0]}?" if near else "--cfg job shows all keys"


def _all_keys(arguments: Sequence[str], config_dirs: Sequence[Path]) -> list[str]:
    """Every key a user may give: those of the default configuration, and of the options chosen beside the wrong key."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()  # that of the failed composition, when a sweep's cell failed
    *theirs, ours = config_dirs
    names = list(groups(config_dirs))
    chosen = [a for a in arguments if a.split("=")[0].lstrip("+") in names and "," not in a]
    searchpath = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in theirs)}]"] if theirs else []
    for overrides in ([*searchpath, *chosen], []):
        with contextlib.suppress(HydraException, ValueError), initialize_config_dir(version_base="1.3", config_dir=str(ours)):
            return [*_keys(compose("train", overrides=overrides), ""), *names]
    return names


def _keys(config: DictConfig, prefix: str) -> Iterable[str]:
    for key in map(str, config):
        name = prefix + key
        yield name
        value = config._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none() and not value._is_missing():
            yield from _keys(value, name + ".")


# -- a wrong value ---------------------------------------------------------------------------------------------------------


WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def allowed(key: str) -> str:
    """What the schema allows for a key such as `framework.compile`, in words."""
    kind: Any = schema.TrainConfig
    for part in key.split("."):
        if kind is schema.FrameworkConfig:
            kind = next(one for one in schema.OWN_KEYS if part in typing.get_type_hints(one) or one is schema.FrameworkConfig)
        fields = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        if part not in fields:
            return "a text" if typing.get_args(kind) == (str, str) else "something else"
        kind = fields[part]
    optional = isinstance(kind, UnionType)
    if optional:
        kind = typing.get_args(kind)[0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        words = "one of " + ", ".join(kind.__members__)
    elif typing.get_origin(kind) is dict:
        words = "a mapping, {NAME: value}"
    elif dataclasses.is_dataclass(kind):
        words = "a mapping with the keys " + ", ".join(field.name for field in dataclasses.fields(kind))
    else:
        words = WORDS.get(kind, "something else")
    return words + (" or null" if optional else "")


def _yaml_hint(failure: Failure) -> str:
    """YAML reads an unquoted off as the boolean false."""
    if failure.file and failure.find(r"Invalid value '(True|False)'"):
        return " (YAML reads on and off as booleans: write them in quotes, 'off')"
    return ""


def _yaml_problem(text: str) -> str:
    return ", ".join(line.strip() for line in text.splitlines() if not line.startswith("  "))


def _option_as_a_value(failure: Failure) -> str:
    """`network: lenet` in a file; the text names no key where the group has a schema."""
    names, kinds = groups(failure.config_dirs), typing.get_type_hints(schema.TrainConfig)
    mappings = [key for key in names if dataclasses.is_dataclass(kinds.get(key)) or typing.get_origin(kinds.get(key)) is dict]
    for path in (folder / failure.file.removesuffix(": ") for folder in failure.config_dirs):
        content = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else None
        for key, value in content.items() if isinstance(content, dict) else ():
            if key in mappings and isinstance(value, str):  # study is a text
                return f"{failure.file}{key}: must be a mapping; to choose {value}, list `override /{key}: {value}` under defaults"
    return f"{failure.file}{failure.argument}: must be a mapping"


def _bad_cells(failure: Failure) -> str:
    return f'{failure.file}hydra.sweeper.cells and .smoke: must be lists of mappings, [{{network: lenet, batch_size: "64,128"}}, …]'
