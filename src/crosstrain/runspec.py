"""From the composed configuration to a RunSpec: every value checked, every recommendation applied, nothing left to guess."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from crosstrain import config as schema
from crosstrain import data as data_sets
from crosstrain import hydra_errors, locks, networks, paths
from crosstrain.errors import ConfigError
from crosstrain.networks.spec import Spec

#: folders with configuration groups, ours and those of --config-dir (set by app)
config_dirs: list[Path] = []

Check = tuple[str, Callable[[Any], bool], str]


@dataclass(frozen=True)
class RunSpec:
    """One cell, resolved as far as it can be without looking at the machine."""

    framework: dict[str, Any]
    network: Spec
    variant: str  # "" or the network's arguments that are not those of its yaml: `stage=ae1`
    data: dict[str, Any]
    device: str  # auto | cpu | gpu
    oversubscribe: bool
    parallelism: str
    measure: dict[str, Any]
    tracking: dict[str, Any]
    launcher: str  # local | slurm | mpi
    hosts: tuple[str, ...]  # of launcher=mpi
    nodes: int | None
    task: str
    gpus: int | None
    replicas: int | None
    threads: int | None
    batch_size: int | str  # "max"
    scaling: str
    precision: str
    epochs: int
    optimizer: dict[str, Any]
    seed: int
    repeat: int
    target_accuracy: float | None
    timeout_s: float | None
    data_dir: Path | None
    skip_finished: bool
    effort: str
    study: str

    @property
    def copies(self) -> int:
        """Replicas asked for: one per GPU, or `replicas` on the CPU."""
        return self.gpus or self.replicas or 1

    @property
    def environment(self) -> str:
        """The framework's environment that it needs, by the name of its lock: torch, torch-horovod."""
        return self.framework["name"] + (locks.HOROVOD if self.parallelism == "horovod" else "")

    @property
    def batch_per_replica(self) -> int:
        assert isinstance(self.batch_size, int)
        return self.batch_size if self.scaling == "weak" else self.batch_size // self.copies

    @property
    def batch_global(self) -> int:
        return self.batch_per_replica * self.copies

    @property
    def name(self) -> str:
        """The run's name in tables: network-framework-device, e.g. resnet50-torch-4gpu or lenet-mxnet-cpu-2threads."""
        if self.gpus or self.device == "gpu":
            device = f"{self.copies}gpu"
        else:
            device = "auto" if self.device == "auto" else "cpu"
            device = f"{self.copies}x{device}" if self.copies > 1 else device
            if self.threads:
                device += f"-{self.threads}thread{'s' if self.threads > 1 else ''}"
        nodes = f"-{self.nodes}nodes" if self.nodes and self.nodes > 1 and self.copies > 1 else ""
        return f"{self.network.name}-{self.framework['name']}-{device}{nodes}"


def _positive(value: Any) -> bool:
    return value > 0 and math.isfinite(value)


def _one_of(*names: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda v: v in names), f"one of {', '.join(names)}"


def _frameworks() -> list[str]:
    return sorted(path.stem.removeprefix("on_") for path in (paths.worker_dir() / "frameworks").glob("on_*.py"))


#: a part of a folder's name
NAME = (lambda v: re.fullmatch(r"\w[\w.+-]*", str(v)) is not None), "a name of letters, digits and . _ + -"

CHECKS: list[Check] = [
    ("framework.name", *_one_of(*_frameworks())),
    ("framework.env", lambda v: all(isinstance(value, str) for value in v.values()), "a mapping of names to texts"),
    ("network.name", *NAME),
    ("data.name", *NAME),
    ("device.name", *_one_of("auto", "cpu", "gpu")),
    ("parallelism.name", *_one_of("native", "horovod")),
    ("launcher.name", *_one_of("local", "slurm", "mpi")),
    ("launcher.hosts", lambda v: all(re.fullmatch(r"\w[\w.-]*", host) for host in v), "a list of host names or IPv4 addresses"),
    ("launcher.hosts", lambda v: len(set(v)) == len(v), "a list that names each host once"),
    ("launcher.nodes", lambda v: v >= 1, "a number >= 1"),
    ("tracking.name", *_one_of("mlflow", "journal")),
    ("optimizer", *_one_of(*schema.Optimizer.__members__)),
    ("gpus", lambda v: v != 0, "a number of GPUs >= 1; for the CPU say device=cpu"),
    ("gpus", lambda v: v >= 1, "a number of GPUs >= 1"),
    ("replicas", lambda v: v >= 1, "a number >= 1"),
    ("threads", lambda v: v >= 1, "a number >= 1"),
    ("batch_size", lambda v: v == "max" or (type(v) is int and v >= 1), "a whole number >= 1, or max"),
    ("epochs", lambda v: v >= 0, "a number >= 0 (0 = timing only)"),
    ("learning_rate", _positive, "a number > 0"),
    ("momentum", lambda v: 0 <= v < 1, "a number in [0, 1)"),
    ("clip_norm", _positive, "a number > 0"),  # of network.recommended only
    ("weight_decay", lambda v: v >= 0 and math.isfinite(v), "a number >= 0"),
    ("seed", lambda v: 0 <= v < 2**32, "a number in [0, 2^32)"),
    ("repeat", lambda v: v >= 1, "a number >= 1"),
    ("target_accuracy", lambda v: 0 < v <= 1, "a fraction in (0, 1]"),
    ("timeout_s", _positive, "seconds > 0"),
    ("data.samples", lambda v: v >= 1, "a number >= 1"),
    ("framework.step_ms", lambda v: 0 <= v < 1e6, "milliseconds in [0, 1e6)"),
    ("framework.fault_rank", lambda v: v >= 0, "a number >= 0"),
    ("framework.fault_iteration", lambda v: v >= 0, "a number >= 0"),
    ("framework.fault_batch", lambda v: v >= 0, "a number >= 0"),
    ("measure.min_s", lambda v: v >= 0 and math.isfinite(v), "seconds >= 0"),
    ("measure.max_s", _positive, "seconds > 0"),
    ("measure.window", lambda v: v >= 5, "a number >= 5"),
    ("measure.min_iterations", lambda v: v >= 1, "a number >= 1"),
    ("measure.min_blocks", lambda v: v >= 1, "a number >= 1"),
    ("measure.block_s", _positive, "seconds > 0"),
    ("measure.ci_target", lambda v: 0 < v < 1, "a fraction in (0, 1)"),
    ("measure.warmup", lambda v: v >= 0, "a number >= 0"),
    ("measure.iterations", lambda v: v >= 1, "a number >= 1"),
    ("measure.timeouts.import_s", _positive, "seconds > 0"),
    ("measure.timeouts.build_s", _positive, "seconds > 0"),
    ("measure.timeouts.first_step_s", _positive, "seconds > 0"),
    ("measure.timeouts.stall_s", _positive, "seconds > 0"),
]


