"""A training loop as one writes it by hand, without crosstrain: what step_overhead.py compares the measured step with.

Usage: <a Python with PyTorch> hand_loop.py NETWORK BATCH CPU SECONDS. Runs on one thread, pinned to the logical CPU; prints the median
over blocks of at least 0.5 s in milliseconds per iteration.
"""

import itertools
import os
import statistics
import sys
import time

network, batch, cpu, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
os.sched_setaffinity(0, {cpu})

import torch  # noqa: E402  after the pinning
from torch import nn  # noqa: E402

torch.set_num_threads(1)
torch.manual_seed(1)
if network == "lenet":
    shape: tuple[int, ...] = (1, 28, 28)
    model = nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.MaxPool2d(2),
        nn.Tanh(),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(800, 500),
        nn.ReLU(inplace=True),
        nn.Linear(500, 10),
    )
elif network == "fcn_r":
    shape = (784,)
    model = nn.Sequential(
        nn.Linear(784, 2048),
        nn.Sigmoid(),
        nn.Linear(2048, 4096),
        nn.Sigmoid(),
        nn.Linear(4096, 1024),
        nn.Sigmoid(),
        nn.Linear(1024, 10),
    )
else:
    sys.exit(f"no hand-written {network}: lenet or fcn_r")
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
ring = itertools.cycle([(torch.randn(batch, *shape), torch.randint(0, 10, (batch,))) for _ in range(4)])


def block(iterations: int) -> float:
    """Seconds of so many training iterations."""
    start = time.perf_counter()
    for _ in range(iterations):
        inputs, targets = next(ring)
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return time.perf_counter() - start


block(3)
size = 1
while block(size) < 0.5:  # warm-up, and how many iterations make a block
    size *= 2
end = time.perf_counter() + seconds
steps: list[float] = []
while len(steps) < 3 or time.perf_counter() < end:
    steps.append(1000 * block(size) / size)
print(statistics.median(steps))
