"""What a run needs before it can start: a device, an environment, data, initial weights; and the keys by which runs are compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crosstrain import data, devices, environments, launch, locks
from crosstrain.environments import Environment
from crosstrain.errors import OutcomeError
from crosstrain.networks import initial_weights
from crosstrain.runspec import RunSpec

#: Counts up when a change of ours can change a measured number: results before and after are then different runs.
MEASURING_VERSION = 1


@dataclass(frozen=True)
class Place:
    """Where a run computes. `kind` is cpu or gpu; `gpus` those of this machine it may choose from; `threads` per replica.

    `copies` of the model on `nodes` machines; `pinned`: each replica has CPUs of its own.
    """

    kind: str
    gpus: list[devices.Gpu]
    copies: int
    threads: int
    pinned: bool
    nodes: int = 1

    @property
    def copies_here(self) -> int:
        """Replicas on this machine, and on each other one."""
        return self.copies // self.nodes

    @property
    def device_name(self) -> str:
        return self.gpus[0].name if self.kind == "gpu" else devices.cpu_name()


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before a lease is asked for."""

    place: Place
    environment: Environment
    data_set: data.DataSet
    weights: Path


def choose_place(spec: RunSpec) -> Place:
    """Match what is asked for with this machine. Raises OutcomeError `unsupported` when it is not there, or not for these GPUs.

    Also `env_missing` where a managed environment for GPUs can not be made at all.
    """
    # device=cpu does not ask NVML: a broken driver must not disturb a CPU run.
    gpus = [] if spec.device == "cpu" else devices.visible_gpus()
    kind = spec.device
    if kind == "auto":
        kind = "gpu" if spec.gpus or (gpus and not spec.replicas) else "cpu"
    nodes = _nodes(spec)
    copies = spec.copies // nodes
    if kind == "gpu" and len(gpus) < copies:
        asked = f"asked for {copies} GPU{'s' if copies > 1 else ''}{_each(nodes)}; this machine has {len(gpus)}"
        raise OutcomeError("unsupported", asked, "device=cpu trains on the CPU" if not gpus else "")
    if spec.batch_size == "max" and kind == "cpu" and spec.framework["name"] != "fake":
        raise OutcomeError("unsupported", "batch_size=max is for GPUs: memory of the host ends with the whole machine", "give a number")
    if spec.parallelism == "horovod":
        _check_horovod(spec, kind)
    if kind == "gpu" and not spec.framework["python"]:
        gpus = _suited(spec, gpus, copies)
    cpus = len(devices.logical_cpus()) if nodes == 1 else launch.machines(spec.launcher, spec.hosts).cpus
    threads = min(_threads(spec, copies), max(1, cpus // copies)) if spec.threads is None else spec.threads
    too_many = kind == "cpu" and threads * copies > cpus
    if too_many and not spec.oversubscribe:
        asked = f"asked for {copies} x {threads} threads" if copies > 1 else f"asked for {threads} threads"
        have = f"{asked}{_each(nodes)}; this machine has {cpus} logical CPUs{' in this job' if nodes > 1 and not spec.hosts else ''}"
        raise OutcomeError("unsupported", have, "device.oversubscribe=true runs them anyway")
    pinned = kind == "cpu" and not too_many and not (nodes > 1 and spec.hosts)  # mpirun pins nothing, Slurm does
    return Place(kind, gpus, spec.copies, threads, pinned, nodes)


def _each(nodes: int) -> str:
    return f" on each of {nodes} nodes" if nodes > 1 else ""


def _nodes(spec: RunSpec) -> int:
    """How many machines the replicas are spread over, equally many on each. Raises OutcomeError `unsupported`."""
    if spec.launcher == "local" or spec.copies == 1:
        return 1
    have = len(launch.machines(spec.launcher, spec.hosts).nodes)
    nodes = spec.nodes or have
    if nodes > have:
        what = "launcher.hosts" if spec.hosts else "the allocation"
        raise OutcomeError("unsupported", f"launcher.nodes={nodes}: {what} has {have}")
    if spec.copies % nodes:
        allowed = ", ".join(str(n) for n in range(1, have + 1) if spec.copies % n == 0)
        uneven = f"{spec.copies} replicas can not be spread evenly over {nodes} nodes"
        raise OutcomeError("unsupported", uneven, f"launcher.nodes={allowed}")
    return nodes


def _check_horovod(spec: RunSpec, kind: str) -> None:
    """Raise OutcomeError where the framework has no Horovod, or has it with another version than its own environment."""
    name, have = spec.framework["name"], locks.with_horovod()
    if name not in have:
        raise OutcomeError("unsupported", f"{name} has no Horovod, only {', '.join(have)} have it", "parallelism=native")
    if spec.framework["version"] or spec.framework["python"]:
        return
    (_, native), (_, pinned) = (locks.find_lock(lock, kind).pins[0] for lock in (name, spec.environment))
    if native != pinned:
        hint = f"framework.version={pinned}, also with parallelism=native: so both run on one version"
        raise OutcomeError("unsupported", f"Horovod works with {name} {pinned}, and {native} is what parallelism=native runs on", hint)


def _suited(spec: RunSpec, gpus: list[devices.Gpu], copies: int) -> list[devices.Gpu]:
    """Those of `gpus` that run what the managed environment holds. Raises OutcomeError `unsupported` when they are too few.

    Asked before anything is downloaded. Another version of the framework than the lock's is left to the worker's own check.
    """
    lock = locks.find_lock(spec.environment, "gpu")
    package, pinned = lock.pins[0]
    if lock.gpus is None or spec.framework["version"] not in (None, pinned):
        return gpus
    suited = [gpu for gpu in gpus if lock.gpus.run_it(gpu.compute_capability)]
    if len(suited) < copies:
        other = next(gpu for gpu in gpus if gpu not in suited)
        has = f"this GPU ({other.name}) has {'.'.join(map(str, other.compute_capability))}"
        message = f"{spec.framework['name']}: {package} {pinned} has machine code for compute capability {lock.gpus}; {has}"
        raise OutcomeError("unsupported", message, "device=cpu, another framework, or framework.python=… with a build for this GPU")
    return suited


def _threads(spec: RunSpec, copies: int) -> int:
    """Per replica; not given: the physical cores are shared out."""
    return spec.threads or max(1, min(devices.physical_cores(), len(devices.logical_cpus())) // copies)


def placed(spec: RunSpec, place: Place) -> RunSpec:
    """The same run with `auto` resolved: what its name, params and messages speak of."""
    if place.kind == "gpu":
        return replace(spec, device="gpu", gpus=place.copies, nodes=place.nodes)
    return replace(spec, device="cpu", nodes=place.nodes)


def prepare(spec: RunSpec, report: Callable[[str], None]) -> Prepared:
    """Find or make everything. Raises OutcomeError (unsupported, env_missing, data_missing). `report` gets progress, a line each."""
    place = choose_place(spec)
    framework = spec.framework
    environment = environments.find_or_make(spec.environment, place.kind, framework["python"], framework["version"], report)
    data_set = data.prepare(spec.data, spec.network.to_json(), spec.seed, spec.data_dir, report, spec.batch_global)
    if data_set.train.count < spec.batch_global:
        few = f"batch_size={spec.batch_global}: {data_set.name} has only {data_set.train.count} training samples"
        raise OutcomeError("unsupported", few, "a smaller batch_size")
    weights = initial_weights.make(spec.network, spec.seed)
    return Prepared(place, environment, data_set, weights)


def run_json(spec: RunSpec, ready: Prepared, run_id: str, folder: Path, gpus: list[str], cpus: list[int] | None) -> dict[str, Any]:
    """The worker's run.json (docs/design.md)."""
    measured = {key: value for key, value in spec.measure.items() if key not in ("strict", "timeouts")}
    return {
        "schema": 1,
        "mode": "train",
        "run_id": run_id,
        "folder": str(folder),
        "framework": {key: value for key, value in spec.framework.items() if key not in ("python", "env")},
        "network": spec.network.to_json(),
        "task": spec.task,
        "precision": spec.precision,
        "device": ready.place.kind,
        "gpus": gpus,
        "cpus": cpus,
        "threads": ready.place.threads,
        "replicas": ready.place.copies,
        "nodes": ready.place.nodes,
        "address": launch.machines(spec.launcher, spec.hosts).address if ready.place.nodes > 1 else None,
        "hosts": list(spec.hosts[: ready.place.nodes]) if ready.place.nodes > 1 else [],
        "world_size": world_size(spec.framework, ready.place.copies, spec.parallelism, ready.place.nodes),
        "parallelism": spec.parallelism,
        "batch_global": spec.batch_global,
        "batch_per_replica": spec.batch_per_replica,
        "optimizer": spec.optimizer,
        "seed": spec.seed,
        "epochs": spec.epochs,
        "target_accuracy": spec.target_accuracy,
        "weights": str(ready.weights),
        "data": ready.data_set.as_json(),
        "measure": measured,
    }


def world_size(framework: Mapping[str, Any], replicas: int, parallelism: str, nodes: int = 1) -> int:
    """How many ranks a framework has for so many replicas. Horovod has one for each, always."""
    return replicas if framework["replicas_per_rank"] == "one" or parallelism == "horovod" else nodes


def keys(spec: RunSpec, ready: Prepared) -> dict[str, str]:
    """run_key, cell_key (without repeat), base_key and alone_key, 16 hex digits each.

    base_key: the cell of one device without any wrapper that a speed-up refers to; alone_key: that with a replica's share of the batch.
    """
    one = replace(spec, gpus=1 if spec.gpus else None, replicas=None, repeat=0, parallelism="native")
    alone = replace(one, batch_size=spec.batch_per_replica)
    threads = _threads(spec, 1)
    place = replace(ready.place, copies=1, nodes=1, threads=threads)
    if place.kind == "cpu":
        place = replace(place, pinned=threads <= len(devices.logical_cpus()))
    native = replace(ready, place=place)
    if ready.environment.managed:
        key = environments.environment_key(spec.framework["name"], place.kind, spec.framework["version"])
        native = replace(native, environment=replace(ready.environment, key=key))
    return {
        "run_key": _key(spec, ready),
        "cell_key": _key(replace(spec, repeat=0), ready),
        "base_key": _key(alone if spec.scaling == "weak" else one, native),
        "alone_key": _key(alone, native),
    }


def _key(spec: RunSpec, ready: Prepared) -> str:
    """A hash of all that can change the result; not of names, folders or the commit."""
    place = ready.place
    if place.copies == 1:
        spec = replace(spec, scaling="strong")  # the same for one
    driver = devices.describe_machine().get("nvidia_driver") if place.kind == "gpu" else None
    facts = {
        "measuring": MEASURING_VERSION,
        "framework": {key: value for key, value in spec.framework.items() if key != "python"},
        "environment": ready.environment.key,
        "network": spec.network.key(),
        "data": [ready.data_set.key, ready.data_set.placement],
        "device": [place.kind, place.device_name, driver, place.copies, place.threads, place.pinned, *[place.nodes] * (place.nodes > 1)],
        "batch": spec.batch_size,
        "measure": {key: value for key, value in spec.measure.items() if key not in ("timeouts", "strict")},
        "optimizer": spec.optimizer,
        **{key: getattr(spec, key) for key in KEYED},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


KEYED = ["task", "scaling", "precision", "parallelism", "epochs", "seed", "repeat", "target_accuracy"]
