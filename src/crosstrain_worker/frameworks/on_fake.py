"""A framework that only pretends: exact step times and every way to fail, on request. It proves arithmetic and fault handling.

It has a pretended asynchronous device: `step` queues `step_ms` of work and returns at once, `sync` waits for the queue.

`fault` (at `fault_phase`, rank `fault_rank`, from step `fault_iteration` of that phase on, where a replica's batch is above `fault_batch`):
raise, nan_loss, hang, kill (SIGKILL), segv (SIGSEGV), exit (leaves without a result), device_oom, host_oom (really takes memory
until it is refused or killed), silent (writes nothing, not even a result), stderr (10 MB of it, then raises), truncate (cuts its
samples file, then is killed), grandchild (leaves a child behind that ignores SIGTERM, then raises), no_sync (sync does not wait),
still (parameters never change), unsupported, drift (each step slower than the one before).
"""

import os
import signal
import subprocess
import sys
import time

import numpy

from crosstrain_worker.frameworks.base import Base, Unsupported

#: the grandchild of `grandchild`: a session of its own, deaf to SIGTERM
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
#: time.sleep wakes up late by some 0.1 ms: the last part of a wait is spun
SPIN_S = 0.0005


class Framework(Base):
    ops = frozenset()
    precisions = {"cpu": ("fp32", "bf16"), "gpu": ("fp32", "tf32", "bf16", "fp16")}
    max_replicas = 64
    several_machines = True
    frozen_parameters = True

    def check(self):
        self.ops = frozenset(op["op"] for op in self.spec["ops"])  # it computes nothing, so it can do everything
        Base.check(self)
        if self.run["framework"]["fault"] == "unsupported":
            raise Unsupported("asked to be unsupported", "framework.fault=none")

    def load_library(self):
        settings = self.run["framework"]
        self.step_s = settings["step_ms"] / 1e3
        self.fault = settings["fault"]
        self.fault_phase = settings["fault_phase"]
        self.fault_iteration = settings["fault_iteration"]
        self.steps = {}
        self.busy_until = 0.0
        self.fail_at("import")

    def versions(self):
        return {"framework": "1.0.0"}

    def setup(self):
        self.fail_at("build")

    def build(self):
        pass

    def load(self, arrays):
        self.arrays = dict((name, numpy.array(array)) for name, array in arrays.items())
        self.trained = [entry["name"] for entry in self.trained_parameters()][:1]
        self.losses = 0

    def read(self):
        return dict((name, array.copy()) for name, array in self.arrays.items())

    def to_device(self, inputs, targets):
        return (inputs, targets)

    def step(self, batch):
        count = self.steps.get(self.phase, 0)
        self.steps[self.phase] = count + 1
        if count >= self.fault_iteration:
            self.fail_at(self.phase)
        now = time.perf_counter()
        step_s = self.step_s * (1.0 + 0.002 * count) if self.fault == "drift" else self.step_s
        self.busy_until = max(now, self.busy_until) + step_s
        if self.fault != "still":
            for name in self.trained:
                self.arrays[name].flat[0] += 1e-3
        self.losses += 1
        correct = batch[1].size * (1.0 - 1.0 / (1.0 + self.losses)) if self.with_accuracy else None
        return self.loss(count), correct

    def loss(self, count):
        if self.fault == "nan_loss" and self.strikes(self.phase) and count >= self.fault_iteration:
            return float("nan")
        return 1.0 / self.losses

    def gradient(self, batch):
        still, self.fault = self.fault, self.fault if self.fault != "none" else "still"
        handles = self.step(batch)
        self.fault = still
        return handles

    forward = gradient

    def wait(self):
        left = self.busy_until - time.perf_counter()
        if left > SPIN_S:
            time.sleep(left - SPIN_S)
        while time.perf_counter() < self.busy_until:
            pass

    def sync(self):
        if self.fault != "no_sync":
            self.wait()

    def value(self, handle):
        self.wait()
        return float(handle)

    def probe(self):
        self.wait()
        return float(self.arrays[self.trained[0]].flat[0])

    def evaluate(self, batch):
        self.fail_at("evaluate")
        return 1.0 / (1.0 + self.losses), int(batch[1].size * (1.0 - 1.0 / (1.0 + self.losses)))

    def effective(self):
        return {"threads": self.run["threads"]}

    # -- faults --------------------------------------------------------------------------------------------------------
    def strikes(self, phase):
        settings = self.run["framework"]
        here = phase == self.fault_phase and self.rank == settings["fault_rank"]
        return here and self.run["batch_per_replica"] > settings.get("fault_batch", 0)

    def fail_at(self, phase):
        if self.strikes(phase):
            action = getattr(self, "fault_" + self.fault, None)
            if action is not None:
                action()

    def fault_raise(self):
        raise RuntimeError("asked to raise in phase %s" % self.fault_phase)

    def fault_hang(self):
        time.sleep(3600)

    def fault_kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def fault_segv(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def fault_exit(self):
        os._exit(0)

    def fault_silent(self):
        for name in os.listdir(self.run["folder"]):
            if name.startswith(("samples.", "events.")):
                os.remove(os.path.join(self.run["folder"], name))
        os._exit(0)

    def fault_device_oom(self):
        # As a library does that aborts: the text on stderr is all that is left.
        sys.stderr.write("pretended: CUDA out of memory. Tried to allocate 2.00 GiB\n")
        sys.stderr.flush()
        os.abort()

    def fault_host_oom(self):
        blocks = []
        while True:
            blocks.append(bytearray(64 * 2**20))

    def fault_stderr(self):
        for _ in range(10 * 2**20 // 80):
            sys.stderr.write("x" * 79 + "\n")
        raise RuntimeError("asked to raise after 10 MB on stderr")

    def fault_truncate(self):
        path = os.path.join(self.run["folder"], "samples.%d.bin" % self.rank)
        os.truncate(path, 64 + 56 + 20)
        os.kill(os.getpid(), signal.SIGKILL)

    def fault_grandchild(self):
        child = subprocess.Popen([sys.executable, "-c", DEAF], start_new_session=True)
        with open(os.path.join(self.run["folder"], "grandchild.pid"), "w") as out:
            out.write(str(child.pid))
        raise RuntimeError("asked to raise with a grandchild left behind")
