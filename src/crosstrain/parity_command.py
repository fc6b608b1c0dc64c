"""`crosstrain parity`: prove that a framework trains the network of the spec, and write the certificate that runs carry."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from crosstrain import (
    certificates,
    environments,
    networks,
    parity,
    parity_replicas,
    parity_table,
    paths,
    prepare,
    progress,
    runspec,
    workers,
)
from crosstrain import config as schema
from crosstrain.certificates import Certificate, Level
from crosstrain.errors import ConfigError, OutcomeError
from crosstrain.networks.spec import Spec

LIMIT_S = 900.0
SIGNS = {"passed": "✓", "failed": "✗", "not applicable": "-"}
#: levels that a reduced variant climbs in place of a large network
ON_VARIANT = [level for level in parity.TITLES if level not in ("1", "2")]
#: settings of a framework that the table shows where they are not the first value
SHOWN = {"compile": "off", "memory_format": "contiguous", "parallelism": "native", "lstm": "auto", "space_to_depth": False}


def add_command(commands: Any) -> None:
    # Read by a parser of our own: that of a command does not take flags among overrides. So with another prefix, as `plan` has it.
    about = "prove that frameworks train exactly the network of the spec"
    parser = commands.add_parser("parity", help=about, prefix_chars="\0", add_help=False)
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(function=lambda given: _run(_parser().parse_intermixed_args(given.arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crosstrain parity",
        description="Runs the parity ladder and writes the certificate that every later run carries as its tag `parity`. "
        "Exit code 0: all proven.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py; commas try all: framework=torch,mxnet")
    parser.add_argument("--all", action="store_true", help="every framework with every network")
    parser.add_argument("--record", metavar="FILE", type=Path, help="also keep what comes out in this JSON file")
    parser.add_argument("--resume", action="store_true", help="leave out what --record has of the code as it is now")
    parser.add_argument("--page", metavar="FILE", type=Path, help="write the table of --record into this Markdown page, between its marks")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with networks of your own, as for train.py")
    return parser


@dataclass(frozen=True)
class Cell:
    """One row of the table: the run's configuration, and the network that climbs the ladder (its own, or a reduced variant)."""

    spec: runspec.RunSpec
    ladder: Spec

    @property
    def framework(self) -> str:
        """`torch`, or `torch compile=on`."""
        settings = {**self.spec.framework, "parallelism": self.spec.parallelism}
        changed = [f"{key}={settings[key]}" for key, first in SHOWN.items() if settings.get(key, first) != first]
        return " ".join([settings["name"], *changed])

    @property
    def name(self) -> str:
        """The network's, with the arguments that are not its yaml's."""
        return f"{self.spec.network.name} {self.spec.variant}".strip()

    @property
    def reduced(self) -> bool:
        return self.ladder.key() != self.spec.network.key()


def _run(arguments: argparse.Namespace) -> int:
    folders = _config_dirs(arguments.config_dir)
    # All are composed, and all specs built, before the first is started.
    cells = [_compose(overrides, folders) for overrides in _cells(arguments.overrides, arguments.all, folders)]
    if arguments.record:
        parity_table.read(arguments.record)
        if arguments.resume:
            cells = [cell for cell in cells if not parity_table.is_current(arguments.record, cell.framework, cell.name)]
    rows: list[tuple[Cell, Certificate | OutcomeError]] = []
    for number, cell in enumerate(cells, 1):
        title = f"{cell.spec.network.name}-{cell.framework}"
        with progress.RunLine((f"{number}/{len(cells)} " if len(cells) > 1 else "") + title) as line:
            try:
                rows.append((cell, prove(cell, line)))
            except OutcomeError as error:
                rows.append((cell, error))
        if arguments.record:
            parity_table.record(arguments.record, parity_table.row_of(cell.framework, cell.name, rows[-1][1]))
    _show(rows)
    if arguments.record and arguments.page:
        parity_table.put_into(arguments.page, parity_table.markdown(parity_table.read(arguments.record)))
    return 0 if all(isinstance(verdict, Certificate) and verdict.proven for _, verdict in rows) else 1


def _config_dirs(given: str | None) -> list[Path]:
    """Folders with configuration groups, ours last. A user's networks may be functions in a module beside their folder."""
    folders = [paths.conf_dir()]
    if given is not None:
        folder = Path(given).expanduser().absolute()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {given}: there is no such folder")
        folders.insert(0, folder)
        sys.path.insert(0, str(folder.parent))
    runspec.config_dirs[:] = folders
    return folders


