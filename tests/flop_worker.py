"""Runs in PyTorch's interpreter: `python flop_worker.py <src> <folder>`; counts FLOPs with PyTorch's own, unchanged counter.

<folder>/networks.json is a list of specs. Writes <folder>/flops.json: {name: [forward, forward and backward]} of one sample.
The layers are the adapter's, on the meta device: shapes only, no numbers, no memory.
"""

import json
import os
import sys


def count(spec, torch, layers):
    """[FLOPs of the forward pass, of forward and backward], per sample."""
    from torch.utils.flop_counter import FlopCounterMode

    batch = 2
    with torch.device("meta"):
        network, loss = layers.build(spec)[0], layers.build_loss(spec)
        inputs, targets = torch.empty(batch, *spec["input"]["shape"]), torch.empty(batch, dtype=torch.int64)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        network(inputs)
    with FlopCounterMode(display=False) as both:
        loss(network(inputs), targets).backward()
    return [counter.get_total_flops() / batch for counter in (forward, both)]


def main(source, folder):
    sys.path.insert(0, source)
    import torch

    from crosstrain_worker.frameworks import torch_layers

    with open(os.path.join(folder, "networks.json")) as file:
        specs = json.load(file)
    with open(os.path.join(folder, "flops.json"), "w") as file:
        json.dump({spec["name"]: count(spec, torch, torch_layers) for spec in specs}, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
