"""What the tests know of each framework: one file `contract/<name>.py` of constants for each, found by its name.

    MODES                 values of framework.compile in which every op is tried
    REFUSED               {what: (changes of the run, a word of the reason)}: settings that it has to refuse
    SETTINGS              {name: (changes of the run, what `effective` says then)}: other legal settings of the same small network
    DEVIATIONS            {op kind, or `batch_norm <variance>`: words of the declared deviation}
    UNSUPPORTED           {case of test_adapters.CASES: a word of the reason}: ops that it has to refuse
    UNSUPPORTED_NETWORKS  {network of the ladder tests: a word of the reason}
    DEVICES               {replicas: what `effective` says of the device(s) of a rank}; without 2 it has one replica at most
    COUNTS_FLOPS          whether it counts the FLOPs that it executes (if left out: no)

    LONG                  networks of the ladder tests whose compilation takes minutes: proven by `crosstrain parity` only

What is left out is empty.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from crosstrain import paths
from crosstrain.networks import Spec

FOLDER = Path(__file__).with_name("contract")
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def _load(name: str) -> ModuleType:
    """By path: as top-level modules their names would shadow the frameworks themselves."""
    spec = importlib.util.spec_from_file_location(f"contract_of_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    mappings = ("REFUSED", "SETTINGS", "DEVIATIONS", "UNSUPPORTED", "UNSUPPORTED_NETWORKS", "DEVICES")
    module.__dict__.update({**{name: {} for name in mappings}, "COUNTS_FLOPS": False, "LONG": ()})
    spec.loader.exec_module(module)
    return module


OF: dict[str, Any] = {name: _load(name) for name in NAMES}


def chosen(request: pytest.FixtureRequest, find: Callable[[str], Path]) -> dict[str, Path]:
    """The interpreters of the frameworks that the selected tests of this module ask, as far as their environments are there."""
    params = (item.callspec.params for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    names = {value for values in params for value in values.values() if value in NAMES}
    found = {}
    for name in sorted(names):
        with contextlib.suppress(pytest.skip.Exception):  # its own tests say so
            found[name] = find(name)
    return found


#: frameworks that work at a time: each has one thread
AT_A_TIME = max(1, min(2, len(os.sched_getaffinity(0))))


def settings(name: str, **changes: Any) -> dict[str, Any]:
    """run.json's `framework`, as conf/framework/<name>.yaml has it."""
    given = yaml.safe_load((paths.conf_dir() / "framework" / f"{name}.yaml").read_text())
    usual = {"version": None, "compile": "off", "memory_format": "contiguous", "autotune": False, "deterministic": False}
    usual |= {"replicas_per_rank": "one", "started_by": "crosstrain"}
    return {"name": name, **usual, **{key: given[key] for key in usual if key in given}, **changes}


def deviations(name: str, spec: Spec) -> dict[str, str]:
    """{op: a word of the deviation} that the framework has to declare for this network, and no others."""
    known = OF[name].DEVIATIONS
    found = {}
    for op in spec.ops:
        key = f"batch_norm {op.attributes['variance']}" if op.op == "batch_norm" else op.op
        if key in known:
            found[op.name] = known[key]
    return found
