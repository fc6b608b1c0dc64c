"""Run by JAX's interpreter: `python jax_worker.py <src> <folder> <part>`, what the CPU can show of what JAX does on GPUs only.

<folder>/<precision>.json is a run, given.npz its weights (w.<name>), inputs and targets; <folder>/facts.json is what was found.
"""

import json
import os
import sys

import numpy


def adapter_of(run):
    """Built without `check`, which has float16 on GPUs only."""
    from crosstrain_worker.frameworks import on_jax

    adapter = on_jax.Framework(run)
    adapter.load_library()
    adapter.setup()
    adapter.build()
    return adapter


def trace(adapter, batch, steps):
    handles = [adapter.step(batch)[0] for _ in range(steps)]
    adapter.sync()
    return [adapter.value(handle) for handle in handles]


def unchanged(before, after, names):
    return all(before[name].tobytes() == after[name].tobytes() for name in names)


def fp16(runs, weights, inputs, targets):
    import jax

    facts = {}
    if "fp32" in runs:
        adapter = adapter_of(runs["fp32"])
        adapter.load(weights)
        facts["fp32"] = trace(adapter, adapter.to_device(inputs, targets), 20)
    adapter = adapter_of(runs["fp16"])
    adapter.load(weights)
    good = adapter.to_device(inputs, targets)
    huge = inputs.copy()
    huge[-1] *= 1e6  # with two replicas in the second one's part
    facts["precision"] = adapter.effective()["precision"]
    facts["fp16"] = trace(adapter, good, 22)
    facts["compiled"] = adapter.steps[False]._cache_size()
    adapter.load(weights)
    scales, same, states, momentum = [float(adapter.scale.scale)], [], [], []
    for batch in (huge, huge, inputs, inputs):
        before, velocity = adapter.read(), jax.tree.map(numpy.array, adapter.momentum)
        adapter.scale = adapter.scale.replace(scale=jax.device_put(numpy.float32(scales[-1]), adapter.everywhere))
        adapter.step(adapter.to_device(batch, targets))
        adapter.sync()
        after, now = adapter.read(), jax.tree.map(numpy.array, adapter.momentum)
        same.append(unchanged(before, after, adapter.trained_names))
        states.append(unchanged(before, after, adapter.state_names))
        momentum.append(all(numpy.array_equal(a, b) for a, b in zip(jax.tree.leaves(velocity), jax.tree.leaves(now), strict=True)))
        scales.append(float(adapter.scale.scale) if len(scales) != 2 else 1024.0)  # small enough for what follows
    facts.update(scales=scales, same=same, states=states, momentum=momentum)
    adapter.load(weights)
    facts["reset"] = float(adapter.scale.scale)
    return facts


def lstm(runs, weights, inputs, targets):
    """cuDNN's calls: their packing by JAX's reference in their place, then the whole step traced, not run."""
    import jax
    from jax import numpy as jnp
    from jax.experimental import rnn

    from crosstrain_worker.frameworks import jax_lstm

    def reference(x, h, c, row, lengths, *sizes):
        size, dropout, both = sizes[:3], sizes[3], sizes[4]
        return rnn.lstm_ref(x, h, c, *rnn.unpack_lstm_weights(row, *size, both), lengths, *size, dropout, both)

    random = numpy.random.RandomState(0)
    shapes = ((3, 7, 5), (5, 16), (4, 16), (16,), (3, 7, 4))
    *given, mask = (jnp.asarray(random.normal(0, 0.5, shape), "float32") for shape in shapes)
    own, rnn.lstm = rnn.lstm, reference
    found = [
        [numpy.asarray(function(*given))]
        + [numpy.asarray(g) for g in jax.grad(lambda *a, f=function: (f(*a) * mask).sum(), argnums=(0, 1, 2, 3))(*given)]
        for function in (jax_lstm.by_cudnn, jax_lstm.scanned)
    ]
    rnn.lstm = own
    facts = {"differences": [float(abs(a - b).max() / abs(b).max()) for a, b in zip(*found, strict=True)]}
    for precision in ("highest", "tensorfloat32"):
        with jax.default_matmul_precision(precision):
            facts[precision] = rnn._lstm_cudnn_allow_tf32(None)
    rnn.gpu_rnn.compute_rnn_workspace_reserve_space_sizes = lambda *sizes: (64, 64)  # cuDNN's to say
    real, jax_lstm.uses_cudnn = jax_lstm.uses_cudnn, lambda *asked: True
    adapter = adapter_of(runs["fp32"])
    adapter.load(weights)
    carried = (adapter.trained, adapter.momentum, adapter.scale, adapter.states, adapter.key)
    text = str(adapter.steps[False].trace(carried, adapter.frozen, *adapter.to_device(inputs, targets)).jaxpr)
    facts["calls"] = [text.count("rnn_fwd["), text.count("rnn_bwd["), text.count("scan[")]
    facts["tf32"] = "cudnn_allow_tf32=True" in text
    facts["effective"] = adapter.effective()["lstm"]
    cases = (("auto", True, "fp32"), ("auto", True, "tf32"), ("auto", True, "fp16"), ("auto", False, "fp32"), ("scan", True, "fp32"))
    facts["chosen"] = [real(*case) for case in cases]
    return facts


def main(source, folder, part):
    sys.path.insert(0, source)
    runs = {}
    for precision in ("fp32", "fp16"):
        path = os.path.join(folder, precision + ".json")
        if os.path.exists(path):
            with open(path) as file:
                runs[precision] = json.load(file)
    with numpy.load(os.path.join(folder, "given.npz")) as given:
        weights = {name[2:]: given[name] for name in given.files if name.startswith("w.")}
        facts = {"fp16": fp16, "lstm": lstm}[part](runs, weights, given["inputs"], given["targets"])
    with open(os.path.join(folder, "facts.json"), "w") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
