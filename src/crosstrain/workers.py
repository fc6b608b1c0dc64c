"""Running the workers of one run.json to their end, for commands that need no more of them than their results."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstrain import environments, guard, launch, outcomes, processes
from crosstrain.errors import OutcomeError
from crosstrain.measured import tail_of
from crosstrain.watch import wait_for_end


def work(
    run: Mapping[str, Any], home: environments.Environment, extra: Mapping[str, str], limit_s: float, what: str
) -> list[dict[str, Any]]:
    """Run the workers of `run` (its folder is there) to their end; nothing of them is left afterwards. Returns the ranks' results.

    `extra`: framework.env; `what`: named when it did not end within limit_s. Raises OutcomeError where a rank is not ok.
    """
    folder = Path(run["folder"])
    (folder / "run.json").write_text(json.dumps(run))
    _to_the_end(run, home, extra, limit_s, what)
    ranks = range(run["world_size"])
    # First those that could say how they ended: the others were stopped because of one that failed.
    told = sorted(ranks, key=lambda rank: not _result_path(folder, rank).is_file())
    results = {rank: _result(folder, rank) for rank in told}
    return [results[rank] for rank in ranks]


def _to_the_end(run: Mapping[str, Any], home: environments.Environment, extra: Mapping[str, str], limit_s: float, what: str) -> None:
    ranks: list[launch.Rank] = []
    end = time.monotonic() + limit_s
    with guard.start_guard(run["run_id"]):
        try:
            ranks += launch.start(run, home, extra)
            # one that failed leaves the others waiting for it
            while (alive := [rank for rank in ranks if rank.poll() is None]) and not any(rank.returncode for rank in ranks):
                if time.monotonic() > end:
                    raise OutcomeError("timeout", f"{what} did not end within {limit_s:g} s")
                wait_for_end(alive, 1.0)
        finally:
            processes.stop_all(run["run_id"], [rank.pid for rank in ranks], grace_s=1.0)
            for rank in ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.wait(1.0)


def _result_path(folder: Path, rank: int) -> Path:
    return folder / f"result.{rank}.json"


def _result(folder: Path, rank: int) -> dict[str, Any]:
    path = _result_path(folder, rank)
    if not path.is_file():
        said = tail_of(folder / f"worker.{rank}.err") or tail_of(folder / "launcher.err")
        reason = outcomes.fatal_message(said) or (said.strip().splitlines() or ["it said nothing"])[-1]
        raise OutcomeError("crashed", f"the worker ended without a result: {reason}")
    result: dict[str, Any] = json.loads(path.read_text())
    if result["status"] != "ok":
        name = {"failed": "crashed"}.get(result["status"], result["status"])
        raise OutcomeError(name, result["message"], result["hint"])
    return result
