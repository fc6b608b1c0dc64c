"""parallelism=horovod: horovodrun starts all ranks on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crosstrain.environments import Environment
from crosstrain.launch import local, program

#: ranks wait for each other while they start; a framework's import takes this long on a busy machine
MEET_S = 600


def start(run: Mapping[str, Any], place: Environment, extra: Mapping[str, str]) -> list[program.Rank]:
    """Start all ranks of `run` (run.json is written)."""
    ranks = run["world_size"]
    horovodrun = [*program.python(place), "-m", "horovod.runner.launch", "--gloo", "--disable-cache"]
    options = ["--gloo-timeout-seconds", str(MEET_S), "-np", str(ranks), "-H", f"localhost:{ranks}"]
    return program.start(run, local.environment(run, extra), place, [*horovodrun, *options], "HOROVOD_RANK")
