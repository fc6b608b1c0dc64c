"""Several ranks of Paddle, one replica each: paddle.DataParallel, over gloo on the CPU and NCCL on GPUs."""

import os
import socket
import time

import paddle
from paddle import distributed

from crosstrain_worker import machines

ADDRESS = "rendezvous"
POLL_S = 0.01
#: how often this rank has met the others
meetings = 0


def backend(device):
    return "nccl" if device == "gpu" else "gloo"


def join(run, rank):
    """The process group of all ranks; waits for them.

    Paddle's ranks meet at a TCP port of rank 0. It takes a free one and writes it into the run folder, so no two runs share one.
    """
    machines.prefer_interface(run, "GLOO_SOCKET_IFNAME")
    os.environ["PADDLE_DISTRI_BACKEND"] = backend(run["device"])
    # seconds until a rank that waits for the others gives up: the driver has the time limits
    os.environ.setdefault("FLAGS_stop_check_timeout", "86400")
    path = os.path.join(run["folder"], ADDRESS)
    held = offer(path, run.get("address") or "127.0.0.1") if rank == 0 else None
    address = read(path)
    os.environ["PADDLE_MASTER"] = address
    os.environ["PADDLE_TRAINER_ENDPOINTS"] = address
    os.environ["PADDLE_CURRENT_ENDPOINT"] = address
    os.environ["PADDLE_TRAINER_ID"] = str(rank)
    os.environ["PADDLE_TRAINERS_NUM"] = str(run["world_size"])
    if run["device"] == "gpu":
        os.environ["FLAGS_selected_gpus"] = str(machines.local_rank(run, rank))
    distributed.init_parallel_env()
    if held is not None:
        held.close()


def offer(path, host="127.0.0.1"):
    """Write the address of a free port of this machine, `host`; returns the socket that keeps it.

    While it is bound but does not listen, nobody is given this port, and Paddle, which sets SO_REUSEADDR as well, can listen on it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("0.0.0.0", 0))
    with open(path + ".tmp", "w") as out:
        out.write("%s:%d" % (host, held.getsockname()[1]))
    os.rename(path + ".tmp", path)
    return held


def read(path):
    """Rank 0's address. Waits as long as it takes: when rank 0 is gone, the driver stops the other ranks.

    Listing the folder, unlike asking for a name, makes NFS look at once.
    """
    folder, name = os.path.split(path)
    while name not in os.listdir(folder):
        time.sleep(POLL_S)
    with open(path) as source:
        return source.read()


def parallel(layer):
    """The layer whose backward pass averages the gradients over the ranks. Running statistics stay each replica's own."""
    meet()  # it copies rank 0's parameters to the others
    return paddle.DataParallel(layer)


def meet():
    """Wait for all ranks, as long as it takes: in a collective of gloo a rank waits 30 s for the others, which Paddle can not change."""
    global meetings
    meetings += 1
    store = paddle.base.core.create_or_get_global_tcp_store()
    key = "crosstrain/%d" % meetings
    if store.add(key, 1) == distributed.get_world_size():
        store.set(key + "/all", "1")
    store.wait(key + "/all")
    distributed.barrier()


def leave():
    distributed.destroy_process_group()
