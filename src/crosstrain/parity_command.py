"""`crosstrain parity`: prove that a framework trains the network of the spec, and write the certificate that runs carry."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from crosstrain import certificates, environments, guard, parity, paths, prepare, processes, progress, runspec
from crosstrain import config as schema
from crosstrain.certificates import Certificate
from crosstrain.errors import ConfigError, OutcomeError
from crosstrain.launch import local
from crosstrain.measured import tail_of

LIMIT_S = 900.0
SIGNS = {"passed": "✓", "failed": "✗", "not applicable": "-"}


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "parity",
        help="prove that frameworks train exactly the network of the spec",
        description="Runs the parity ladder and writes the certificate that every later run carries as its tag `parity`. "
        "Exit code 0: all proven.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py; commas try all: framework=torch,mxnet")
    parser.add_argument("--all", action="store_true", help="every framework with every network")
    parser.set_defaults(function=_run)


def _run(arguments: argparse.Namespace) -> int:
    cells = list(_cells(arguments.overrides, arguments.all))
    rows: list[tuple[str, str, Certificate | OutcomeError]] = []
    for number, overrides in enumerate(cells, 1):
        spec = _compose(overrides)
        title = f"{spec.network.name}-{spec.framework['name']}"
        with progress.RunLine((f"{number}/{len(cells)} " if len(cells) > 1 else "") + title) as line:
            try:
                verdict: Certificate | OutcomeError = prove(spec, line)
            except OutcomeError as error:
                verdict = error
        rows.append((spec.framework["name"], spec.network.name, verdict))
    _show(rows)
    return 0 if all(isinstance(verdict, Certificate) and verdict.proven for _, _, verdict in rows) else 1


def _cells(overrides: list[str], everything: bool) -> Any:
    """The product of all comma lists. With --all: of all frameworks (not the fakes) and networks that conf/ has."""
    if everything:
        for group in ("framework", "network"):
            names = sorted(path.stem for path in (paths.conf_dir() / group).glob("*.yaml") if not path.stem.startswith("fake"))
            if not any(o.startswith(f"{group}=") for o in overrides):
                overrides = [*overrides, f"{group}={','.join(names)}"]
    choices = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"{override}: must be key=value, e.g. framework=torch")
        choices.append([f"{key}={one}" for one in value.split(",")])
    return itertools.product(*choices)


def _compose(overrides: tuple[str, ...]) -> runspec.RunSpec:
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from crosstrain import hydra_errors

    schema.register()
    folders = [paths.conf_dir()]
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(folders[0])):
            return runspec.from_config(compose("train", overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(hydra_errors.one_line(error, overrides, folders)) from error


def prove(spec: runspec.RunSpec, line: progress.RunLine) -> Certificate:
    """Run the ladder of one framework and network, store and return its certificate. Raises OutcomeError when it can not run."""
    place = prepare.choose_place(spec)
    framework = spec.framework
    home = environments.find_or_make(
        framework["name"], place.kind, framework["python"], framework["version"], lambda text: progress.say(f"  {text}")
    )
    with tempfile.TemporaryDirectory(dir=paths.cache_dir("parity")) as name:
        folder = Path(name)
        line.update("preparing")
        run = parity.ladder_run_json(
            spec.network,
            {key: value for key, value in framework.items() if key not in ("python", "env")},
            folder,
            run_id=uuid.uuid4().hex,
            device=place.kind,
            gpus=[gpu.uuid for gpu in place.gpus[:1]],
            threads=place.threads,
            seed=spec.seed,
        )
        (folder / "run.json").write_text(json.dumps(run))
        _work(run, home, framework["env"], line)
        result = _result(folder)
        line.update("comparing with the reference")
        with np.load(folder / "ladder.npz") as arrays:
            certificate = parity.compare(spec.network, run, dict(arrays), result["versions"]["framework"])
    certificates.store(certificate)
    return certificate


def _work(run: dict[str, Any], home: environments.Environment, extra: dict[str, str], line: progress.RunLine) -> None:
    """Run the worker to its end; nothing of it is left afterwards."""
    ranks: list[subprocess.Popen[bytes]] = []
    with guard.start_guard(run["run_id"]):
        try:
            ranks += local.start(run, home, extra)
            line.update("ladder in the framework")
            ranks[0].wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise OutcomeError("timeout", f"the ladder did not end within {LIMIT_S:g} s") from None
        finally:
            processes.stop_all(run["run_id"], [rank.pid for rank in ranks], grace_s=1.0)
            for rank in ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.wait(1.0)


def _result(folder: Path) -> dict[str, Any]:
    path = folder / "result.0.json"
    if not path.is_file():
        last = tail_of(folder / "worker.0.err").strip().splitlines()[-1:] or ["it said nothing"]
        raise OutcomeError("crashed", f"the worker ended without a result: {last[0]}")
    result: dict[str, Any] = json.loads(path.read_text())
    if result["status"] != "ok":
        name = {"failed": "crashed"}.get(result["status"], result["status"])
        raise OutcomeError(name, result["message"], result["hint"])
    return result


def _show(rows: list[tuple[str, str, Certificate | OutcomeError]]) -> None:
    """The table framework x network x level; what failed, and what deviates, in words below it."""
    levels = list(parity.TITLES)
    table = Table()
    for column in ("framework", "network", *levels, "verdict"):
        table.add_column(column, justify="left" if column in ("framework", "network", "verdict") else "center")
    notes = []
    for framework, network, verdict in rows:
        if isinstance(verdict, OutcomeError):
            table.add_row(framework, network, *[""] * len(levels), verdict.outcome)
            notes.append(f"{framework} {network}: {verdict.outcome}: {verdict.message}" + (f" ({verdict.hint})" if verdict.hint else ""))
            continue
        states = {level.level: SIGNS[level.state] for level in verdict.levels}
        table.add_row(framework, network, *[states.get(level, "") for level in levels], "proven" if verdict.proven else "FAILED")
        notes.append(f"{framework} {verdict.version} {network}: {verdict.tag()}")
    progress.console.print(table)
    progress.say("levels: " + ", ".join(f"{number} {title}" for number, title in parity.TITLES.items()))
    for note in notes:
        progress.say(note)
