"""What this machine can do at most, measured with PyTorch: matrix products, copies, an all-reduce. Mode `ceilings` of the worker.

run.json needs no network here, but `ceilings`: {"thread_counts": [1, 2]} on the CPU. Several ranks measure the all-reduce alone.
Each number is the best of several rounds: a ceiling, not what to expect. 1 TFLOP/s = 1e12 floating-point operations, a product of
two n x n matrices has 2 n^3 (as the spec's FLOPs count); 1 GB = 1e9 bytes.
"""

import datetime
import os
import time

import torch
from torch import distributed

#: n of the matrices; the best counts
SIZES = {"cpu": (1024, 2048), "gpu": (2048, 4096, 8192)}
ROUND_S = {"cpu": 0.3, "gpu": 0.15}
ROUNDS = 3
COPY_BYTES = {"cpu": 2**28, "gpu": 2**30}
#: of a transfer between host and device, and of the all-reduce
TRANSFER_BYTES = 2**28


def measure(session):
    """Fills session.result["ceilings"], in the form of docs/design.md (Ceilings)."""
    run = session.run
    versions = {"framework": torch.__version__, "cuda": torch.version.cuda or ""}
    session.result["versions"].update(versions)
    if run["device"] == "gpu" and not torch.cuda.is_available():
        raise RuntimeError("PyTorch %s sees no GPU here" % torch.__version__)
    session.enter("iteration")
    if run["world_size"] > 1:
        found = {"all_reduce_gb_s": all_reduce(run, session.rank)}
    elif run["device"] == "gpu":
        found = {"matrix_tflops": gpu_matrices(), "copy_gb_s": gpu_copies()}
    else:
        found = {"matrix_tflops": cpu_matrices(run), "copy_gb_s": {"host": host_copy(run)}}
    session.result["ceilings"] = found


def best_s(work, sync, round_s):
    """Seconds of one `work()`: the shortest of some rounds, each of so many calls that it lasts about round_s, with one sync."""
    for _ in range(2):
        work()
    sync()
    start = time.perf_counter()
    work()
    sync()
    calls = max(1, int(round_s / max(1e-6, time.perf_counter() - start)))
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        sync()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def matrix_tflops(device, dtype, sync):
    """The best rate over the sizes."""
    best = 0.0
    for size in SIZES[device]:
        a, b = (torch.randn(size, size, device=torch_device(device)).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        seconds = best_s(lambda a=a, b=b, out=out: torch.matmul(a, b, out=out), sync, ROUND_S[device])
        best = max(best, 2.0 * size**3 / seconds / 1e12)
    return best


def torch_device(device):
    return torch.device("cuda", 0) if device == "gpu" else torch.device("cpu")


def nothing():
    """On the CPU a call returns when its work is done."""


# -- GPU -----------------------------------------------------------------------------------------------------------------
def gpu_matrices():
    """{precision: {"1": TFLOP/s of one GPU}}, of the precisions that it has."""
    torch.cuda.set_device(0)
    major = torch.cuda.get_device_capability(0)[0]
    modes = [("fp32", torch.float32, False), ("fp16", torch.float16, False)]
    if major >= 8:
        modes += [("tf32", torch.float32, True), ("bf16", torch.bfloat16, False)]
    found = {}
    for precision, dtype, tf32 in modes:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        if torch.backends.cuda.matmul.allow_tf32 != tf32:
            raise RuntimeError("TF32 can not be switched %s" % ("on" if tf32 else "off"))
        found[precision] = {"1": matrix_tflops("gpu", dtype, torch.cuda.synchronize)}
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def gpu_copies():
    """GB/s: `device` within its memory (what is read and what is written), `host_to_device`, `device_to_host` (pinned)."""
    free = torch.cuda.mem_get_info(0)[0]
    size = min(COPY_BYTES["gpu"], free // 8)
    here, there = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    found = {"device": 2 * size / best_s(lambda: there.copy_(here), torch.cuda.synchronize, ROUND_S["gpu"]) / 1e9}
    size = min(TRANSFER_BYTES, size)
    pinned = torch.empty(size, dtype=torch.uint8).pin_memory()
    part = here[:size]
    into = best_s(lambda: part.copy_(pinned, non_blocking=True), torch.cuda.synchronize, ROUND_S["gpu"])
    back = best_s(lambda: pinned.copy_(part, non_blocking=True), torch.cuda.synchronize, ROUND_S["gpu"])
    found.update(host_to_device=size / into / 1e9, device_to_host=size / back / 1e9)
    return found


def all_reduce(run, rank):
    """Bus bandwidth in GB/s over all ranks, a GPU each: 2 (n - 1) / n x bytes / time, as NCCL's own tests count."""
    ranks = run["world_size"]
    torch.cuda.set_device(rank)
    store = distributed.FileStore(os.path.join(run["folder"], "rendezvous"), ranks)
    limit = datetime.timedelta(seconds=120)
    distributed.init_process_group("nccl", store=store, rank=rank, world_size=ranks, timeout=limit)
    data = torch.ones(TRANSFER_BYTES // 4, dtype=torch.float32, device="cuda")
    best = float("inf")
    calls = 10  # the same on all ranks
    for _ in range(ROUNDS + 1):  # the first makes the connections
        distributed.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            distributed.all_reduce(data)
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / calls)
    distributed.destroy_process_group()
    return 2.0 * (ranks - 1) / ranks * TRANSFER_BYTES / best / 1e9


# -- CPU -----------------------------------------------------------------------------------------------------------------
def cpu_matrices(run):
    """{"fp32": {number of threads: TFLOP/s}}."""
    found = {}
    for threads in run["ceilings"]["thread_counts"]:
        torch.set_num_threads(threads)
        found[str(threads)] = matrix_tflops("cpu", torch.float32, nothing)
    return {"fp32": found}


def host_copy(run):
    """GB/s within the host's memory, with all threads (what is read and what is written)."""
    torch.set_num_threads(max(run["ceilings"]["thread_counts"]))
    here, there = (torch.ones(COPY_BYTES["cpu"] // 4, dtype=torch.float32) for _ in range(2))
    return 2 * COPY_BYTES["cpu"] / best_s(lambda: there.copy_(here), nothing, ROUND_S["cpu"]) / 1e9
