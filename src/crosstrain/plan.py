"""`crosstrain plan` and dry_run=true: what each cell would do, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from crosstrain import environments, prepare, progress
from crosstrain.errors import OutcomeError
from crosstrain.runspec import RunSpec


def show(specs: Sequence[RunSpec], overrides: list[list[str]]) -> None:
    """Print one row per cell (`overrides`: those of each): the expected outcome, about how long, how much disk; then the sums."""
    differences = progress.swept([spec.name for spec in specs], overrides)
    table = Table(title=f"{len(specs)} cell{'s' if len(specs) != 1 else ''}", title_justify="left")
    for column in ("cell", *(["swept"] if differences else []), "batch", "expected", "time", "new disk"):
        table.add_column(column, overflow="fold", no_wrap=column in ("batch", "time", "new disk"))
    low_s = high_s = 0.0
    disk_mb = 0.0
    seen: set[str] = set()
    for number, spec in enumerate(specs):
        expected, low, high = expectation(spec)
        low_s, high_s = low_s + low, high_s + high
        new_mb, new_environment = new_disk_mb(spec, seen) if high else (0.0, "")
        disk_mb += new_mb
        table.add_row(
            f"{number + 1}. {spec.name}",
            *([differences[number]] if differences else []),
            str(spec.batch_size),
            expected + (f"; makes the environment {new_environment}" if new_environment else ""),
            f"{progress.duration(low)} - {progress.duration(high)}" if high else "-",
            f"{new_mb:.0f} MB" if new_mb else "-",
        )
    progress.console.print(table)
    progress.say(
        f"in all {progress.duration(low_s)} to {progress.duration(high_s)} of measuring (epochs and first builds of environments "
        f"come on top), {disk_mb:.0f} MB of new files; nothing was started"
    )


def expectation(spec: RunSpec) -> tuple[str, float, float]:
    """(expected outcome with its reason, least and most seconds of measuring). Data and limits of the framework show in the run only."""
    framework = spec.framework
    try:
        place = prepare.choose_place(spec)
        if framework["python"]:  # a given interpreter is only looked at, nothing is made
            environments.find_or_make(spec.environment, place.kind, framework["python"], framework["version"], progress.say)
        else:
            environments.environment_key(spec.environment, place.kind, framework["version"])
    except OutcomeError as error:
        return f"{error.outcome}: {error.message}", 0.0, 0.0
    low, high = float(spec.measure["min_s"]), float(spec.measure["max_s"])
    return ("ok" + (f", then {spec.epochs} epochs" if spec.epochs else "")), low, high


def new_disk_mb(spec: RunSpec, seen: set[str]) -> tuple[float, str]:
    """(MB of initial weights this cell adds, name of the environment that must be made first or "").

    `seen` keeps what earlier cells add. For a cell that `expectation` lets run; raises OutcomeError otherwise.
    """
    weights = f"weights {spec.network.key()} {spec.seed}"
    megabytes = 0.0 if weights in seen else 4e-6 * spec.network.parameter_count
    seen.add(weights)
    if spec.framework["python"]:
        return megabytes, ""
    accelerator = prepare.choose_place(spec).kind
    key = environments.environment_key(spec.environment, accelerator, spec.framework["version"])
    if key in seen or any(cached.key == key and cached.state == "ready" for cached in environments.list_environments()):
        return megabytes, ""
    seen.add(key)
    return megabytes, key
