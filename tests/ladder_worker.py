"""Runs in a framework's interpreter: `python ladder_worker.py <src> <folder>`, right and wrong adapters on the parity ladder.

<folder>/cases.json is a list of {"run", "patch"}: each run is built as the worker builds it, its adapter is changed by the function
of this file that the patch names (`<patch>_<framework>`, or `<patch>` for both; null: none), and it climbs the ladder. Writes
ladder.npz into each run's folder, and results.json: a list of {"version"}, {"unsupported"} or {"error"}.
"""

import importlib
import json
import os
import sys
import traceback

import numpy


# -- what the framework computes -----------------------------------------------------------------------------------------------
def sum_loss_torch(adapter):
    adapter.trained.loss.reduction = "sum"


def sum_loss_mxnet(adapter):
    network, loss = adapter.trained.network, adapter.trained.loss
    adapter.trained.hybrid_forward = lambda F, inputs, targets: F.sum(loss(network(inputs), targets))


def flatten_channels_last_torch(adapter):
    import torch

    class Flatten(torch.nn.Module):
        def forward(self, x):
            return x.permute(0, 2, 3, 1).flatten(1)

    adapter.network.flat = Flatten()


def flatten_channels_last_mxnet(adapter):
    from mxnet.gluon import nn

    plan = adapter.network.plan
    (at,) = [i for i, (layer, _) in enumerate(plan) if type(layer) is nn.Flatten]
    plan[at] = (nn.HybridLambda(lambda F, x: F.flatten(F.transpose(x, (0, 2, 3, 1)))), plan[at][1])


def forget_bias_torch(adapter):
    """1 in the forget gate's second bias, which is never read back."""
    import torch

    for module in adapter.network.modules():
        if isinstance(module, torch.nn.LSTM):
            with torch.no_grad():
                module.bias_hh_l0[module.hidden_size : 2 * module.hidden_size] = 1


def forget_bias_mxnet(adapter):
    import mxnet as mx

    for layer, _ in adapter.network.plan:
        if isinstance(layer, mx.gluon.rnn.LSTM):
            bias = numpy.repeat([0.0, 1.0, 0.0, 0.0], layer._hidden_size)
            layer.l0_h2h_bias.set_data(mx.nd.array(bias))


def forward_twice_torch(adapter):
    backward = adapter.backward

    def twice(batch):
        adapter.trained(*batch)
        return backward(batch)

    adapter.backward = twice


# -- how it takes the parameters -----------------------------------------------------------------------------------------------
def mapped(adapter, into, back):
    """Parameters changed on their way in, and changed back on their way out: reading back shows nothing."""
    load, read = adapter.load, adapter.read
    adapter.load = lambda arrays: load({name: into(name, array) for name, array in arrays.items()})
    adapter.read = lambda: {name: back(name, array) for name, array in read().items()}


def gate_order(adapter):
    """i, f, o, g in place of i, f, g, o."""

    def swapped(name, array):
        if not name.startswith("lstm"):
            return array
        i, f, g, o = numpy.split(array, 4)
        return numpy.concatenate([i, f, o, g])

    mapped(adapter, swapped, swapped)


def true_convolution(adapter):
    """Kernels upside down, as convolution (not cross-correlation) has them."""

    def flipped(name, array):
        return numpy.ascontiguousarray(array[:, :, ::-1, ::-1]) if array.ndim == 4 else array

    mapped(adapter, flipped, flipped)


def biases_swapped(adapter):
    """Two parameters of one shape."""
    load, read = adapter.load, adapter.read
    pair = {"bn1.bias": "conv2.bias", "conv2.bias": "bn1.bias"}
    adapter.load = lambda arrays: load({name: arrays[pair.get(name, name)] for name in arrays})

    def swapped():
        arrays = read()
        return {name: arrays[pair.get(name, name)] for name in arrays}

    adapter.read = swapped


def flipped_declaration(adapter):
    """Says the opposite of what its running variance is, in words or by silence."""
    for op in adapter.spec["ops"]:
        if op["op"] == "batch_norm" and adapter.deviations.pop(op["name"], None) is None:
            adapter.deviations[op["name"]] = "running variance is biased, the spec's is unbiased"


# -- how it updates ------------------------------------------------------------------------------------------------------------
def nesterov_torch(adapter):
    for group in adapter.optimizer.param_groups:
        group["nesterov"] = True


