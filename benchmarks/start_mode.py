"""Does the measured speed depend on how the worker was started? It must not, by more than 2 %.

Four ways, taking turns with the same run.json (torch, one thread, synthetic data on the device): as a process by the driver; inline,
crosstrain_worker.session.work called in a script of the framework's interpreter; and twice as a fresh process without a driver. The
last two differ in nothing: their distance is what the machine does by itself.

Usage: python benchmarks/start_mode.py [--rounds 7] [--seconds 6] [--network lenet] [--batch 64]. Exit code 1 when the target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import running

from crosstrain import environments, paths

LIMIT_PERCENT = 2.0
INLINE = running.INLINE + "sys.exit(session.work(run, 0))"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    parser.add_argument("--seconds", type=float, default=6, help="of blocks in each turn")
    parser.add_argument("--network", default="lenet")
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()

    python = str(environments.find_or_make("torch", "cpu", None, None, print).python)
    budget = 2 * arguments.seconds
    overrides = [
        "framework=torch", f"network={arguments.network}", f"batch_size={arguments.batch}", "data=synthetic", "device=cpu", "threads=1",
        "epochs=0", f"measure.min_s={budget:g}", f"measure.max_s={budget:g}",
    ]  # fmt: skip
    process = [python, "-I", "-B", "-u", str(paths.worker_dir()), "FOLDER", "0"]
    ways = {
        "inline": [python, "-B", "-c", INLINE, "FOLDER", str(paths.worker_dir().parent)],
        "a process by itself": process,
        "another process by itself": process,
    }
    print(running.load())
    steps: dict[str, list[float]] = {name: [] for name in ("by the driver", *ways)}
    with tempfile.TemporaryDirectory() as temporary:
        for _ in range(arguments.rounds):
            run_folder = running.train(Path(temporary), *overrides)
            steps["by the driver"].append(running.step_ms(run_folder))
            for name, command in ways.items():
                with running.once_more(run_folder, command) as (folder, _):
                    steps[name].append(running.step_ms(folder))
    verdict = running.Verdict()
    base = statistics.median(steps["by the driver"])
    for name, values in steps.items():
        print(f"{name}: {running.spread(values)} ms")
    for name in ways:
        distance = 100 * abs(statistics.median(steps[name]) / base - 1)
        verdict.check(f"{name}: distance from the driver's", distance, LIMIT_PERCENT, "%")
    return verdict.code


if __name__ == "__main__":
    sys.exit(main())
