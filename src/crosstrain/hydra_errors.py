"""Hydra's and OmegaConf's errors as one line that names the key, the value, and the closest valid name or what is allowed."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from omegaconf import DictConfig


def one_line(error: BaseException, arguments: Sequence[str], config_dirs: Sequence[Path]) -> str:
    """One line for an error of composing `arguments` (the command line's overrides)."""
    text = "\n".join(str(e) for e in _chain(error))
    for pattern, explain in (
        (r"Could not find '([\w/@.-]+)'", lambda m: _missing_option(m[1], config_dirs, arguments)),
        (r"Key '([^']*)' is not in struct", lambda m: _unknown_key(text, m[1], arguments, config_dirs)),
        (r"Key '([^']*)' not in '", lambda m: _unknown_key(text, m[1], arguments, config_dirs)),
        (r"Could not override '([^']*)'", lambda m: _unknown_key(text, m[1], arguments, config_dirs)),
        (r"Ambiguous value for argument '([^']*)'", lambda m: f"{m[1]}: several values make a sweep: add -m"),
        (r"Sweep parameters '([^']*)' requires --multirun", lambda m: f"{m[1]}: several values make a sweep: add -m"),
        (r"Invalid value '([^']*)', expected one of \[([^\]]*)\]", lambda m: _bad_choice(text, m[1], m[2], arguments)),
        (r"Value '([^']*)'(?: of type '[^']*')? could not be converted to (\w+)", lambda m: _bad_type(text, m[1], m[2], arguments)),
        (r"no viable alternative at input '([^']*)'", lambda m: f"{_blamed(text, arguments)}: can not be read; quote it: 'key=\"value\"'"),
    ):
        match = re.search(pattern, text)
        if match:
            return explain(match)
    return " ".join(text.split("\n")[0].split())


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def closest(name: str, valid: Iterable[str]) -> str:
    """', did you mean X?' or the list of what is valid."""
    valid = sorted(set(valid))
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there is {', '.join(valid)}"


def _options(group: str, config_dirs: Sequence[Path]) -> list[str]:
    return [p.stem for folder in config_dirs for p in (folder / group).glob("*.yaml")]


def _missing_option(path: str, config_dirs: Sequence[Path], arguments: Sequence[str]) -> str:
    group, _, option = path.rpartition("/")
    options = _options(group, config_dirs)
    if not options:
        return f"{path}: there is no such group"
    return f"{group}={option}: unknown; {closest(option, options)}"


def _unknown_key(text: str, key: str, arguments: Sequence[str], config_dirs: Sequence[Path]) -> str:
    match = re.search(r"full_key: (\S+)", text) or re.search(r"Could not override '([^']*)'", text)
    full = match[1] if match else key
    argument = _blamed(f"'{full}'", arguments, fallback=full)
    if argument.startswith("+"):
        return f"{argument}: unknown"
    name = argument.split("=")[0]
    valid = [key for key in _all_keys(arguments, config_dirs) if key.count(".") == name.count(".")]
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    # The whole list would be a page; --help has it.
    return f"{argument}: unknown key; " + (f"did you mean {near[0]}?" if near else "--help lists all keys")


def _all_keys(arguments: Sequence[str], config_dirs: Sequence[Path]) -> list[str]:
    """Every key a user may give: those of the default configuration, and of the options chosen beside the wrong key."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    ours = str(config_dirs[-1])
    groups = [path.name for path in config_dirs[-1].iterdir() if path.is_dir() and path.name != "hydra"]
    chosen = [a for a in arguments if a.split("=")[0] in groups and "," not in a]
    for overrides in (chosen, []):
        with contextlib.suppress(HydraException), initialize_config_dir(version_base="1.3", config_dir=ours):
            return [*_keys(compose("train", overrides=list(overrides)), ""), *groups]
    return groups


def _keys(config: DictConfig, prefix: str) -> Iterable[str]:
    for key in config:
        name = f"{prefix}{key}"
        yield name
        value = config._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none() and not value._is_missing():
            yield from _keys(value, name + ".")


def _full_key(text: str) -> str:
    match = re.search(r"full_key: (\S+)", text)
    return match[1] if match else ""


def _blamed(text: str, arguments: Sequence[str], fallback: str = "") -> str:
    """The override that an error text speaks of: the argument whose key or whole text occurs in it."""
    for argument in arguments:
        key = argument.lstrip("+~").split("=")[0]
        if f"'{argument}'" in text or f"'{key}'" in text:
            return argument
    return fallback or (arguments[0] if len(arguments) == 1 else " ".join(arguments))


def _bad_choice(text: str, value: str, allowed: str, arguments: Sequence[str]) -> str:
    return f"{_full_key(text)}={value}: must be one of {allowed}"


def _bad_type(text: str, value: str, kind: str, arguments: Sequence[str]) -> str:
    words = {"Integer": "a whole number", "Float": "a number", "Bool": "true or false"}
    return f"{_full_key(text)}={value}: must be {words.get(kind, kind)}"
