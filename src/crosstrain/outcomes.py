"""How a run can end, what that means for MLflow and for the exit code, and the file in which a sweep keeps it."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kind:
    status: str  # MLflow's run status
    ok: bool  # counts as ok for the exit code
    numbers: bool  # its numbers are published


KINDS = {
    "ok": Kind("FINISHED", ok=True, numbers=True),
    "unstable": Kind("FINISHED", ok=True, numbers=True),
    "contaminated": Kind("FINISHED", ok=True, numbers=True),
    "interrupted": Kind("KILLED", ok=False, numbers=False),
    **dict.fromkeys(
        [
            *("invalid", "diverged", "not_training", "unsupported", "env_missing", "data_missing"),
            *("device_oom", "host_oom", "crashed", "timeout"),
        ],
        Kind("FAILED", ok=False, numbers=False),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """How one run ended. `message` and `hint` are one line each; `stderr` is the end of the worker's."""

    name: str
    phase: str = ""
    message: str = ""
    hint: str = ""
    stderr: str = ""

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def ok(self, strict: bool) -> bool:
        """Counts as ok for the exit code; with measure.strict=true only `ok` itself does."""
        return self.name == "ok" if strict else self.kind.ok

    @property
    def reason(self) -> str:
        """message and hint in one line."""
        where = f"in phase {self.phase}: " if self.phase and self.phase != "done" and self.message else ""
        return where + self.message + (f" ({self.hint})" if self.hint else "")


#: Texts by which libraries say that host memory ran out, when they do not raise MemoryError.
HOST_OOM = re.compile(
    r"std::bad_alloc|Cannot allocate memory|can't allocate memory|MemoryError|Unable to allocate|host allocation of size \d+ failed"
    r"|RESOURCE_EXHAUSTED.*device:CPU",  # TensorFlow, which dies then inside oneDNN
    re.I,
)
#: Texts by which libraries that abort say that device memory ran out.
DEVICE_OOM = re.compile(
    r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|RESOURCE_EXHAUSTED(?!.*device:CPU)"
    r"|cudaSuccess \(2 vs\. 0\)",
    re.I,
)
#: Texts by which libraries that abort say that they were built for the CPU only.
NO_GPU = re.compile(r"Cannot use GPU in CPU-only Caffe")
#: glog's line before it aborts the process: F<date> <time> <thread> <file>:<line>] <message>
FATAL = re.compile(r"^F\d+ [\d:.]+ +\d+ [^\s:]+:\d+\] *(.+)$", re.M)


def of_failed_rank(
    rank: int, returncode: int | None, result: dict[str, Any] | None, phase: str, stderr: str, oom_kills: int
) -> Outcome:
    """The outcome of a rank that did not end well.

    `returncode` as subprocess gives it (negative: a signal), `oom_kills`: processes the kernel killed for memory meanwhile.
    """
    where = f"rank {rank}: " if rank else ""
    if result is not None and result["status"] != "ok":
        name = {"failed": "crashed"}.get(result["status"], result["status"])
        message = result["message"]
        if name == "crashed":
            message = f"{result['error_type']}: {message}"
            if HOST_OOM.search(message):
                name = "host_oom"
        return Outcome(name, result["phase"], where + message, result["hint"], stderr)
    if DEVICE_OOM.search(stderr):
        return Outcome("device_oom", phase, where + _matching_line(DEVICE_OOM, stderr), "lower batch_size", stderr)
    if HOST_OOM.search(stderr):
        return Outcome("host_oom", phase, where + _matching_line(HOST_OOM, stderr), "lower batch_size or free memory", stderr)
    if NO_GPU.search(stderr):
        return Outcome("unsupported", phase, where + fatal_message(stderr), "a build with CUDA, or device=cpu", stderr)
    if returncode is not None and returncode < 0:
        name = signal.Signals(-returncode).name
        if name == "SIGKILL" and oom_kills:
            return Outcome("host_oom", phase, f"{where}killed by the kernel: out of host memory", "lower batch_size", stderr)
        message = fatal_message(stderr)
        return Outcome("crashed", phase, f"{where}the worker died by {name}" + (f": {message}" if message else ""), "", stderr)
    return Outcome("crashed", phase, f"{where}the worker ended (exit code {returncode}) without a result", "", stderr)


def fatal_message(stderr: str) -> str:
    """What a library that logs with glog said when it aborted the process; "" when it did not."""
    found = FATAL.search(stderr)
    return found[1].strip()[:500] if found else ""


def _matching_line(pattern: re.Pattern[str], text: str) -> str:
    line = next(line.strip() for line in text.splitlines() if pattern.search(line))
    return fatal_message(line) or line[:500]


FILE = "outcomes.jsonl"
#: an empty file in the folder of a run that skip_finished left out
SKIPPED = "skipped"


def append(folder: Path, row: dict[str, Any]) -> None:
    """Add a run to the sweep's outcomes.jsonl (one JSON object a line; a short line is one write, so processes may share it)."""
    with open(folder / FILE, "a") as out:
        out.write(json.dumps(row) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of outcomes.jsonl, in the order in which the runs ended."""
    with open(folder / FILE) as source:
        return [json.loads(line) for line in source if line.strip()]


#: metrics of a run that the table of its command shows
SHOWN = ("step_ms", "step_ms_low", "step_ms_high", "samples_per_s", "accuracy", "efficiency")


def row(
    name: str,
    outcome: Outcome,
    strict: bool,
    metrics: dict[str, float],
    run_id: str,
    folder: Path,
    overrides: list[str],
    keys: dict[str, str],
    replicas: int,
) -> dict[str, Any]:
    """What outcomes.jsonl keeps of a run. `overrides`: those that made it; `keys`: those of `prepare.keys`, none if it never got so far."""
    shown = {key: metrics.get(key) for key in SHOWN}
    fields = {key: value for key, value in asdict(outcome).items() if key not in ("name", "stderr")}
    return {
        "run": name,
        "outcome": outcome.name,
        "ok": outcome.ok(strict),
        **fields,
        **shown,
        "mlflow_run_id": run_id,
        "folder": str(folder),
        "overrides": overrides,
        "replicas": replicas,
        **{key: keys.get(key, "") for key in ("cell_key", "base_key", "alone_key")},
    }