def _cells(overrides: Sequence[str], everything: bool, folders: Sequence[Path]) -> list[list[str]]:
    """The product of all comma lists. With --all: of all frameworks (not the fakes) and networks that the folders have."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.errors import HydraException

    from crosstrain import hydra_errors

    overrides = list(overrides)
    for group in ("framework", "network") if everything else ():
        names = {path.stem for folder in folders for path in (folder / group).glob("*.yaml")}
        if not any(override.startswith(f"{group}=") for override in overrides):
            overrides.append(f"{group}={','.join(sorted(name for name in names if not name.startswith('fake')))}")
    parsed = [hydra_errors.parse(override, folders) for override in overrides]
    try:
        return BasicSweeper.split_arguments(parsed, None)[0]
    except HydraException as error:  # interval(…), and glob(…), which wants more of Hydra
        raise ConfigError(f"{' '.join(overrides)}: give the values, KEY=A,B,C") from error


def _compose(overrides: Sequence[str], folders: Sequence[Path]) -> Cell:
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from crosstrain import hydra_errors

    schema.register()
    *theirs, ours = folders
    searched = ", ".join("'file://{}'".format(str(folder).replace("'", "\\'")) for folder in theirs)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(ours)):
            config = compose("train", overrides=[f"hydra.searchpath=[{searched}]", *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(hydra_errors.one_line(error, overrides, folders)) from error
    cell = Cell(runspec.from_config(config), networks.ladder_variant(config.network))
    missing = sorted({op.op for op in cell.spec.network.ops} - {op.op for op in cell.ladder.ops})
    if missing:
        raise ConfigError(f"network.ladder: the reduced variant of {cell.spec.network.name} has no {', '.join(missing)}, so it proves less")
    return cell


@dataclass(frozen=True)
class Site:
    """Where one cell's workers run, and what they have in common."""

    cell: Cell
    place: prepare.Place
    home: environments.Environment
    line: progress.RunLine

    def given(self) -> dict[str, Any]:
        """Keys of run.json."""
        gpus = [gpu.uuid for gpu in self.place.gpus[:1]]
        spec = self.cell.spec
        run = {"run_id": uuid.uuid4().hex, "device": self.place.kind, "gpus": gpus, "threads": self.place.threads}
        return {**run, "parallelism": spec.parallelism}

    def work(self, run: Mapping[str, Any], doing: str) -> list[dict[str, Any]]:
        """Run the workers of `run` to their end. Returns their results; raises OutcomeError where one is not ok."""
        self.line.update(doing)
        return workers.work(run, self.home, self.cell.spec.framework["env"], LIMIT_S, "the ladder")


def prove(cell: Cell, line: progress.RunLine) -> Certificate:
    """Run the ladder of one framework and network, store and return its certificate. Raises OutcomeError when it can not run."""
    place = prepare.choose_place(cell.spec)
    framework = cell.spec.framework
    home = environments.find_or_make(
        cell.spec.environment, place.kind, framework["python"], framework["version"], lambda text: progress.say(f"  {text}")
    )
    site = Site(cell, place, home, line)
    settings = {key: value for key, value in framework.items() if key not in ("python", "env")}
    with tempfile.TemporaryDirectory(dir=paths.cache_dir("parity")) as name:
        folder = Path(name)
        line.update("preparing")
        run = parity.ladder_run_json(cell.ladder, settings, folder, seed=cell.spec.seed, **site.given())
        (result,) = site.work(run, "ladder in the framework")
        line.update("comparing with the reference")
        with np.load(folder / "ladder.npz") as arrays:
            certificate = parity.compare(cell.ladder, run, dict(arrays), result["versions"]["framework"])
        certificate = replace(certificate, levels=(*certificate.levels, _level_9(site, run)))
        if cell.reduced:
            full = _subfolder(folder, "full")
            site.work(parity.shapes_run_json(cell.spec.network, settings, full, **site.given()), "the full network in the framework")
            certificate = parity.of_full(certificate, cell.spec.network, json.loads((full / "shapes.json").read_text()))
    certificates.store(certificate)
    return certificate


def _level_9(site: Site, run: Mapping[str, Any]) -> Level:
    """N replicas as one, where this framework, network and machine can have them. `run`: the ladder's."""
    network, gpus = site.cell.ladder, [gpu.uuid for gpu in site.place.gpus]
    why_not = parity_replicas.why_not(network, site.place.kind, len(gpus))
    if why_not:
        return parity_replicas.not_applicable(why_not)
    folder = _subfolder(Path(run["folder"]), "replicas")
    replicas = {**parity_replicas.run_json(run, folder, gpus[: parity_replicas.REPLICAS]), "run_id": uuid.uuid4().hex}
    try:
        site.work(replicas, f"{parity_replicas.REPLICAS} replicas in the framework")
    except OutcomeError as error:
        if error.outcome != "unsupported":
            raise
        return parity_replicas.not_applicable(error.message)
    return parity_replicas.judge(network, replicas, parity_replicas.read(folder, replicas))


def _subfolder(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def _show(rows: Sequence[tuple[Cell, Certificate | OutcomeError]]) -> None:
    """The table framework x network x level; what failed, and what deviates, in words below it."""
    table = Table()
    for column in ("framework", "network", *parity.TITLES, "verdict"):
        table.add_column(column, justify="center" if column in parity.TITLES else "left")
    notes = []
    for cell, verdict in rows:
        name = cell.name
        if isinstance(verdict, OutcomeError):
            table.add_row(cell.framework, name, *[""] * len(parity.TITLES), verdict.outcome)
            hint = f" ({verdict.hint})" if verdict.hint else ""
            notes.append(f"{cell.framework} {name}: {verdict.outcome}: {verdict.message}{hint}")
            continue
        states = {level.level: SIGNS[level.state] for level in verdict.levels}
        if verdict.variant:
            states |= {level: states[level] + "*" for level in ON_VARIANT if level in states and states[level] != "-"}
        table.add_row(cell.framework, name, *[states.get(level, "") for level in parity.TITLES], "proven" if verdict.proven else "FAILED")
        notes.append(f"{cell.framework} {verdict.version} {name}: {verdict.tag()}")
    progress.console.print(table)
    progress.say("levels: " + ", ".join(f"{number} {title}" for number, title in parity.TITLES.items()))
    if any(cell.reduced for cell, _ in rows):
        progress.say("* on a reduced variant of the network (`ladder` in its yaml); names, shapes and counts are the full network's")
    for note in notes:
        progress.say(note)
