"""MXNet 1.9 with Gluon. The layers are in `mxnet_layers`."""

import contextlib
import ctypes
import os
import platform

import numpy

from crosstrain_worker import machines

from . import with_horovod
from .base import Base, Unsupported

# Set by load_library: importing MXNet is timed, and reads the environment.
mx = None
layers = None
hvd = None


class Framework(Base):
    """All replicas of a machine in one rank: on cpu(0), cpu(1), … or gpu(0), gpu(1), … (CUDA_VISIBLE_DEVICES is set by the launcher).

    Several: a Gluon Trainer with kvstore `device`, which adds their gradients; on several machines `dist_sync` (`mxnet_machines`).
    With Horovod: one in each rank, on cpu(0) or gpu(local rank), and Horovod's DistributedTrainer; `replicas` are the rank's own. A
    batch is a list of each replica's part, a handle (arrays of the replicas, divisor): its value is their sum over the divisor.
    """

    ops = frozenset(
        (
            "linear",
            "tied_linear",
            "conv2d",
            "max_pool",
            "avg_pool",
            "global_avg_pool",
            "batch_norm",
            "layer_norm",
            "lrn",
            "relu",
            "tanh",
            "sigmoid",
            "softmax",
            "gelu",
            "dropout",
            "add",
            "concat",
            "channel_pad_shortcut",
            "flatten",
            "embedding",
            "position_embedding",
            "class_token",
            "patches_to_tokens",
            "select_token",
            "lstm",
            "attention",
            "masked_mean",
        )
    )
    precisions = {"cpu": ("fp32",), "gpu": ("fp32",)}
    compile_modes = ("off", "on")
    memory_formats = ("contiguous",)
    max_replicas = 1024
    replicas_per_rank = "all"
    several_machines = True
    frozen_parameters = True

    def __init__(self, run):
        Base.__init__(self, run)
        self.gpu = run["device"] == "gpu"
        self.settings = run["framework"]
        self.compile = self.settings.get("compile", "off")
        self.here = run["replicas"] // machines.nodes(run)  # on this machine
        self.replicas = 1 if self.horovod else self.here
        self.store = None
        self.distributed = self.horovod and run["world_size"] > 1
        # Found by experiment on the CPU; cuDNN keeps n/(n-1) times the batch's variance.
        kept = "unbiased" if self.gpu else "biased"
        self.deviations = {}
        for op in self.spec["ops"]:
            if op["op"] == "batch_norm" and op["variance"] != kept:
                self.deviations[op["name"]] = "running variance is %s, the spec's is %s" % (kept, op["variance"])
            if op["op"] == "lstm":
                self.deviations[op["name"]] = "has a second bias (h2h_bias): 0, frozen, not counted"
        self.declare_own_statistics()

    # -- before anything is built -------------------------------------------------------------------------------------
    def load_library(self):
        global mx, layers, hvd
        threads = str(self.run["threads"])
        os.environ["OMP_NUM_THREADS"] = threads
        os.environ["OPENBLAS_NUM_THREADS"] = threads
        # One engine thread: each operator is spread over OpenMP's threads.
        os.environ["MXNET_CPU_WORKER_NTHREADS"] = "1"
        os.environ["MXNET_ENFORCE_DETERMINISM"] = "1" if self.settings.get("deterministic") else "0"
        os.environ["MXNET_CUDNN_AUTOTUNE_DEFAULT"] = "1" if self.settings.get("autotune") else "0"
        import mxnet as library

        from . import mxnet_layers

        mx, layers = library, mxnet_layers
        if self.distributed:
            import horovod.mxnet as hvd

    def versions(self):
        found = {"framework": mx.__version__, "python": platform.python_version(), "numpy": numpy.__version__}
        if self.horovod:
            found["horovod"] = with_horovod.version()
        features = mx.runtime.Features()
        found["onednn"] = "built in" if features.is_enabled("MKLDNN") else "none"
        if features.is_enabled("BLAS_OPEN"):
            found["blas"] = "openblas"
        elif features.is_enabled("BLAS_MKL"):
            found["blas"] = "mkl"
        return found

    def check(self):
        Base.check(self)
        if self.distributed:
            with_horovod.check(hvd, self.run["device"])
        if not self.gpu:
            return
        if not mx.runtime.Features().is_enabled("CUDA"):
            raise Unsupported("this build of MXNet (%s) has no CUDA" % mx.__version__, "install mxnet-cu112, or device=cpu")
        capability = compute_capability()
        # The wheels hold machine code for sm_50 … sm_86 and no PTX: on newer GPUs the first kernel hangs or fails.
        if capability is not None and capability[0] >= 9:
            raise Unsupported(
                "MXNet %s has no code for compute capability %d.%d (the wheels end at 8.6)" % ((mx.__version__,) + capability),
                "device=cpu",
            )
        seen, wanted = mx.context.num_gpus(), self.here
        if seen < wanted:
            raise Unsupported("MXNet %s sees %d GPUs, not %d" % (mx.__version__, seen, wanted), "device=cpu")

    # -- set up ----------------------------------------------------------------------------------------------------------
    def setup(self):
        first = self.local_rank if self.gpu else 0
        self.contexts = [mx.gpu(first + i) if self.gpu else mx.cpu(i) for i in range(self.replicas)]
        if self.distributed:
            with_horovod.join(hvd, self.run, self.rank, self.share)
        elif machines.nodes(self.run) > 1:
            from . import mxnet_machines

            self.store = mxnet_machines.Store(mx, self.run, self.rank, self.share)

    def build(self):
        self.network = layers.Network(self.spec)
        loss = self.spec["loss"]
        # One graph for each use, traced when first called: `static_shape` plans memory for one batch size.
        self.trained = layers.Trained(self.network, loss)
        self.counted = layers.Trained(self.network, loss, counting=True)
        self.evaluated = layers.Trained(self.network, loss, counting=True)
        self.network.collect_params().initialize(mx.init.Zero(), ctx=self.contexts)
        if self.compile == "on":
            for block in (self.trained, self.counted, self.evaluated):
                block.hybridize(static_alloc=True, static_shape=True)
        self.slots = self.network.slots
        self.classes = loss["op"] == "softmax_cross_entropy"
        for parameter in self.spec["parameters"]:
            slot = self.slots[parameter["name"]]
            slot.wd_mult = 1.0 if parameter["decay"] else 0.0
            if not parameter.get("trained", True):
                slot.grad_req = "null"
        self.parameters = [self.slots[parameter["name"]] for parameter in self.trained_parameters()]
        self.clip_norm = self.run["optimizer"]["clip_norm"]
        self.new_trainer()

    def new_trainer(self):
        """MXNet's momentum buffer holds −learning_rate·v: the same update while the learning rate stays."""
        wanted = self.run["optimizer"]
        if wanted["name"] != "sgd":
            raise Unsupported("mxnet: this adapter has no mapping for optimizer %s" % wanted["name"])
        for parameter in self.parameters:
            parameter._trainer = None
        options = {"learning_rate": wanted["learning_rate"], "momentum": wanted["momentum"], "wd": wanted["weight_decay"]}
        #: how many times their mean reduced gradients are, and by what the trainer has to be told to divide them
        self.sum_of = self.divisor = self.replicas if self.distributed else self.run["replicas"]
        if self.distributed:
            # Not as a list, which it sorts: parameters have no order.
            self.trainer = hvd.DistributedTrainer({slot.name: slot for slot in self.parameters}, "sgd", options)
            # It divides by itself: in the reduction, or (Gloo) with the trainer's scale in the update.
            self.sum_of = 1 / self.trainer._scale
            return
        self.trainer = mx.gluon.Trainer(
            self.parameters,
            "sgd",
            options,
            kvstore="device" if self.store is None else self.store.kvstore,  # not used for one replica
            # Its own choice (in the store), except where something comes between reduction and update; and not in that of several
            # machines, which knows nothing of the parameters that do not decay.
            update_on_kvstore=False if self.store or self.clip_norm is not None or self.run["task"] == "gradient" else None,
        )

    def forget(self):
        """The optimiser's state as it is before the first step."""
        if self.store is None:
            self.new_trainer()
            return
        # The servers would take the first values of another trainer for gradients.
        for updater in self.trainer._updaters:
            updater.states.clear()
            updater.states_synced.clear()

    def load(self, arrays):
        if set(arrays) != set(self.slots):
            raise ValueError("mxnet: load needs exactly these arrays, wrong: %s" % sorted(set(arrays) ^ set(self.slots)))
        for name, parameter in self.slots.items():
            array = arrays[name]
            if tuple(array.shape) != tuple(parameter.shape):
                raise ValueError("mxnet: %s has shape %s, not %s" % (name, tuple(parameter.shape), tuple(array.shape)))
            parameter.set_data(mx.nd.array(array, ctx=self.contexts[0], dtype="float32"))
        self.forget()
        # the same dropout masks after every load
        mx.random.seed(self.run["seed"])

    def read(self):
        return self.read_replicas(self.contexts[:1])[0]

    def read_replicas(self, contexts=None):
        return [
            {name: parameter.data(context).asnumpy() for name, parameter in self.slots.items()}
            for context in contexts or self.contexts
        ]

    # -- one batch ---------------------------------------------------------------------------------------------------------
    def to_device(self, inputs, targets):
        """Copies; class indices become float32, as Gluon's losses take them (exact below 2**24)."""
        kind = self.spec["target"]["kind"]
        inputs = self.split(inputs, inputs.dtype)
        if kind == "op":
            return [(x,) for x in inputs]
        return list(zip(inputs, inputs if targets is None or kind == "input" else self.split(targets, "float32")))

    def split(self, array, dtype):
        """Each replica's part, on its device; the last batch of a test set may leave some replicas without one."""
        if self.replicas == 1:
            return [mx.nd.array(array, ctx=self.contexts[0], dtype=dtype)]
        contexts = self.contexts[: len(array)]
        parts = numpy.array_split(array, len(contexts))
        return [mx.nd.array(part, ctx=context, dtype=dtype) for part, context in zip(parts, contexts)]

    def step(self, batch):
        handles = self.backward(batch)
        trainer = self.trainer
        if self.clip_norm is None:
            # the losses are means already
            trainer.step(self.divisor)
            return handles
        trainer.allreduce_grads()
        for context in self.contexts:
            gradients = [parameter.grad(context) for parameter in self.parameters]
            mx.gluon.utils.clip_global_norm(gradients, self.clip_norm * self.sum_of, check_isfinite=False)
        trainer.update(self.divisor)
        return handles

    def gradient(self, batch):
        handles = self.backward(batch)
        self.trainer.allreduce_grads()
        return handles

    def backward(self, batch):
        """Forward and backward of every replica; without reduction."""
        if self.with_accuracy:
            with mx.autograd.record():
                found = [self.counted(*part) for part in batch]
            losses, correct = [loss for loss, _ in found], ([right for _, right in found], 1)
        else:
            correct = None
            with mx.autograd.record():
                losses = [self.trained(*part) for part in batch]
        mx.autograd.backward(losses)
        return (losses, self.replicas), correct

    def forward(self, batch):
        return ([self.network(part[0]) for part in batch], 1), None

    def sync(self):
        mx.nd.waitall()

    def meet(self):
        if self.distributed:
            hvd.allreduce(mx.nd.zeros(1, ctx=self.contexts[0]), name="meet").wait_to_read()
        elif self.store is not None:
            self.store.meet()

    def value(self, handle):
        arrays, divisor = handle
        return sum(first_element(array) for array in arrays) / divisor

    def probe(self):
        return sum(first_element(copy) for copy in self.parameters[-1].list_data()) if self.parameters else 0.0

    def evaluate(self, batch):
        sizes = [len(part[0]) for part in batch]
        found = [self.evaluated(*part) for part in batch]
        loss = sum(size * float(mean.asscalar()) for size, (mean, _) in zip(sizes, found)) / sum(sizes)
        return loss, sum(int(correct.asscalar()) for _, correct in found)

    # -- for the ladder -------------------------------------------------------------------------------------------------------
    def output(self, batch, training):
        with mx.autograd.train_mode() if training else mx.autograd.predict_mode(), self.states_kept():
            return numpy.concatenate([self.network(part[0]).asnumpy() for part in batch])

    def gradients(self, batch):
        with self.states_kept():
            self.gradient(batch)
            mx.nd.waitall()
        summed = {p["name"]: self.slots[p["name"]].grad(self.contexts[0]).asnumpy() for p in self.trained_parameters()}
        return {name: gradient / self.sum_of for name, gradient in summed.items()}

    @contextlib.contextmanager
    def states_kept(self):
        """Running statistics as they were before."""
        states = [self.slots[state["name"]] for state in self.spec["states"]]
        before = [[value.copy() for value in state.list_data()] for state in states]
        yield
        for state, values in zip(states, before):
            for value, kept in zip(state.list_data(), values):
                value[:] = kept

    # -- facts ------------------------------------------------------------------------------------------------------------------
    def effective(self):
        return {
            "device": ", ".join(str(context) for context in self.contexts),
            # the OpenMP that MXNet is linked with
            "threads": mx.base._LIB.omp_get_max_threads(),
            "precision": "fp32",
            "deterministic": os.environ["MXNET_ENFORCE_DETERMINISM"] == "1",
            "memory_format": "contiguous",
            "compile": "on" if self.trained._active else "off",
            "autotune": self.gpu and os.environ["MXNET_CUDNN_AUTOTUNE_DEFAULT"] == "1",
            "mkldnn": mx.runtime.Features().is_enabled("MKLDNN"),
        }

    def is_oom(self, error):
        words = str(error).lower()
        return isinstance(error, mx.MXNetError) and ("out of memory" in words or "failed to allocate" in words)

    def close(self):
        if self.distributed:
            hvd.shutdown()
        elif self.store is not None:
            self.store.close()


def first_element(array):
    """A Python float. Waits for the array."""
    return float(array[(0,) * array.ndim].asscalar() if array.size > 1 else array.asscalar())


def compute_capability():
    """(major, minor) of the first visible GPU by the CUDA driver, or None where there is none. Makes no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, found = ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, …_MINOR
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
        found.append(value.value)
    return tuple(found)
