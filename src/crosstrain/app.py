"""What happens around the runs of one command: Hydra's start, checks before the first run, errors as one line, the exit code."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import math
import os
import shlex
import signal
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from crosstrain import config as schema
from crosstrain import paths, runspec
from crosstrain.errors import ConfigError, CrosstrainError


class Terminated(KeyboardInterrupt):
    """SIGTERM: handled as Ctrl-C is, with another exit code."""


class StartFailed(BaseException):
    """Carries an error (its __cause__) out of a Hydra callback: Hydra turns every Exception there into a warning and goes on."""


def main(arguments: Sequence[str], config_dir: Path | None = None) -> int:
    """Run Hydra on `arguments` (as on the command line of train.py). Returns the exit code, prints what went wrong in one line.

    0 all runs ok, 1 some run not ok, 2 configuration error, 3 tracking store not usable, 130 / 143 interrupted.
    """
    import hydra

    from crosstrain import progress

    progress.sweep.begin(0)  # nothing of an earlier call in this process counts
    verbose = any(argument.startswith("hydra.verbose") for argument in arguments)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, not to Hydra's own printer
    saved_argv = sys.argv
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP on purpose
            signal.signal(number, _terminated)
    try:
        arguments = _prepare(arguments, config_dir or paths.conf_dir())
        sys.argv = [saved_argv[0], *arguments]
        hydra.main(version_base="1.3", config_path=str(runspec.config_dirs[-1]), config_name="train")(_task)()
        return finish()
    except Terminated:
        return _interrupted(143)
    except KeyboardInterrupt:
        return _interrupted(130)
    except SystemExit as leaving:  # Hydra's own (--help, --version) and that of a dry run
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, StartFailed) as error:
        return _failed(error, arguments, verbose)
    finally:
        sys.argv = saved_argv


def _terminated(_signal: int, _frame: Any) -> None:
    raise Terminated


def _interrupted(code: int) -> int:
    finish()
    print("interrupted" if code == 130 else "terminated", file=sys.stderr)
    return code


def _failed(error: BaseException, arguments: Sequence[str], verbose: bool) -> int:
    """Print the error in one line (with hydra.verbose=true the traceback too). Returns the exit code."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from crosstrain import hydra_errors, progress

    if isinstance(error, StartFailed) and error.__cause__ is not None:
        error = error.__cause__
    if verbose:
        traceback.print_exception(error)
    code = ConfigError.exit_code
    if isinstance(error, CrosstrainError):
        line, code = str(error), error.exit_code
    elif isinstance(error, HydraException | OmegaConfBaseException) or type(error).__module__.startswith("yaml."):
        line = hydra_errors.one_line(error, arguments, runspec.config_dirs)
    else:
        line = ("" if type(error) is ValueError else f"{type(error).__name__}: ") + (str(error).splitlines() or ["no message"])[0]
        if progress.sweep.folder is not None:  # something was started
            code = 1
    print(f"error: {line}", file=sys.stderr)
    return code


def _prepare(arguments: Sequence[str], config_dir: Path) -> list[str]:
    """Register schemas and folders of groups. Returns the arguments in the order Hydra wants. Raises ConfigError."""
    from hydra._internal.utils import get_args_parser

    from crosstrain import hydra_errors

    schema.register()
    OmegaConf.register_new_resolver("crosstrain.options", _options, replace=True)
    # What Hydra logs beside the error it raises would be a second message on stderr.
    logging.getLogger("hydra").addHandler(logging.NullHandler())
    runspec.config_dirs[:] = [config_dir]
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        given, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).removeprefix("argument ")) from None
    for flag in rest:
        if flag.startswith("-"):
            known = [name for action in parser._actions for name in action.option_strings]
            raise ConfigError(f"{flag}: unknown flag; {hydra_errors.closest(flag, known)}")
    if given.config_dir:
        # A user's networks may be functions in a module beside their configuration.
        folder = Path(given.config_dir).expanduser().absolute()
        runspec.config_dirs.insert(0, folder)
        sys.path.insert(0, str(folder.parent))
    # Hydra wants the overrides in one piece; people write flags anywhere.
    overrides = [*given.overrides, *rest]
    for override in overrides:
        hydra_errors.parse(override, runspec.config_dirs)
    return [*(argument for argument in arguments if argument not in overrides), *overrides]


def _options() -> str:
    """The groups and their options, for --help."""
    from crosstrain import hydra_errors

    lines = []
    for group, options in sorted(hydra_errors.groups(runspec.config_dirs).items()):
        lines += textwrap.wrap(f"{group + ':':13}{', '.join(options)}", 110, subsequent_indent=" " * 13)
    return "\n".join(lines)


