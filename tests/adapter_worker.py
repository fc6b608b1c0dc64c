"""Runs in a framework's interpreter: `python adapter_worker.py <src> <folder>`, one adapter through many small runs.

<folder>/cases.json is a list of {"run", "steps"}; case i has the arrays `<i>.npz` (w.<name>, inputs, and targets where the
run names some). Writes <i>.out.npz and results.json: a list of {"unsupported", "hint"} where the adapter refused, {"error"}
where it raised, else the facts that the test looks at.
"""

import importlib
import json
import os
import sys
import traceback
import types

import numpy


def package(source):
    """crosstrain_worker without its __main__, as the worker registers it."""
    sys.path.insert(0, source)
    importlib.import_module("crosstrain_worker")


def prepared(run):
    """The adapter, with everything done up to the first load."""
    module = importlib.import_module("crosstrain_worker.frameworks.on_" + run["framework"]["name"])
    adapter = module.Framework(run)
    adapter.load_library()
    adapter.check()
    adapter.setup()
    adapter.build()
    return adapter


def same(a, b):
    return set(a) == set(b) and all(a[k].dtype == b[k].dtype and a[k].tobytes() == b[k].tobytes() for k in a)


def trace(adapter, batch, steps):
    """Losses of some steps, read after all of them: a handle must keep its value."""
    handles = [adapter.step(batch)[0] for _ in range(steps)]
    adapter.sync()
    return [adapter.value(handle) for handle in handles]


def work(run, weights, inputs, targets, steps):
    """(facts, arrays) of one run."""
    adapter = prepared(run)
    adapter.load(weights)
    arrays, facts = {}, types.SimpleNamespace(deviations=adapter.deviations)
    batch = adapter.to_device(inputs, targets)
    facts.loaded = same(adapter.read(), weights)
    arrays["output"] = adapter.output(batch, False)
    arrays["training_output"] = adapter.output(batch, True)
    for name, value in adapter.gradients(batch).items():
        arrays["g." + name] = value
    facts.untouched = same(adapter.read(), weights)
    handle, nothing = adapter.forward(batch)
    adapter.sync()
    facts.forward = adapter.value(handle)
    facts.forward_correct = nothing
    facts.evaluated = adapter.evaluate(batch)
    facts.untouched = facts.untouched and same(adapter.read(), weights)
    adapter.gradient(batch)
    adapter.sync()
    now = adapter.read()
    facts.gradient_untouched = all(now[p["name"]].tobytes() == weights[p["name"]].tobytes() for p in run["network"]["parameters"])
    adapter.load(weights)
    trace(adapter, batch, 1)
    for name, value in adapter.read().items():
        arrays["one." + name] = value
    adapter.load(weights)
    before = adapter.probe()
    facts.losses = trace(adapter, batch, steps)
    facts.probe = [before, adapter.probe()]
    last = adapter.read()
    for name, value in last.items():
        arrays["last." + name] = value
    adapter.load(weights)
    adapter.with_accuracy = True
    loss, correct = adapter.step(batch)
    adapter.sync()
    facts.counted = [adapter.value(loss), adapter.value(correct)]
    adapter.with_accuracy = False
    adapter.load(weights)
    facts.again = trace(adapter, batch, steps)
    facts.same_end = same(adapter.read(), last)
    facts.effective, facts.versions, facts.peak = adapter.effective(), adapter.versions(), adapter.peak_memory_mb()
    adapter.close()
    return vars(facts), arrays


def main(source, folder):
    package(source)
    from crosstrain_worker.frameworks.base import Unsupported

    with open(os.path.join(folder, "cases.json")) as file:
        cases = json.load(file)
    results = []
    for index, case in enumerate(cases):
        with numpy.load(os.path.join(folder, f"{index}.npz")) as given:
            weights = {name[2:]: given[name] for name in given.files if name.startswith("w.")}
            inputs = given["inputs"]
            targets = given["targets"] if "targets" in given.files else None
        try:
            facts, arrays = work(case["run"], weights, inputs, targets, case["steps"])
        except Unsupported as refusal:
            results.append({"unsupported": refusal.reason, "hint": refusal.hint})
            continue
        except Exception:
            results.append({"error": traceback.format_exc()})
            continue
        numpy.savez(os.path.join(folder, f"{index}.out.npz"), **arrays)
        results.append(facts)
    with open(os.path.join(folder, "results.json"), "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
