"""Several ranks of PyTorch, one replica each: Horovod's DistributedOptimizer. The same functions as in `torch_ranks`."""

import horovod.torch as hvd

from . import with_horovod
from .base import Unsupported


def check(run):
    """Raise Unsupported where Horovod can not reduce the gradients of this run."""
    with_horovod.check(hvd, run["device"])
    if run["framework"].get("memory_format") == "channels_last":
        raise Unsupported(
            "Horovod reduces contiguous tensors only; with framework.memory_format=channels_last gradients are not contiguous",
            "framework.memory_format=contiguous",
        )


def join(run, rank, device, share):
    with_horovod.join(hvd, run, rank, share)


def parallel(module, device, compiled):
    """The module itself: it is the optimiser that reduces."""
    return module


def optimizer(plain, named):
    """The optimiser that averages the gradients of `named` ([(name, parameter)]) over the ranks, while the backward pass runs."""
    return hvd.DistributedOptimizer(plain, named_parameters=named)


def reduced(optimizer):
    """Wait until the gradients are averaged."""
    optimizer.synchronize()


def stepping(optimizer):
    """A context for the optimiser's step after `reduced`."""
    return optimizer.skip_synchronize()


def meet():
    hvd.barrier()


def leave():
    hvd.shutdown()
