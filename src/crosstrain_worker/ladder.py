"""The parity ladder's numbers: what this framework makes of a network with given weights, given batches and a given optimiser.

Only measures; the driver's `crosstrain.parity` compares with its float64 reference and judges. Writes `ladder.npz` into the run
folder, arrays only:

    read/<name>       parameters and states read back right after the weights were loaded
    output, loss      training mode, batch 0
    gradient/<name>   of the loss of batch 0, before clipping and weight decay
    step1/<name>      parameters after one step
    state10/<name>    parameters and states after 10 steps
    output10          evaluation mode, batch 0, after these 10 steps
    trace             the losses of 20 steps
    deviations        a JSON object as text: the adapter's declared deviations
"""

import json
import os

import numpy

STATE_STEPS = 10
TRACE_STEPS = 20


def run(run, framework):
    """Measure and write `ladder.npz`. `framework` is set up, built, and has the initial weights loaded."""
    write(os.path.join(run["folder"], "ladder.npz"), measure(run, framework))


def batches(run):
    """The run's batches in the stored order, `batch_per_replica` samples each: [(inputs, targets), …]."""
    stored = run["data"]["train"]
    size = run["batch_per_replica"]
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
    put(found, "state10", framework.read())
    found["output10"] = framework.output(ring[0], False)

    framework.load(initial)
    found["trace"] = numpy.array(train(framework, ring, TRACE_STEPS))
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
