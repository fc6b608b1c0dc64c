"""Does the measured step on a GPU cost what a hand-written loop costs? crosstrain's step_ms against gpu_loop_torch.py or gpu_loop_jax.py.

A cell is framework:network:precision:batch[:compile[:memory_format]], the network one of those scripts': resnet50, resnet50_v1.5, fcn_s.
Each cell: the loop by hand, a run of `train.py` (synthetic data on the device), the loop by hand again, and with --events the run's worker
once more with a CUDA event recorded before each of its syncs, so that every block is timed by the host's clock and by the GPU's. All one
after the other on the same GPU, and by hand counts the mean of both times: where power limits the clock, a GPU slows down as it warms up.
The targets: both within 1 %.

Usage: python benchmarks/gpu_step.py [--python python3] [--events] [--seconds 3] [--to FILE] CELL … Exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import running

LIMIT_PERCENT = 1.0
NETWORKS = {
    "resnet50": ["network=resnet50", "momentum=0.9"],
    "resnet50_v1.5": ["network=resnet50", "network.stride_in_3x3=true", "momentum=0.9"],
    "fcn_s": ["network=fcn_s"],
}
#: a worker of PyTorch, inline, with events; prints the median of (host's time / GPU's time) over the blocks
EVENTS = (
    running.INLINE
    + """
import numpy
from crosstrain_worker import loop
from crosstrain_worker.frameworks import on_torch
events, ratios = [], []
sync, timed_block = on_torch.Framework.sync, loop.Measuring.timed_block
def recorded(framework):
    event = on_torch.torch.cuda.Event(enable_timing=True)
    event.record()
    sync(framework)
    events.append(event)
def compared(measuring, size):
    measuring.framework.sync()
    block = timed_block(measuring, size)
    ratios.append(1000 * block[1] / events[-2].elapsed_time(events[-1]))
    return block
on_torch.Framework.sync, loop.Measuring.timed_block = recorded, compared
code = session.work(run, 0)
print("ratio", numpy.median(ratios))
sys.exit(code)
"""
)


def last_line(printed: str) -> str:
    return printed.strip().splitlines()[-1]


def events_ratio(run_folder: Path, python: str) -> float:
    """Host's clock over CUDA events in the block pass of the run of `run_folder`, done once more."""
    with running.once_more(run_folder, [python, "-B", "-c", EVENTS, "FOLDER", str(running.ROOT / "src")]) as (_, printed):
        return float(last_line(printed).split()[1])


def measure(cell: str, arguments: argparse.Namespace) -> dict[str, Any]:
    framework, network, precision, batch, *more = cell.split(":")
    compiled, memory_format = [*more, *["on" if framework == "jax" else "off", "channels_last"][len(more) :]]
    script = Path(__file__).with_name(f"gpu_loop_{framework}.py")
    settings = [compiled, memory_format] if framework == "torch" else []
    command = [arguments.python, "-B", str(script), network, precision, batch, *settings, f"{arguments.seconds:g}"]
    by_hand = [json.loads(last_line(running.output(command)))]
    budget = 2 * arguments.seconds
    run_folder = running.train(
        Path.cwd(), f"framework={framework}", *NETWORKS[network], f"precision={precision}", f"batch_size={batch}", "data=synthetic",
        "data.placement=device", "gpus=1", "epochs=0", "learning_rate=0.01", f"framework.compile={compiled}",
        f"framework.memory_format={memory_format}", "framework.autotune=true", f"framework.python={arguments.python}",
        f"measure.min_s={budget:g}", f"measure.max_s={4 * budget:g}",
    )  # fmt: skip
    found: dict[str, Any] = {"cell": cell, "step_ms": running.step_ms(run_folder), "run": run_folder.name}
    by_hand.append(json.loads(last_line(running.output(command))))
    found |= {"hand_each_ms": [one["step_ms"] for one in by_hand], "hand_first_s": by_hand[0]["first_s"]}
    found["hand_ms"] = sum(found["hand_each_ms"]) / 2
    found["ratio"] = found["step_ms"] / found["hand_ms"]
    found["samples_per_s"] = 1000 * int(batch) / found["step_ms"]
    if arguments.events and framework == "torch":
        found["events_ratio"] = events_ratio(run_folder, arguments.python)
    return found


def cell_of(text: str) -> str:
    framework, network, _, batch, *_ = [*text.split(":"), "", "", ""]
    if framework not in ("torch", "jax") or network not in NETWORKS or not batch.isdigit() or text.count(":") > 5:
        wanted = f"framework torch | jax, network {' | '.join(NETWORKS)}, a number as batch"
        raise argparse.ArgumentTypeError(f"{text}: must be framework:network:precision:batch[:compile[:memory_format]], {wanted}")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", type=cell_of, metavar="CELL")
    parser.add_argument("--python", default="python3", help="an interpreter with the frameworks (default: %(default)s)")
    parser.add_argument("--events", action="store_true", help="PyTorch: the block pass against CUDA events, too")
    parser.add_argument("--seconds", type=float, default=3, help="of blocks, each (default: %(default)s)")
    parser.add_argument("--to", type=Path, help="add a JSON line for each cell to this file")
    arguments = parser.parse_args()
    verdict = running.Verdict()
    for cell in arguments.cells:
        found = measure(cell, arguments)
        before, after = found["hand_each_ms"]
        hand = f"by hand {before:.3f} and {after:.3f} ms"
        print(f"{cell}: {found['step_ms']:.3f} ms, {hand}, {found['samples_per_s']:.0f} samples/s", flush=True)
        verdict.check(f"{cell}: distance from the loop by hand", 100 * abs(found["ratio"] - 1), LIMIT_PERCENT, "%")
        if "events_ratio" in found:
            verdict.check(f"{cell}: distance from CUDA events", 100 * abs(found["events_ratio"] - 1), LIMIT_PERCENT, "%")
        if arguments.to:
            with arguments.to.open("a") as file:
                file.write(json.dumps(found) + "\n")
    return verdict.code


if __name__ == "__main__":
    sys.exit(main())
