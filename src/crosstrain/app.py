"""What happens around the runs of one command: Hydra's start, the checks before the first run, errors as one line, the exit code."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crosstrain import config as schema
from crosstrain import paths, runspec
from crosstrain.errors import ConfigError, CrosstrainError

log = logging.getLogger(__name__)


class Terminated(KeyboardInterrupt):
    """SIGTERM: handled as Ctrl-C is, with another exit code."""


def main(arguments: Sequence[str], config_dir: Path | None = None) -> int:
    """Run Hydra on `arguments` (as on the command line of train.py). Returns the exit code, prints what went wrong in one line.

    0 all runs ok, 1 some run not ok, 2 configuration error, 3 tracking store not usable, 130 / 143 interrupted.
    """
    import hydra
    from omegaconf.errors import OmegaConfBaseException

    from crosstrain import hydra_errors, progress

    # Hydra takes its flags before or behind the overrides only; people write them anywhere.
    flags = [a for a in arguments if a in ("-m", "--multirun")]
    arguments = [*flags, *(a for a in arguments if a not in flags)]
    verbose = any(argument.startswith("hydra.verbose") for argument in arguments)
    config_dir = config_dir or paths.conf_dir()
    _register(arguments, config_dir)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, not to Hydra's own printer
    saved_argv, sys.argv = sys.argv, [sys.argv[0], *arguments]
    signal.signal(signal.SIGTERM, _terminated)
    try:
        hydra.main(version_base="1.3", config_path=str(config_dir), config_name="train")(_task)()
        return finish()
    except CrosstrainError as error:
        return _say(str(error), error.exit_code, verbose)
    except (hydra.errors.HydraException, OmegaConfBaseException) as error:
        line = hydra_errors.one_line(error, arguments, runspec.config_dirs)
        return _say(line, ConfigError.exit_code, verbose)
    except Terminated:
        return _interrupted(143)
    except KeyboardInterrupt:
        return _interrupted(130)
    except SystemExit as leaving:  # Hydra's own (--help, --version, argparse) and ours from BeforeStart
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        log.debug("unexpected", exc_info=True)
        started = progress.sweep.folder is not None
        return _say(f"{type(error).__name__}: {error}".splitlines()[0], 1 if started else ConfigError.exit_code, verbose)
    finally:
        sys.argv = saved_argv


def _terminated(_signal: int, _frame: Any) -> None:
    raise Terminated


def _interrupted(code: int) -> int:
    finish()
    print("interrupted" if code == 130 else "terminated", file=sys.stderr)
    return code


def _say(line: str, code: int, verbose: bool) -> int:
    if verbose:
        import traceback

        traceback.print_exc()
    print(f"error: {line}", file=sys.stderr)
    return code


def _register(arguments: Sequence[str], config_dir: Path) -> None:
    """Schemas, resolvers, and where groups are looked for; a user's own --config-dir may import from beside it."""
    schema.register()
    folders = [config_dir]
    for index, argument in enumerate(arguments):
        value = None
        if argument in ("--config-dir", "-cd") and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith("--config-dir="):
            value = argument.split("=", 1)[1]
        if value:
            folder = Path(value).expanduser().absolute()
            folders.insert(0, folder)
            sys.path.insert(0, str(folder.parent))
    runspec.config_dirs[:] = folders


def _task(config: Any) -> float:
    from crosstrain.run import run

    return run(config)


class BeforeStart:
    """Hydra callback of a single run: the checks come before Hydra makes the run's folder. (A sweep's are in the sweeper.)"""

    def on_run_start(self, config: Any, **_: Any) -> None:
        try:
            before_first_run([config])
        except CrosstrainError as error:
            # Hydra turns an Exception of a callback into a warning and goes on.
            verbose = bool(config.hydra.verbose)
            raise SystemExit(_say(str(error), error.exit_code, verbose)) from error

    def __getattr__(self, name: str) -> Any:
        """Hydra calls the other hooks too; they have nothing to do."""
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


def before_first_run(configs: Sequence[Any]) -> None:
    """Check every cell and the tracking store. Raises ConfigError or TrackingError; leaves with 0 after a dry run."""
    specs = []
    for config in configs:
        try:
            specs.append(runspec.from_config(config))
        except ConfigError as error:
            if len(configs) == 1:
                raise
            overrides = " ".join(config.hydra.overrides.task)
            raise ConfigError(f"{error} (in the cell {overrides})") from error
    if configs and configs[0].dry_run:
        from crosstrain import plan

        plan.show(specs)
        raise SystemExit(0)
    from crosstrain import progress, run

    progress.sweep.begin(len(specs))
    for tracking in {json.dumps(spec.tracking, sort_keys=True) for spec in specs}:
        run.tracker(json.loads(tracking))


def finish() -> int:
    """After the last run: the short result table and how to see more. Returns 0 when every run was ok, else 1."""
    from crosstrain import outcomes, progress

    folder = progress.sweep.folder
    if folder is None or not (folder / "outcomes.jsonl").is_file():
        return 1
    rows = outcomes.read(folder)
    with contextlib.suppress(BrokenPipeError):
        progress.show_table(rows, folder)
    return 0 if all(row["ok"] for row in rows) and len(rows) >= progress.sweep.total else 1