def nesterov_mxnet(adapter):
    import mxnet as mx

    wanted = adapter.run["optimizer"]
    settings = {"learning_rate": wanted["learning_rate"], "momentum": wanted["momentum"], "wd": wanted["weight_decay"]}
    new_trainer = adapter.new_trainer

    def nesterov():
        new_trainer()
        for parameter in adapter.parameters:
            parameter._trainer = None
        adapter.trainer = mx.gluon.Trainer(adapter.parameters, "nag", settings, update_on_kvstore=False)

    adapter.new_trainer = nesterov


def decay_biases_torch(adapter):
    for group in adapter.optimizer.param_groups:
        group["weight_decay"] = adapter.run["optimizer"]["weight_decay"]


def decay_biases_mxnet(adapter):
    for parameter in adapter.parameters:
        parameter.wd_mult = 1.0


def dampening_torch(adapter):
    for group in adapter.optimizer.param_groups:
        group["dampening"] = group["momentum"]


def dampening_mxnet(adapter):
    """From the second step on, 1 - momentum of the gradient; a new trainer (after each load) begins anew."""
    wanted, step = adapter.run["optimizer"], adapter.step

    def dampened(batch):
        handles = step(batch)
        adapter.trainer.set_learning_rate(wanted["learning_rate"] * (1 - wanted["momentum"]))
        return handles

    adapter.step = dampened


def clip_after_decay_torch(adapter):
    import torch

    groups = adapter.optimizer.param_groups
    decays = [group["weight_decay"] for group in groups]
    for group in groups:
        group["weight_decay"] = 0.0

    def step(batch):
        handles = adapter.backward(batch)
        with torch.no_grad():
            for i, group in enumerate(groups):
                for parameter in group["params"]:
                    parameter.grad.add_(parameter, alpha=decays[i])
        torch.nn.utils.clip_grad_norm_(adapter.parameters, adapter.clip_norm)
        adapter.optimizer.step()
        return handles

    adapter.step = step


def clip_after_decay_mxnet(adapter):
    import mxnet as mx

    decays = [adapter.run["optimizer"]["weight_decay"] * parameter.wd_mult for parameter in adapter.parameters]
    for parameter in adapter.parameters:
        parameter.wd_mult = 0.0

    def step(batch):
        handles = adapter.backward(batch)
        gradients = [parameter.grad() for parameter in adapter.parameters]
        for i, parameter in enumerate(adapter.parameters):
            gradients[i] += decays[i] * parameter.data()
        mx.gluon.utils.clip_global_norm(gradients, adapter.clip_norm, check_isfinite=False)
        adapter.trainer.update(1)
        return handles

    adapter.step = step


def forgotten_parameter_torch(adapter):
    forgotten = adapter.tensors["fc2.weight"]
    for group in adapter.optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not forgotten]
    adapter.optimizer.add_param_group({"params": [forgotten], "lr": 0.0})


def forgotten_parameter_mxnet(adapter):
    adapter.slots["fc2.weight"].lr_mult = 0.0


# -- one case after the other --------------------------------------------------------------------------------------------------
def climb(run, patch):
    """The framework's version; ladder.npz is in the run's folder afterwards."""
    from crosstrain_worker import ladder, session

    name = run["framework"]["name"]
    adapter = importlib.import_module("crosstrain_worker.frameworks.on_" + name).Framework(run)
    adapter.load_library()
    adapter.check()
    adapter.setup()
    adapter.build()
    if patch:
        functions = globals()
        functions[patch if patch in functions else patch + "_" + name](adapter)
    adapter.load(session.initial_arrays(run))
    ladder.run(run, adapter)
    version = adapter.versions()["framework"]
    adapter.close()
    return version


def main(source, folder):
    sys.path.insert(0, source)
    from crosstrain_worker.frameworks.base import Unsupported

    with open(os.path.join(folder, "cases.json")) as file:
        cases = json.load(file)
    results = []
    for case in cases:
        try:
            results.append({"version": climb(case["run"], case["patch"])})
        except Unsupported as refusal:
            results.append({"unsupported": refusal.reason})
        except Exception:
            results.append({"error": traceback.format_exc()})
    with open(os.path.join(folder, "results.json"), "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
