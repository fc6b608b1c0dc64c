"""`batch_size=max`: the largest batch that fits, found by trying. Each try is a run of the worker in processes of its own.

A try does the first step, a few iterations and a block, as the run will, and leaves no MLflow run. What it ran into decides: out of
memory is too large. Its folder (`tries/<batch>` in the run folder) keeps what the workers wrote.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from crosstrain import measured, prepare, progress
from crosstrain.data import DataSet
from crosstrain.data.synthetic import ring_samples
from crosstrain.errors import OutcomeError
from crosstrain.outcomes import Outcome
from crosstrain.runspec import RunSpec
from crosstrain.watch import Ended

if TYPE_CHECKING:
    from crosstrain.run import State

#: batches are multiples of it, of each replica: what matrix units like, and fine enough
STEP = 8
#: a batch of a replica that no search goes beyond
MOST = 2**20
#: what a try measures: nothing, but every phase with memory of its own comes once
TRY = {"min_s": 0.0, "max_s": 1.0, "min_blocks": 1, "block_s": 0.01, "warmup": 0, "iterations": 3, "interval_required": False}
#: outcomes that mean that the batch is too large; `diverged` means that it fits: the loss says nothing about memory
TOO_LARGE = ("device_oom", "host_oom")

#: cells searched by this command -> (batch_size, what was tried): repetitions get the same batch
_found: dict[str, tuple[int, str]] = {}


def search(fits: Callable[[int], bool], step: int, most: int) -> int | None:
    """The largest multiple of `step` up to `most` that fits, None when not even `step` does.

    Doubling until one does not fit, then bisection. `fits(batch)` must be true up to some batch and false beyond; no batch is asked twice.
    """
    if most < step or not fits(step):
        return None
    good, bad = 1, most // step + 1  # in steps; `bad` is known or taken not to fit
    while good + 1 < bad:
        middle = min(2 * good, bad - 1)
        if fits(step * middle):
            good = middle
        else:
            bad = middle
            break
    while good + 1 < bad:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(step * middle) else (good, middle)
    return step * good


Lease = Callable[[prepare.Place, progress.RunLine], AbstractContextManager[tuple[list[Any], list[int] | None]]]
Attend = Callable[["State", progress.RunLine, list[Any]], Ended]


def find(state: State, line: progress.RunLine, lease: Lease, attend: Attend) -> None:
    """Give `state.spec` a number for its batch_size=max, and `state.batch_search` what was tried.

    `lease` and `attend` are those of `crosstrain.run`. The time that the search takes counts for timeout_s. Raises OutcomeError
    where there is nothing to search (unsupported), where the smallest batch does not run (its outcome), or when time is over.
    """
    searched = Search(state, line, lease, attend)
    key = prepare.keys(searched.smallest, searched.ready)["cell_key"]
    if key not in _found:
        _found[key] = searched.run()
    batch, state.batch_search = _found[key]
    left_s = searched.left_s()
    state.spec = replace(searched.spec, batch_size=batch, timeout_s=left_s)
    state.run_json = {}
    progress.say(f"  batch_size=max: {batch}")


class Search:
    """The search of one run."""

    def __init__(self, state: State, line: progress.RunLine, lease: Lease, attend: Attend) -> None:
        self.state, self.line, self.lease, self.attend = state, line, lease, attend
        self.begin = time.monotonic()
        self.spec = state.spec
        prepare.choose_place(self.spec)
        self.step = STEP * (self.spec.copies if self.spec.scaling == "strong" else 1)
        self.smallest = replace(self.spec, batch_size=self.step)
        self.ready = state.ready = prepare.prepare(self.smallest, lambda text: progress.say(f"  {text}"))
        self.tries: list[str] = []
        self.last: Outcome | None = None

    def run(self) -> tuple[int, str]:
        """(batch_size, what was tried)."""
        most = MOST // STEP * self.step
        with self.lease(self.ready.place, self.line) as (gpus, cpus):
            batch = search(lambda batch: self.fits(batch, gpus, cpus), self.step, most)
        if batch is None:
            assert self.last is not None
            said = f"not even batch_size={self.step} fits: {self.last.message}"
            raise OutcomeError(self.last.name, said, "a smaller network, or precision=bf16")
        return batch, "largest of " + ", ".join(self.tries)

    def left_s(self) -> float | None:
        """Of timeout_s. Raises OutcomeError (timeout) when nothing is."""
        if self.spec.timeout_s is None:
            return None
        left_s = self.spec.timeout_s - (time.monotonic() - self.begin)
        if left_s <= 0:
            raise OutcomeError("timeout", f"the search for the largest batch took longer than timeout_s={self.spec.timeout_s:g}")
        return left_s

    def fits(self, batch: int, gpus: list[Any], cpus: list[int] | None) -> bool:
        """Try one batch_size. A failure that is not about memory counts as too large only where a smaller batch ran."""
        spec = replace(self.spec, batch_size=batch, epochs=0, target_accuracy=None, timeout_s=self.left_s())
        spec = replace(spec, measure={**spec.measure, **TRY})
        few = self._too_few_samples(spec)
        outcome = Outcome("unsupported", "", few) if few else self._try(spec, gpus, cpus)
        ran = outcome is None or outcome.name == "diverged"
        if outcome is not None and not ran and not few and outcome.name not in TOO_LARGE and (not self.tries or outcome.name == "timeout"):
            raise OutcomeError(outcome.name, f"with batch_size={batch}: {outcome.message}", outcome.hint)
        self.last = outcome
        self.tries.append(f"{batch} {'ok' if ran else few or outcome.name}")  # type: ignore[union-attr]
        progress.say(f"  batch_size={self.tries[-1]}")
        return ran

    def _too_few_samples(self, spec: RunSpec) -> str:
        have = self.ready.data_set.train.count
        if self._is_ring():
            samples = spec.data["samples"]
            return f"data.samples={samples} holds no two batches" if samples and samples < 2 * spec.batch_global else ""
        return f"{self.ready.data_set.name} has {have} training samples" if have < spec.batch_global else ""

    def _is_ring(self) -> bool:
        return self.ready.data_set.name == "synthetic"

    def _try(self, spec: RunSpec, gpus: list[Any], cpus: list[int] | None) -> Outcome | None:
        """None: it ran. Otherwise how it ended."""
        state = self.state
        folder = state.folder / "tries" / str(spec.batch_size)
        folder.mkdir(parents=True)
        ready = replace(self.ready, data_set=self._ring(spec)) if self._is_ring() else self.ready
        state.spec, state.ready = spec, ready
        try:
            state.run_json = prepare.run_json(spec, ready, state.run_id, folder, [gpu.uuid for gpu in gpus], cpus)
            (folder / "run.json").write_text(json.dumps(state.run_json, indent=1) + "\n")
            ended = self.attend(state, self.line, gpus)
            return measured.failure(measured.read(folder, state.run_json), ended, 0)
        finally:
            state.spec, state.ready = self.spec, self.ready

    def _ring(self, spec: RunSpec) -> DataSet:
        """The smallest batch's synthetic data, counting as many samples as this batch's: what they hold does not change memory."""
        data_set = self.ready.data_set
        sample_bytes = 4 * math.prod(data_set.shape)
        train = replace(data_set.train, count=ring_samples(spec.batch_global, sample_bytes, spec.data["samples"]))
        return replace(data_set, train=train)
