"""The sweeper `cells`: Hydra's basic sweeper plus a list of sub-products, because the studies are no full product.

    hydra.sweeper.cells: [{network: fcn_s, batch_size: "64,128"}, {network: alexnet_s, batch_size: "16,32"}]

Each entry is swept like a command line of its own; a key given on the real command line replaces that key in every entry.
`smoke` is the list that effort=smoke takes instead: a study that finishes in minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from crosstrain import app, hydra_errors, progress, runspec
from crosstrain.errors import ConfigError


@dataclass
class CellsSweeperConfig:
    _target_: str = "hydra_plugins.cells_sweeper.cells.CellsSweeper"
    max_batch_size: int | None = None
    params: dict[str, str] | None = None
    cells: list[dict[str, Any]] = field(default_factory=list)
    smoke: list[dict[str, Any]] = field(default_factory=list)


ConfigStore.instance().store(group="hydra/sweeper", name="cells", node=CellsSweeperConfig, provider="crosstrain")


class CellsSweeper(BasicSweeper):
    def __init__(
        self,
        max_batch_size: int | None = None,
        params: dict[str, str] | None = None,
        cells: Sequence[dict[str, Any]] = (),
        smoke: Sequence[dict[str, Any]] = (),
    ) -> None:
        super().__init__(max_batch_size, params)
        self.cells = cells
        self.smoke = smoke

    def sweep(self, arguments: list[str]) -> Any:
        """Compose and check every cell, then start the first. Raises ConfigError or TrackingError before anything exists."""
        assert self.config is not None and self.launcher is not None and self.hydra_context is not None
        batch = self.expand(arguments)
        if not batch:
            raise ConfigError("this sweep has no cell: a glob(…) or range(…) matches nothing")
        with progress.working(f"checking {len(batch)} cells"):  # 0.1 s each
            configs = [self._compose(number, overrides) for number, overrides in enumerate(batch, 1)]
        folder = Path(self.config.hydra.sweep.dir)
        app.before_first_run(configs, str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        progress.sweep.folder = folder.absolute()
        results = self.launcher.launch(batch, initial_job_idx=0) if not app.elsewhere(self.config) else self._launch_elsewhere(batch)
        for result in results:
            _ = result.return_value  # raises what a job raised
        return results

    def _launch_elsewhere(self, batch: list[list[str]]) -> Any:
        """By a launcher that makes jobs of the cells. What they did is in outcomes.jsonl, also where one ended without an answer."""
        assert self.launcher is not None
        progress.say(f"{len(batch)} cell{'s' if len(batch) > 1 else ''} as jobs of their own; Ctrl-C leaves them running")
        try:
            return self.launcher.launch(batch, initial_job_idx=0)
        except Exception as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            progress.say(f"error: a job ended without an answer: {line}; of others that still run crosstrain report tells later")
            return []

    def expand(self, arguments: list[str]) -> list[list[str]]:
        """The overrides of every cell, in order. Cells that only a value of the command line made equal are one."""
        given = [self._parse(override) for override in [*self._parse_config(), *arguments]]
        keys = {override.get_key_element().lstrip("+~") for override in given}
        rows: list[list[str]] = []
        owners: dict[tuple[str, ...], dict[str, Any]] = {}
        for cell in self._chosen(given) or [{}]:
            own = [self._parse(f"{key}={_text(value)}") for key, value in cell.items() if key not in keys]
            for row in self.split_arguments([*given, *own], None)[0]:
                if owners.setdefault(tuple(sorted(row)), cell) == cell:
                    rows.append(row)
        return rows

    def _chosen(self, given: Sequence[Override]) -> Sequence[dict[str, Any]]:
        assert self.config is not None
        effort = next((override for override in reversed(given) if override.get_key_element() == "effort"), None)
        if effort is not None and effort.is_sweep_override():
            raise ConfigError(f"{effort.input_line}: must be one of full, smoke: a study has other cells for each")
        smoke = effort.value() == "smoke" if effort is not None else self.config.effort == "smoke"
        return self.smoke if smoke and self.smoke else self.cells

    def _compose(self, number: int, overrides: list[str]) -> DictConfig:
        assert self.config is not None and self.hydra_context is not None
        try:
            return self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        except (HydraException, OmegaConfBaseException) as error:
            line = hydra_errors.one_line(error, overrides, runspec.config_dirs)
            raise ConfigError(f"{line} (in cell {number}: {' '.join(overrides)})") from error

    def _parse(self, override: str) -> Override:
        assert self.hydra_context is not None
        parsed = hydra_errors.parse(override, runspec.config_dirs, self.hydra_context.config_loader)
        if parsed.is_sweep_override() and not parsed.is_discrete_sweep():
            raise ConfigError(f"{override}: give the values, {parsed.key_or_group}=A,B,C")
        return parsed


def _text(value: Any) -> str:
    return "null" if value is None else str(value)
