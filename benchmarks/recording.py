"""What one row of samples.<rank>.bin costs. The timed loop pays it once an iteration; more than 2 µs (2000 ns) is too much.

PYTHONPATH=src python benchmarks/recording.py [rows]
"""

import os
import sys
import tempfile
import time

from crosstrain_worker.record import ITERATION, Recorder


def nanoseconds_per_row(rows):
    """Median over 5 files of the time of `rows` calls of Recorder.add, in ns per call, the loop's own cost included."""
    times = []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as folder:
            recorder = Recorder(os.path.join(folder, "samples.0.bin"))
            recorder.reserve(rows)
            begin = time.perf_counter()
            for i in range(rows):
                recorder.add(i, ITERATION, 1, 0, 1.5, 0.25, 0.0)
            times.append((time.perf_counter() - begin) / rows * 1e9)
            recorder.close()
    return sorted(times)[2]


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200000
    print(f"{nanoseconds_per_row(count):.0f} ns per row")
