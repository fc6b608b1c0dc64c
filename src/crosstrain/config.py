"""The typed configuration: what each key of conf/ may hold. Hydra checks types and enumerations, `runspec` ranges and sense."""

from __future__ import annotations

import pydoc_data.topics
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

# Values are texts: with numbers OmegaConf would take precision=1 for the first member.
Precision = StrEnum("Precision", ["fp32", "tf32", "bf16", "fp16"])
Task = StrEnum("Task", ["training", "gradient", "forward"])
Scaling = StrEnum("Scaling", ["strong", "weak"])
Effort = StrEnum("Effort", ["full", "smoke"])
Compile = StrEnum("Compile", ["off", "on", "max"])
MemoryFormat = StrEnum("MemoryFormat", ["contiguous", "channels_last"])
Optimizer = StrEnum("Optimizer", ["sgd"])
Placement = StrEnum("Placement", ["device", "host"])
Fit = StrEnum("Fit", ["none", "pad", "scale"])
ReplicasPerRank = StrEnum("ReplicasPerRank", ["one", "all"])
StartedBy = StrEnum("StartedBy", ["crosstrain", "mpirun"])
Lstm = StrEnum("Lstm", ["auto", "scan", "cudnn"])
Fault = StrEnum(
    "Fault",
    "none raise nan_loss hang kill segv exit device_oom host_oom silent stderr truncate grandchild no_sync still unsupported drift",
)
FaultPhase = StrEnum("FaultPhase", ["import", "build", "first_step", "iteration", "block", "train", "evaluate"])


@dataclass
class FrameworkConfig:
    """One deep-learning framework and how it is asked to work.

    `replicas_per_rank` is no choice but the framework's own way: a process for each replica, or one for all. Nor is `started_by`: what
    starts these processes where there are several.
    """

    name: str = MISSING
    python: str | None = None
    version: str | None = None
    compile: Compile = Compile.off
    memory_format: MemoryFormat = MemoryFormat.contiguous
    autotune: bool = False
    deterministic: bool = False
    env: dict[str, str] = field(default_factory=dict)
    replicas_per_rank: ReplicasPerRank = ReplicasPerRank.one
    started_by: StartedBy = StartedBy.crosstrain


@dataclass
class FakeFrameworkConfig(FrameworkConfig):
    """The framework that only pretends (tests): a step time, and a fault on request."""

    step_ms: float = 10.0
    fault: Fault = Fault.none
    fault_phase: FaultPhase = FaultPhase.iteration
    fault_rank: int = 0
    fault_iteration: int = 0
    fault_batch: int = 0


@dataclass
class JaxFrameworkConfig(FrameworkConfig):
    """JAX: also which LSTM it takes, and whether a first convolution of stride 2 works on blocks of 2×2 pixels."""

    lstm: Lstm = Lstm.auto
    space_to_depth: bool = False


@dataclass
class TorchFrameworkConfig(FrameworkConfig):
    """PyTorch: also whether a first convolution of stride 2 works on blocks of 2×2 pixels."""

    space_to_depth: bool = False


#: all kinds of FrameworkConfig, those with keys of their own first
OWN_KEYS = (FakeFrameworkConfig, JaxFrameworkConfig, TorchFrameworkConfig, FrameworkConfig)


@dataclass
class DataConfig:
    """A data set. `_target_` is the function that gives it."""

    _target_: str | None = None
    name: str = MISSING
    placement: Placement | None = None
    fit: Fit = Fit.none
    samples: int | None = None


@dataclass
class DeviceConfig:
    name: str = MISSING
    oversubscribe: bool = False


@dataclass
class ParallelismConfig:
    name: str = MISSING


@dataclass
class TimeoutsConfig:
    """Seconds a phase may last before the run ends as `timeout`; `stall_s`: without any finished iteration, in the others."""

    import_s: float = 300.0
    build_s: float = 600.0
    first_step_s: float = 900.0
    stall_s: float = 180.0


@dataclass
class MeasureConfig:
    """How long and how strictly a run is measured."""

    name: str = MISSING
    min_s: float = MISSING
    max_s: float = MISSING
    window: int = 20
    min_iterations: int = 40
    min_blocks: int = 6
    block_s: float = 0.5
    steady_required: bool = True
    interval_required: bool = True
    ci_target: float = 0.01
    warmup: int | None = None
    iterations: int | None = None
    strict: bool = False
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)


@dataclass
class TrackingConfig:
    name: str = MISSING
    uri: str | None = None
    experiment: str | None = None
    required: bool = True
    report: bool = True


@dataclass
class LauncherConfig:
    """Who starts the ranks. `nodes`: over how many of the allocation's (launcher=slurm), or of `hosts` (launcher=mpi)."""

    name: str = MISSING
    hosts: list[str] | None = None
    nodes: int | None = None


@dataclass
class TrainConfig:
    """The root keys and the groups."""

    framework: FrameworkConfig = MISSING
    network: dict[str, Any] = MISSING
    data: DataConfig = MISSING
    device: DeviceConfig = MISSING
    parallelism: ParallelismConfig = MISSING
    measure: MeasureConfig = MISSING
    launcher: LauncherConfig = MISSING
    tracking: TrackingConfig = MISSING
    task: Task = Task.training
    gpus: int | None = None
    replicas: int | None = None
    threads: int | None = None
    batch_size: Any = None
    scaling: Scaling = Scaling.strong
    precision: Precision = Precision.fp32
    epochs: int | None = None
    optimizer: Optimizer | None = None
    learning_rate: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    seed: int = 1
    repeat: int = 1
    target_accuracy: float | None = None
    timeout_s: float | None = None
    data_dir: str | None = None
    skip_finished: bool = False
    dry_run: bool = False
    effort: Effort = Effort.full
    study: str | None = None


def register() -> None:
    """Put the schemas into Hydra's store and the resolvers into OmegaConf. Once per process is enough, twice does no harm."""
    store = ConfigStore.instance()
    store.store(name="crosstrain_schema", node=TrainConfig)
    # Not in the group `framework`, where --help would list it as something to choose.
    store.store(name="fake_framework_schema", node=FakeFrameworkConfig)
    store.store(name="jax_framework_schema", node=JaxFrameworkConfig)
    store.store(name="torch_framework_schema", node=TorchFrameworkConfig)
    register_resolvers()


def register_resolvers() -> None:
    """Our resolvers, into OmegaConf."""
    # A suffix for folders: two drivers started in the same second must not share one.
    OmegaConf.register_new_resolver("crosstrain.unique", lambda: secrets.token_hex(3), use_cache=True, replace=True)
    # a plain text of some 100,000 words that comes with Python: the documentation that help() shows
    OmegaConf.register_new_resolver("crosstrain.python_text", lambda: pydoc_data.topics.__file__, replace=True)
    # 7 -> 007, so that folders of a sweep sort in the order of its runs.
    OmegaConf.register_new_resolver("crosstrain.number", lambda n: f"{int(n):03d}", replace=True)


# Also where nothing but the task of a run is imported: in a job of submitit's.
register_resolvers()