def from_config(config: DictConfig) -> RunSpec:
    """Check a composed configuration and resolve it. Raises ConfigError with one line."""
    _check_keys(config)
    _check_recommended(config.network)
    for key, good, allowed in CHECKS:
        value = OmegaConf.select(config, key)
        if value is not None and not good(value):
            raise ConfigError(f"{key}={value}: must be {allowed}")
    plain = _plain(config)
    network = networks.build(plain["network"])
    recommended = plain["network"].get("recommended") or {}
    data = _data(plain["data"], recommended)
    data_sets.check(data)
    measure = plain["measure"]
    epochs = plain["epochs"]
    if epochs is None:
        recommended_data = data["name"] == recommended.get("data") and plain["task"] == "training"
        epochs = recommended.get("epochs", 0) if recommended_data else 0
    if plain["effort"] == "smoke":
        measure = {**measure, **_plain(_load("measure", "smoke"))}
        epochs = min(epochs, 1)
    optimizer = {
        "name": plain["optimizer"] or recommended.get("optimizer", "sgd"),
        **{key: _or(plain[key], recommended.get(key, default)) for key, default in OPTIMIZER_DEFAULTS.items()},
        "clip_norm": recommended.get("clip_norm"),
    }
    spec = RunSpec(
        framework=plain["framework"],
        network=network,
        variant=_variant(plain["network"]),
        data=data,
        device=plain["device"]["name"],
        oversubscribe=plain["device"]["oversubscribe"],
        parallelism=plain["parallelism"]["name"],
        measure=measure,
        tracking=plain["tracking"],
        launcher=plain["launcher"]["name"],
        hosts=tuple(plain["launcher"]["hosts"] or ()),
        nodes=plain["launcher"]["nodes"],
        batch_size=_or(plain["batch_size"], recommended.get("batch_size", 32)),
        epochs=epochs,
        optimizer=optimizer,
        data_dir=Path(plain["data_dir"]).expanduser().absolute() if plain["data_dir"] else None,
        study=plain["study"] or "",
        **{key: plain[key] for key in COPIED},
    )
    _check_together(spec)
    return spec


def _check_keys(config: DictConfig, prefix: str = "") -> None:
    """Hydra refuses keys that are not in the schema, but not those added with +, nor does it miss those deleted with ~."""
    kind = OmegaConf.get_type(config)
    assert kind is not None
    known = [field.name for field in fields(kind)]
    for key in map(str, config):
        if key not in known and prefix + key != "hydra":
            raise ConfigError(f"{prefix}{key}: unknown key; {hydra_errors.near_sibling(prefix + key, known)}")
    for key in known:
        if key not in config or OmegaConf.is_missing(config, key):
            raise ConfigError(f"{prefix}{key}: is missing")
        node = config._get_node(key)
        if isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node)):
            _check_keys(node, f"{prefix}{key}.")


def _check_recommended(network: DictConfig) -> None:
    """What a network recommends has no schema; its values may be those of the root keys."""
    recommended = network.get("recommended") or {}
    checks = {key: (good, allowed) for key, good, allowed in CHECKS if key in RECOMMENDED}
    for key, value in recommended.items():
        where = f"network.recommended.{key}"
        if key not in RECOMMENDED:
            raise ConfigError(f"{where}: unknown key; {hydra_errors.closest(key, RECOMMENDED)}")
        good, allowed = checks.get(key, (lambda v: isinstance(v, str), "a name"))
        try:
            fine = value is None or good(value)
        except TypeError:
            fine = False
        if not fine:
            raise ConfigError(f"{where}={value}: must be {allowed}")


