"""What the benchmarks share: a `python train.py …` in a folder of its own, and what its run folder says."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def command(*overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *overrides]


def environment() -> dict[str, str]:
    """This environment, with the sources on the path and a tracking store below the start directory."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    unwanted = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")
    return {key: value for key, value in os.environ.items() if key not in unwanted} | {"PYTHONPATH": path}


def run_folders(folder: Path) -> list[Path]:
    """The run folders below a start directory, oldest first."""
    return sorted((path.parent for path in folder.glob("outputs/**/run.json")), key=lambda path: (path / "run.json").stat().st_mtime)


def train(folder: Path, *overrides: str) -> Path:
    """Do one run with the start directory `folder`; gives its run folder. Ends the benchmark when the run is not ok."""
    done = subprocess.run(command(*overrides), cwd=folder, env=environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"a run failed: train.py {' '.join(overrides)}\n{done.stdout}{done.stderr}")
    if "waiting for" in done.stdout:
        sys.exit("another crosstrain run holds the CPUs: benchmarks need the machine for themselves")
    return run_folders(folder)[-1]


def events(run_folder: Path) -> list[dict[str, Any]]:
    """The events that rank 0 has written so far."""
    path = run_folder / "events.0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.is_file() else []


def step_ms(run_folder: Path) -> float:
    """The headline of a run's samples, as the driver computes it: the median over the blocks, ms per iteration."""
    from crosstrain import samples
    from crosstrain import statistics as numbers

    return numbers.headline(_blocks(samples.read(run_folder / "samples.0.bin")), 1)["step_ms"]


def _blocks(rows: Any) -> Any:
    from crosstrain_worker.record import BLOCK

    return rows[rows["phase"] == BLOCK]


def spread(values: Sequence[float]) -> str:
    """`1.234 (1.230 - 1.241)`: median, least and most."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} - {max(values):.4g})"


def load() -> str:
    """How busy the machine is: the numbers of a busy one mean nothing."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"


class Verdict:
    """Collects `measured against target`; prints each, and knows the exit code."""

    def __init__(self) -> None:
        self.missed = 0

    def check(self, what: str, value: float, limit: float, unit: str) -> None:
        met = value <= limit
        self.missed += not met
        print(f"{'ok' if met else 'MISSED'}: {what}: {value:.3g} {unit}, target at most {limit:g} {unit}", flush=True)

    @property
    def code(self) -> int:
        return 1 if self.missed else 0
