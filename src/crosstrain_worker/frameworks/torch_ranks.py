"""Several ranks of PyTorch, one replica each: DistributedDataParallel, over gloo on the CPU and NCCL on GPUs."""

import contextlib
import datetime
import os
import warnings

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from crosstrain_worker import machines

from .base import Unsupported

FOREVER = datetime.timedelta(days=1)


def backend(device):
    return "nccl" if device == "gpu" else "gloo"


def check(run):
    """Raise Unsupported where this build can not reduce gradients on the run's device."""
    wanted = backend(run["device"])
    if not distributed.is_available() or not distributed.is_backend_available(wanted):
        raise Unsupported("this build of PyTorch (%s) has no %s for several replicas" % (torch.__version__, wanted))


def join(run, rank, device, share):
    """The process group of all ranks; waits for them. `share`: what rank 0 decides, on every rank."""
    machines.prefer_interface(run, "GLOO_SOCKET_IFNAME")
    ranks = run["world_size"]
    distributed.init_process_group(
        backend(run["device"]),
        store=meeting_place(run, rank, share),
        rank=rank,
        world_size=ranks,
        timeout=FOREVER,  # the driver has the time limits; compiling alone can take minutes
        device_id=device if device.type == "cuda" else None,
    )


def meeting_place(run, rank, share):
    """On one machine a file in the run folder: there is no port to clash. On several a TCP port that rank 0 finds free."""
    ranks = run["world_size"]
    if machines.nodes(run) == 1:
        return distributed.FileStore(os.path.join(run["folder"], "rendezvous"), ranks)
    if rank == 0:
        store = distributed.TCPStore(run["address"], 0, ranks, is_master=True, wait_for_workers=False, timeout=FOREVER)
        share("rendezvous", lambda: store.port)
        return store
    return distributed.TCPStore(run["address"], share("rendezvous", None), ranks, is_master=False, timeout=FOREVER)


def parallel(module, device, compiled):
    """The module whose backward pass averages the gradients over the ranks, while it runs.

    `compiled`: it will be. torch.compile splits the graph at DDP's buckets, for which it must see them: no static_graph then.
    """
    with warnings.catch_warnings():
        # that broadcast_buffers has another name from 2.13 on
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            module,
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,  # running statistics stay each replica's own
            gradient_as_bucket_view=True,
            static_graph=not compiled,
        )


def optimizer(plain, named):
    """The optimiser itself: it is the module that reduces."""
    return plain


def reduced(optimizer):
    """The backward pass has waited for the averaged gradients."""


def stepping(optimizer):
    return contextlib.nullcontext()


def meet():
    distributed.barrier()


def leave():
    distributed.destroy_process_group()
