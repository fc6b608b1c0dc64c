"""Horovod, as far as it is the same for all frameworks: each has its own module horovod.<framework> (`hvd` here) with these functions.

Ranks are started by horovodrun, on several machines by srun or mpirun, one replica each. They load equal weights, so nothing is broadcast.
"""

import os

from crosstrain_worker import machines

from .base import Unsupported

#: ranks wait for each other while they start; a framework's import takes this long on a busy machine
MEET_S = 600


def version():
    import horovod

    return horovod.__version__


def check(hvd, device):
    """Raise Unsupported where this build of Horovod can not reduce gradients on `device` (cpu or gpu)."""
    name, built = ("NCCL", hvd.nccl_built()) if device == "gpu" else ("Gloo", hvd.gloo_built())
    if not built:
        raise Unsupported("this build of Horovod (%s) has no %s, which reduces on the %s" % (version(), name, device))


def join(hvd, run, rank, share):
    """Meet the other ranks; waits for them."""
    if machines.nodes(run) > 1:
        as_horovodrun(run, rank, share)
    hvd.init()
    if (hvd.rank(), hvd.size()) != (rank, run["world_size"]):
        raise RuntimeError("Horovod: rank %d of %d, wanted %d of %d" % (hvd.rank(), hvd.size(), rank, run["world_size"]))


def as_horovodrun(run, rank, share):
    """Do what horovodrun does before it starts the ranks, where something else has: rank 0 has the server at which they meet.

    The variables are those of horovod/runner/gloo_run.py (create_run_env_vars, create_slot_env_vars).
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    nodes, here = machines.nodes(run), machines.ranks_here(run)
    slots = get_host_assignments(parse_hosts(",".join("node%d:%d" % (node, here) for node in range(nodes))), run["world_size"])

    def offer():
        server = RendezvousServer()  # its thread ends with the process
        port = server.start()
        server.init(slots)
        return port

    os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(share("rendezvous", offer))
    os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = run["address"]
    os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = "gloo"
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(MEET_S))
    machines.prefer_interface(run, "HOROVOD_GLOO_IFACE")
    for key in ("hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
        os.environ["HOROVOD_" + key.upper()] = str(getattr(slots[rank], key))
