"""MXNet's own way over several machines: a kvstore `dist_sync`. Beside the ranks there are a server on each machine and one scheduler."""

import os
import socket
import subprocess
import sys

from crosstrain_worker import machines


class Store(object):
    """The kvstore that a rank's Trainer uses (`kvstore`), and the processes that belong to it."""

    def __init__(self, mx, run, rank, share):
        """Waits for the other ranks. The variables are those of ps-lite (docs: distributed_training.md of MXNet 1.9)."""
        host = socket.gethostbyname(run["address"])
        nodes = str(machines.nodes(run))
        common = {
            "DMLC_PS_ROOT_URI": host,
            "DMLC_PS_ROOT_PORT": str(share("rendezvous", machines.free_port)),
            "DMLC_NUM_WORKER": nodes,
            "DMLC_NUM_SERVER": nodes,
        }
        os.environ.update(common)
        machines.prefer_interface(run, "DMLC_INTERFACE")
        # They stop with the run, whose id they inherit; `close` ends them when all went well.
        self.processes = [self.start(role) for role in (["scheduler"] if rank == 0 else []) + ["server"]]
        os.environ["DMLC_ROLE"] = "worker"
        self.kvstore = mx.kv.create("dist_device_sync" if run["device"] == "gpu" else "dist_sync")

    def start(self, role):
        """What `import mxnet` does in a process with such a role is to serve until all is done."""
        flags = ["-I", "-B"] if sys.flags.isolated else ["-B"]
        return subprocess.Popen([sys.executable] + flags + ["-c", "import mxnet"], env=dict(os.environ, DMLC_ROLE=role))

    def meet(self):
        self.kvstore._barrier()

    def close(self):
        """No rank needs them any more: the session has let all come here first."""
        for process in self.processes:
            process.kill()
            process.wait()
