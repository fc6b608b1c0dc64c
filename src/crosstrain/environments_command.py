"""`crosstrain env list | make | remove | check | bundle`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from crosstrain import bundle, environments, locks
from crosstrain.errors import ConfigError, OutcomeError


def add_command(subparsers: argparse._SubParsersAction) -> None:
    """Add `env` to the commands; the chosen function is `args.function(args) -> exit code`."""
    parser = subparsers.add_parser("env", help="the frameworks' Python environments: list, make, remove, check, bundle")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|make|remove|check|bundle")
    actions.add_parser("list", help="what there is, its state and size").set_defaults(function=_told(_list))
    make = actions.add_parser("make", help="make environments now instead of on first use")
    make.add_argument("names", nargs="*", metavar="FRAMEWORK", help="torch, or with the accelerator: torch.gpu")
    make.add_argument("--all", action="store_true", help="of every framework, for --accelerator")
    make.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu", help="default: cpu")
    make.add_argument("--version", help="another version of the framework than the lock's: 2.9.0")
    make.set_defaults(function=_make)
    for name, function, text in (
        ("remove", _remove, "remove environments"),
        ("check", _check, "import the framework in each and print its version"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("names", nargs="*", metavar="NAME", help="torch, torch.gpu, or a name that env list shows")
        action.add_argument("--all", action="store_true", help="all of them")
        action.set_defaults(function=_told(function))
    packed = actions.add_parser("bundle", help="put all wheels into a folder, for a machine without a network")
    packed.add_argument("names", nargs="+", metavar="NAME", help="driver, a framework, or with the accelerator: torch.gpu")
    packed.add_argument("--to", required=True, type=Path, metavar="DIR", help="the folder to make")
    packed.add_argument("--python", metavar="X.Y", help="for another Python than the lock's (driver: than this one): 3.12")
    packed.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu", help="default: cpu")
    packed.add_argument("--version", help="another version of the framework than the lock's: 2.9.0")
    packed.set_defaults(function=_bundle)


def _told(function: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The same, with a cache that can not be read or written told in one line (make and bundle tell it themselves)."""

    def run(args: argparse.Namespace) -> int:
        try:
            return function(args)
        except BrokenPipeError:  # … | head
            raise
        except OSError as error:
            hint = "CROSSTRAIN_CACHE names another folder for environments"
            raise OutcomeError("env_missing", f"the environments can not be reached: {error}", hint) from error

    return run


def _list(_args: argparse.Namespace) -> int:
    rows = [("environment", "state", "Python", "framework", "size", "made")]
    cached = environments.list_environments()
    for one in cached:
        facts = one.facts
        size = f"{one.size / 1e9:.2f} GB"
        rows.append((one.key, one.state, facts.get("python", ""), facts.get("main", ""), size, facts.get("made", "")[:16]))
    there = {one.key for one in cached}
    for lock in locks.all_locks():
        if lock.key() not in there:
            disk = lock.gigabytes("disk", cpu_wheel=False)
            size = f"up to {disk:g} GB" if disk else ""
            rows.append((lock.key(), "not made", lock.python, " ".join(lock.pins[0]), size, ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    total = sum(one.size for one in cached)
    print(f"{len(cached)} environments, {total / 1e9:.2f} GB, in {environments.paths.cache_dir('environments')}")
    return 0


def _make(args: argparse.Namespace) -> int:
    names = [lock.name for lock in locks.all_locks() if lock.accelerator == args.accelerator] if args.all else args.names
    if not names or (args.version and len(names) > 1):
        raise ConfigError("crosstrain env make needs a framework (--version: exactly one), or --all")
    failed = 0
    for name in names:
        framework, _, accelerator = name.partition(".")
        try:
            made = environments.make(framework, accelerator or args.accelerator, args.version, _show)
            print(f"{name}: {made.python}")
        except OutcomeError as error:
            failed += 1
            _complain(name, error)
    return 1 if failed else 0


def _chosen(args: argparse.Namespace) -> list[environments.Cached]:
    """The cached environments that the names mean: torch all of torch, torch.gpu those for GPUs, or one by its full name."""
    cached = environments.list_environments()
    if args.all:
        return cached
    chosen = []
    for name in args.names:
        prefix = name.replace(".", "-")
        stems = (prefix, f"{prefix}-cpu", f"{prefix}-gpu")
        found = [one for one in cached if one.key == name or one.key.rpartition("-")[0] in stems]
        if not found:
            raise ConfigError(f"there is no environment {name}; crosstrain env list shows them")
        chosen += [one for one in found if one not in chosen]
    if not chosen:
        raise ConfigError(f"crosstrain env {args.action} needs a name, or --all")
    return chosen


def _remove(args: argparse.Namespace) -> int:
    failed = 0
    for one in _chosen(args):
        try:
            print(f"{one.key}: removed, {environments.remove(one.key) / 1e9:.2f} GB")
        except OutcomeError as error:
            failed += 1
            _complain(one.key, error)
    return 1 if failed else 0


def _check(args: argparse.Namespace) -> int:
    failed = 0
    for one in _chosen(args):
        try:
            print(f"{one.key}: {environments.check(one)}")
        except OutcomeError as error:
            failed += 1
            _complain(one.key, error)
    return 1 if failed else 0


def _bundle(args: argparse.Namespace) -> int:
    if args.version and (len(args.names) > 1 or bundle.DRIVER in args.names):
        raise ConfigError("crosstrain env bundle: --version is for exactly one framework")
    parts = [bundle.part(name, args.accelerator, args.python, args.version) for name in dict.fromkeys(args.names)]
    size = bundle.write(args.to, parts, _show)
    print(f"{args.to}: {size / 1e6:.0f} MB; its README.md says how to install from it")
    return 0


def _show(line: str) -> None:
    print(line, flush=True)


def _complain(name: str, error: OutcomeError) -> None:
    print(f"{name}: {error.message}" + (f" ({error.hint})" if error.hint else ""), file=sys.stderr)
