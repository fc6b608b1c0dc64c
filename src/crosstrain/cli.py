"""The command `crosstrain`: everything beside training itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from crosstrain import __version__, doctor, environments_command, parity_command, sync
from crosstrain.errors import ConfigError, CrosstrainError, OutcomeError
from crosstrain.report import command as report_command
from crosstrain.report import compare
from crosstrain.tracking import view


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code; an error is one line on stderr."""
    parser = argparse.ArgumentParser(prog="crosstrain", description="Look at, check and prepare what train.py runs.")
    parser.add_argument("--version", action="version", version=f"crosstrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    # All arguments are for train.py, also --help and -m: with another prefix argparse takes none of them for its own.
    plan = commands.add_parser("plan", help="show what a train.py command would run, start nothing", prefix_chars="\0", add_help=False)
    plan.add_argument("overrides", nargs="*")
    plan.set_defaults(function=_plan)
    for module in (view, environments_command, parity_command, report_command, compare, sync, doctor):
        module.add_command(commands)
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return ConfigError.exit_code
    try:
        return int(given.function(given) or 0)
    except OutcomeError as error:
        print(f"error: {error.message}" + (f" ({error.hint})" if error.hint else ""), file=sys.stderr)
        return 1
    except CrosstrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _plan(arguments: argparse.Namespace) -> int:
    from crosstrain import app

    return app.main([*arguments.overrides, "dry_run=true"])


if __name__ == "__main__":
    sys.exit(main())
