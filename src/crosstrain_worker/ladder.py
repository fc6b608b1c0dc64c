"""The parity ladder's numbers: what this framework makes of a network with given weights, given batches and a given optimiser.

Only measures; the driver's `crosstrain.parity` compares with its float64 reference and judges. Writes `ladder.npz` into the run
folder, arrays only:

    read/<name>       parameters and states read back right after the weights were loaded
    output, loss      training mode, batch 0
    gradient/<name>   of the loss of batch 0, before clipping and weight decay
    step1/<name>      parameters after one step
    state10/<name>    states after 10 steps
    output10          evaluation mode, batch 0, after these 10 steps
    trace             the losses of 20 steps
    flops             a JSON object as text: {kernel: FLOPs} of one iteration; left out where the framework counts none
    deviations        a JSON object as text: the adapter's declared deviations

Of a network that is only looked at (mode `shapes`) it writes `shapes.json`: {"shapes": {name: [sizes]}, "deviations": {name: words}}.

With several replicas (level 9) each rank writes `replicas.<rank>.npz` instead, <clipping> being `clipped` and `unclipped`:

    <clipping>/trace       the losses of 5 steps: means over the rank's share of the global batches
    <clipping>/<i>/<name>  parameters and states of the rank's i-th replica after these steps
"""

import json
import os

import numpy

STATE_STEPS = 10
TRACE_STEPS = 20
REPLICA_STEPS = 5


def run(run, framework, rank=0):
    """Measure and write. `framework` is set up, built, and has the initial weights loaded."""
    if run["replicas"] > 1:
        write(os.path.join(run["folder"], "replicas.%d.npz" % rank), measure_replicas(run, framework, rank))
    else:
        write(os.path.join(run["folder"], "ladder.npz"), measure(run, framework))


def batches(run):
    """The run's global batches in the stored order: [(inputs, targets), …]."""
    stored = run["data"]["train"]
    size = run["batch_global"]
    inputs = numpy.load(stored["inputs"], allow_pickle=False)
    targets = numpy.load(stored["targets"], allow_pickle=False) if stored["targets"] else inputs
    return [(inputs[at : at + size], targets[at : at + size]) for at in range(0, len(inputs) - size + 1, size)]


def measure(run, framework):
    """{key: array} as listed above. Every part starts again from the weights that were read back."""
    ring = [framework.to_device(inputs, targets) for inputs, targets in batches(run)]
    # What the driver finds bit-equal to the weights file is as good as the file for loading again.
    initial = framework.read()
    found = {"deviations": numpy.array(json.dumps(framework.deviations, sort_keys=True))}
    put(found, "read", initial)

    found["output"] = framework.output(ring[0], True)
    framework.load(initial)
    found["loss"] = numpy.array(framework.value(framework.gradient(ring[0])[0]))
    framework.load(initial)
    put(found, "gradient", framework.gradients(ring[0]))

    framework.load(initial)
    train(framework, ring, 1)
    put(found, "step1", framework.read())

    framework.load(initial)
    train(framework, ring, STATE_STEPS)
    states = [state["name"] for state in run["network"]["states"]]
    put(found, "state10", {name: array for name, array in framework.read().items() if name in states})
    found["output10"] = framework.output(ring[0], False)

    framework.load(initial)
    found["trace"] = numpy.array(train(framework, ring, TRACE_STEPS))

    framework.load(initial)
    flops = framework.executed_flops(ring[0])
    if flops is not None:
        found["flops"] = numpy.array(json.dumps(flops, sort_keys=True))
    return found


def write_shapes(run, framework):
    """Write `shapes.json`. `framework` is set up and built; no weights are needed."""
    shapes = {name: list(array.shape) for name, array in framework.read().items()}
    with open(os.path.join(run["folder"], "shapes.json"), "w") as out:
        json.dump({"shapes": shapes, "deviations": framework.deviations}, out)


def measure_replicas(run, framework, rank):
    """{key: array} of one rank, which takes the rank-th slice of each global batch."""
    share = run["batch_global"] // run["world_size"]
    own = slice(rank * share, (rank + 1) * share)
    ring = [framework.to_device(inputs[own], targets[own]) for inputs, targets in batches(run)]
    initial = framework.read()
    found = {}
    # Clipping hides how large a gradient is, so whether it was added or averaged; without it, nobody sees where it comes.
    for clipping, norm in (("clipped", run["optimizer"]["clip_norm"]), ("unclipped", None)):
        run["optimizer"]["clip_norm"] = norm
        framework.build()
        framework.load(initial)
        found[clipping + "/trace"] = numpy.array(train(framework, ring, REPLICA_STEPS))
        for index, arrays in enumerate(framework.read_replicas()):
            put(found, "%s/%d" % (clipping, index), arrays)
    return found


def train(framework, ring, steps):
    """Losses of this many steps, going round the batches. Waits until all is done."""
    losses = [framework.value(framework.step(ring[i % len(ring)])[0]) for i in range(steps)]
    framework.sync()
    return losses


def put(found, prefix, arrays):
    for name, array in arrays.items():
        found[prefix + "/" + name] = numpy.array(array)


def write(path, arrays):
    """Write the .npz so that a reader sees all of it or nothing."""
    temporary = path + ".tmp"
    with open(temporary, "wb") as out:
        numpy.savez(out, **arrays)
    os.rename(temporary, path)
