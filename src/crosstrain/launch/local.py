"""launcher=local: every rank is a child of the driver on this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstrain import paths
from crosstrain.environments import Environment

#: What of the driver's environment a worker sees; everything else would make runs differ from shell to shell.
PASSED = "PATH HOME USER LOGNAME TMPDIR LD_LIBRARY_PATH LANG TZ XDG_CACHE_HOME OPENBLAS_CORETYPE OPENBLAS_L2_SIZE".split()
PASSED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "NVSHMEM_", "TORCH_SYMM_MEM_", "UCX_", "SLURM_")
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


def environment(run: Mapping[str, Any], extra: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a worker: the whitelist, this run's marks, then framework.env (`extra`)."""
    passed = {
        key: value
        for key, value in os.environ.items()
        if key in PASSED or key.startswith(PASSED_PREFIXES) or key.lower() in PROXIES
    }
    passed["CROSSTRAIN_RUN_ID"] = run["run_id"]
    # The run's GPUs and no others; on the CPU none, so that no framework takes one in silence.
    passed["CUDA_VISIBLE_DEVICES"] = ",".join(run["gpus"])
    return {**passed, **extra}


def start(run: Mapping[str, Any], place: Environment, extra: Mapping[str, str]) -> list[subprocess.Popen[bytes]]:
    """Start all ranks of `run` (run.json is written), each in a session of its own, its output into files of the run folder."""
    folder = Path(run["folder"])
    flags = ["-I", "-B", "-u"] if place.isolated else ["-B", "-u"]
    env = environment(run, extra)
    processes: list[subprocess.Popen[bytes]] = []
    for rank in range(run["world_size"]):
        with open(folder / f"worker.{rank}.out", "wb") as out, open(folder / f"worker.{rank}.err", "wb") as err:
            processes.append(
                subprocess.Popen(
                    [str(place.python), *flags, str(paths.worker_dir()), str(folder), str(rank)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    cwd=folder,
                    env=env,
                    start_new_session=True,
                )
            )
    return processes