def _variant(network: Mapping[str, Any]) -> str:
    usual = _plain(_load("network", network["name"], {}))
    changed = {key: value for key, value in network.items() if key not in NO_ARGUMENTS and usual.get(key, value) != value}
    return " ".join(f"{key}={value}" for key, value in changed.items())


#: keys of a network's config that its function does not take
NO_ARGUMENTS = ("name", "_target_", "ladder", "recommended")
RECOMMENDED = ["batch_size", "data", "epochs", "optimizer", "learning_rate", "momentum", "weight_decay", "clip_norm"]
#: keys of the configuration that a RunSpec takes as they are
COPIED = ["task", "gpus", "replicas", "threads", "scaling", "precision", "seed", "repeat", "target_accuracy", "timeout_s",
          "skip_finished", "effort"]  # fmt: skip
OPTIMIZER_DEFAULTS = {"learning_rate": 0.01, "momentum": 0.0, "weight_decay": 0.0}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _plain(config: Any) -> dict[str, Any]:
    """Plain dict of a configuration node, enumerations as their names. The hydra node (only composed here) is left out."""
    if "hydra" in config:
        config = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _load(group: str, name: str, otherwise: dict[str, Any] | None = None) -> DictConfig:
    """An option of a group as its yaml has it; `otherwise` where there is none, without it ConfigError."""
    for folder in config_dirs or [paths.conf_dir()]:
        path = folder / group / f"{name}.yaml"
        if path.is_file():
            loaded = OmegaConf.load(path)
            assert isinstance(loaded, DictConfig)
            return loaded
    if otherwise is not None:
        return OmegaConf.create(otherwise)
    names = [path.stem for folder in config_dirs for path in (folder / group).glob("*.yaml")]
    raise ConfigError(f"network.recommended.{group}={name}: unknown; {hydra_errors.closest(name, names)}")


def _data(data: dict[str, Any], recommended: Mapping[str, Any]) -> dict[str, Any]:
    """The data group, `auto` replaced by the network's recommendation (what was given beside `auto` still counts)."""
    if data["name"] != "auto":
        return data
    if data["_target_"] is not None:
        raise ConfigError(f"data._target_={data['_target_']}: data=auto takes what the network recommends; choose data=NAME")
    chosen = _plain(_load("data", recommended.get("data", "synthetic")))
    given = {key: data[key] for key in ("placement", "samples") if data[key] is not None}
    if data["fit"] != "none":
        given["fit"] = data["fit"]
    return {"placement": None, "fit": "none", "samples": None, **chosen, **given}


def _check_together(spec: RunSpec) -> None:
    """Values that are fine alone and wrong together."""
    version = spec.framework.get("version")
    if version is not None and not re.fullmatch(r"\d+\.\d+\.\d+([.+a-z]\w*)*", version):
        example = "e.g. 2.10.0 (2.10 alone is read as the number 2.1)"
        raise ConfigError(f"framework.version={version}: must have three components, {example}")
    if spec.nodes and spec.launcher == "local":
        raise ConfigError(f"launcher.nodes={spec.nodes}: launcher=local has one machine; say launcher=slurm or launcher=mpi")
    if spec.hosts and spec.launcher != "mpi":
        raise ConfigError(f"launcher.hosts=[{','.join(spec.hosts)}]: launcher={spec.launcher} takes no hosts; say launcher=mpi")
    if spec.device == "cpu" and spec.gpus:
        raise ConfigError(f"gpus={spec.gpus}: device=cpu has no GPUs; for copies of the model on the CPU say replicas={spec.gpus}")
    if spec.replicas and (spec.gpus or spec.device == "gpu"):
        raise ConfigError(f"replicas={spec.replicas}: is for device=cpu; on GPUs say gpus={spec.replicas}")
    if spec.batch_size != "max" and spec.scaling == "strong" and int(spec.batch_size) % spec.copies:
        raise ConfigError(f"batch_size={spec.batch_size}: must be a multiple of the {spec.copies} replicas (scaling=strong)")
    if spec.epochs and spec.task != "training":
        raise ConfigError(f"epochs={spec.epochs}: task={spec.task} trains nothing; say epochs=0 or task=training")
    if spec.target_accuracy is not None and not spec.epochs:
        raise ConfigError(f"target_accuracy={spec.target_accuracy}: needs epochs >= 1")
    measure = spec.measure
    if measure["max_s"] < measure["min_s"]:
        raise ConfigError(f"measure.max_s={measure['max_s']}: must be >= measure.min_s={measure['min_s']}")
    if measure["warmup"] is not None and measure["iterations"] is None:
        raise ConfigError(f"measure.warmup={measure['warmup']}: needs measure.iterations")
    if measure["iterations"] is not None and (measure["warmup"] or 0) >= measure["iterations"]:
        given = f"measure.warmup={measure['warmup']}: must be < measure.iterations={measure['iterations']}"
        raise ConfigError(f"{given}, else nothing is left to measure")
