"""Does the measured step cost what a hand-written PyTorch loop costs? crosstrain's step_ms of FCN-R and LeNet against hand_loop.py.

Both in the managed torch environment, one thread on the same logical CPU, synthetic data on the device, taking turns. The target:
the medians lie within 2 % of each other (faster counts, too: it would mean that the two do not do the same).

Usage: python benchmarks/step_overhead.py [--rounds 7] [--seconds 6] [--batch 64] [--networks lenet,fcn_r]. Exit code 1 when the
target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import running

LIMIT_PERCENT = 2.0


def crosstrain_step(folder: Path, network: str, batch: int, seconds: float) -> tuple[float, int]:
    """(step_ms of one run whose blocks take `seconds`, the logical CPU it had)."""
    run_folder = running.train(
        folder, "framework=torch", f"network={network}", f"batch_size={batch}", "data=synthetic", "device=cpu", "threads=1", "epochs=0",
        "learning_rate=0.01", "momentum=0.9", f"measure.min_s={2 * seconds:g}", f"measure.max_s={2 * seconds:g}",
    )  # fmt: skip
    return running.step_ms(run_folder), json.loads((run_folder / "run.json").read_text())["cpus"][0]


def hand_step(python: Path, network: str, batch: int, cpu: int, seconds: float) -> float:
    script = Path(__file__).with_name("hand_loop.py")
    command = [str(python), "-I", "-B", str(script), network, str(batch), str(cpu), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the hand-written loop failed: {done.stderr}")
    return float(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=6, help="of blocks in each turn")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--networks", default="lenet,fcn_r")
    arguments = parser.parse_args()

    from crosstrain import environments

    python = environments.find_or_make("torch", "cpu", None, None, print).python
    print(running.load())
    verdict = running.Verdict()
    with tempfile.TemporaryDirectory() as temporary:
        for network in arguments.networks.split(","):
            ours, hand = [], []
            for _ in range(arguments.rounds):
                step_ms, cpu = crosstrain_step(Path(temporary), network, arguments.batch, arguments.seconds)
                ours.append(step_ms)
                hand.append(hand_step(python, network, arguments.batch, cpu, arguments.seconds))
            ratio = statistics.median(ours) / statistics.median(hand)
            print(f"{network}, batch {arguments.batch}: crosstrain {running.spread(ours)} ms, by hand {running.spread(hand)} ms")
            print(f"  ratio of the medians {ratio:.4f}, turn by turn {running.spread([a / b for a, b in zip(ours, hand, strict=True)])}")
            verdict.check(f"{network}: distance of the medians", 100 * abs(ratio - 1), LIMIT_PERCENT, "%")
    return verdict.code


if __name__ == "__main__":
    sys.exit(main())
