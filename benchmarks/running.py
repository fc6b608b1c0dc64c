"""What the benchmarks share: a `python train.py …` in a folder of its own, and what its run folder says."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
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


#: an inline worker: `python -c INLINE FOLDER SOURCES`, where SOURCES is src/; ends with `sys.exit(session.work(run, 0))` of the benchmark's
INLINE = """
import json, sys
folder, source = sys.argv[1:]
sys.path.insert(0, source)
from crosstrain_worker.__main__ import prepare_process
with open(folder + "/run.json") as file:
    run = json.load(file)
prepare_process(run, 0)
from crosstrain_worker import session
"""


@contextlib.contextmanager
def once_more(run_folder: Path, command: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """(folder, stdout) of the run of `run_folder` once more without a driver. `FOLDER` in `command` is a new folder with the run.json."""
    with tempfile.TemporaryDirectory() as folder:
        run = json.loads((run_folder / "run.json").read_text()) | {"folder": folder}
        Path(folder, "run.json").write_text(json.dumps(run))
        yield Path(folder), output([folder if word == "FOLDER" else word for word in command])


def output(command: Sequence[str]) -> str:
    """What a command prints. Ends the benchmark when it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)[:300]}\n{done.stderr[-2000:]}")
    return done.stdout


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
