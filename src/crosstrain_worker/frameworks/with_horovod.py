"""Horovod, as far as it is the same for all frameworks: each has its own module horovod.<framework> (`hvd` here) with these functions.

Ranks are started by horovodrun, one replica each. They load equal weights, so nothing is broadcast.
"""

from .base import Unsupported


def version():
    import horovod

    return horovod.__version__


def check(hvd, device):
    """Raise Unsupported where this build of Horovod can not reduce gradients on `device` (cpu or gpu)."""
    name, built = ("NCCL", hvd.nccl_built()) if device == "gpu" else ("Gloo", hvd.gloo_built())
    if not built:
        raise Unsupported("this build of Horovod (%s) has no %s, which reduces on the %s" % (version(), name, device))


def join(hvd, run, rank):
    """Meet the other ranks; waits for them."""
    hvd.init()
    if (hvd.rank(), hvd.size()) != (rank, run["world_size"]):
        raise RuntimeError("Horovod: rank %d of %d, wanted %d of %d" % (hvd.rank(), hvd.size(), rank, run["world_size"]))