def _task(config: Any) -> float:
    from crosstrain.run import run

    if runspec.config_dirs:
        return run(config)
    try:
        return run(config) if _begin_job() else math.inf
    except KeyboardInterrupt:  # its outcome is written down; the command that waits for this job goes on
        return math.inf


def _begin_job() -> bool:
    """Do what `main` did in the process of the command: this is another one, a job of submitit's. False: it has nothing to do.

    A job of several nodes has a process on each; the first one is the driver, and it starts the ranks.
    """
    from hydra.core.hydra_config import HydraConfig

    sources = [source for source in HydraConfig.get().runtime.config_sources if source.schema == "file"]
    runspec.config_dirs[:] = [Path(source.path) for source in reversed(sources)]
    for folder in runspec.config_dirs[:-1]:
        sys.path.insert(0, str(folder.parent))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)  # submitit ignores SIGTERM
    return os.environ.get("SLURM_PROCID", "0") == "0"


class BeforeStart:
    """Hydra callback of a single run: the checks come before Hydra makes the run's folder. (A sweep's are in the sweeper.)"""

    def on_run_start(self, config: Any, **_: Any) -> None:
        try:
            before_first_run([config], config.hydra.run.dir)
        except Exception as error:
            raise StartFailed from error

    def __getattr__(self, name: str) -> Any:
        """Hydra calls the other hooks too; they have nothing to do."""
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


def before_first_run(configs: Sequence[Any], folder: str) -> None:
    """Check every cell, the output folder and the tracking store, in this order.

    Raises ConfigError, TrackingError or what Hydra raises for a bad value; leaves with 0 after a dry run.
    """
    from crosstrain import launch, plan, progress, run

    specs = []
    for number, config in enumerate(configs, 1):
        try:
            specs.append(runspec.from_config(config))
        except ConfigError as error:
            if len(configs) == 1:
                raise
            overrides = " ".join(config.hydra.overrides.task)
            raise ConfigError(f"{error} (in cell {number}: {overrides})") from error
    if configs[0].dry_run:
        plan.show(specs, [list(config.hydra.overrides.task) for config in configs])
        raise SystemExit(0)
    _check_writable(Path(folder).absolute())
    for launcher, hosts in {(spec.launcher, spec.hosts) for spec in specs} if not elsewhere(configs[0]) else ():
        launch.check(launcher, hosts, Path(folder).absolute())
    progress.sweep.begin(len(specs))
    for tracking in {json.dumps(spec.tracking, sort_keys=True) for spec in specs}:
        run.check_store(json.loads(tracking))
    # MLflow's half a million objects live as long as the process: without this the collector walks them again and again
    # (a fifth of the driver's CPU time in a sweep of four short runs).
    gc.freeze()


def elsewhere(config: Any) -> bool:
    """Whether the cells run in other processes, those of a Hydra launcher such as submitit's: what they need is there, not here."""
    return "basic_launcher" not in str(config.hydra.launcher.get("_target_", ""))


def _check_writable(folder: Path) -> None:
    """Raises ConfigError when the output folder can not be made; leaves nothing behind."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ConfigError(f"the output folder {folder} can not be made: {error.strerror}") from error


def finish() -> int:
    """After the last run: the short result table and how to see more. Returns 0 when every run was ok (or none was asked for), else 1."""
    from crosstrain import outcomes, progress, run, sync

    folder, total = progress.sweep.folder, progress.sweep.total
    if folder is not None:
        total -= len([*folder.glob(outcomes.SKIPPED), *folder.glob(f"*/{outcomes.SKIPPED}")])
    if folder is None or not (folder / outcomes.FILE).is_file():
        return 1 if total > 0 else 0
    sync.missed([Path(row["folder"]) for row in outcomes.read(folder)], run.checked_trackers)
    filled = run.fill_scaling()
    run.report()
    rows = [filled.get(row["mlflow_run_id"], row) for row in outcomes.read(folder)]
    with contextlib.suppress(BrokenPipeError):
        progress.show_table(rows, folder)
        _say_what_waits([Path(row["folder"]) for row in rows], folder)
    return 0 if all(row["ok"] for row in rows) and len(rows) >= total else 1


def _say_what_waits(run_folders: Sequence[Path], folder: Path) -> None:
    """How to bring the runs into the store that are not there."""
    from crosstrain import progress
    from crosstrain.tracking import journal

    waiting = len(journal.waiting(run_folders))
    if waiting:
        are = "1 run is" if waiting == 1 else f"{waiting} runs are"
        progress.say(f"{are} not in the store yet: crosstrain sync {shlex.quote(str(folder))}")
