"""MXNet 1.9 with Gluon. The layers are in `mxnet_layers`."""

import contextlib
import ctypes
import os
import platform

import numpy

from .base import Base, Unsupported

# Set by load_library: importing MXNet is timed, and reads the environment.
mx = None
layers = None


class Framework(Base):
    """One replica on the CPU or on gpu(0) (CUDA_VISIBLE_DEVICES is set by the launcher)."""

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
    max_replicas = 1

    def __init__(self, run):
        Base.__init__(self, run)
        self.gpu = run["device"] == "gpu"
        self.settings = run["framework"]
        self.compile = self.settings.get("compile", "off")
        # Found by experiment on the CPU; cuDNN keeps n/(n-1) times the batch's variance.
        kept = "unbiased" if self.gpu else "biased"
        self.deviations = {}
        for op in self.spec["ops"]:
            if op["op"] == "batch_norm" and op["variance"] != kept:
                self.deviations[op["name"]] = "running variance is %s, the spec's is %s" % (kept, op["variance"])
            if op["op"] == "lstm":
                self.deviations[op["name"]] = "has a second bias (h2h_bias): 0, frozen, not counted"

    # -- before anything is built -------------------------------------------------------------------------------------
    def load_library(self):
        global mx, layers
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

    def versions(self):
        found = {"framework": mx.__version__, "python": platform.python_version(), "numpy": numpy.__version__}
        features = mx.runtime.Features()
        found["onednn"] = "built in" if features.is_enabled("MKLDNN") else "none"
        if features.is_enabled("BLAS_OPEN"):
            found["blas"] = "openblas"
        elif features.is_enabled("BLAS_MKL"):
            found["blas"] = "mkl"
        return found

    def check(self):
        Base.check(self)
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
        if mx.context.num_gpus() == 0:
            raise Unsupported("MXNet %s sees no GPU" % mx.__version__, "device=cpu")

    # -- set up ----------------------------------------------------------------------------------------------------------
    def setup(self):
        self.context = mx.gpu(0) if self.gpu else mx.cpu()

    def build(self):
        self.network = layers.Network(self.spec)
        loss = self.spec["loss"]
        # One graph for each use, traced when first called: `static_shape` plans memory for one batch size.
        self.trained = layers.Trained(self.network, loss)
        self.counted = layers.Trained(self.network, loss, counting=True)
        self.evaluated = layers.Trained(self.network, loss, counting=True)
        self.network.collect_params().initialize(mx.init.Zero(), ctx=self.context)
        if self.compile == "on":
            for block in (self.trained, self.counted, self.evaluated):
                block.hybridize(static_alloc=True, static_shape=True)
        self.slots = self.network.slots
        self.classes = loss["op"] == "softmax_cross_entropy"
        self.output_shape = next(tuple(op["shape"]) for op in self.spec["ops"] if op["name"] == self.spec["output"])
        for parameter in self.spec["parameters"]:
            self.slots[parameter["name"]].wd_mult = 1.0 if parameter["decay"] else 0.0
        self.parameters = [self.slots[parameter["name"]] for parameter in self.spec["parameters"]]
        self.clip_norm = self.run["optimizer"]["clip_norm"]
        self.new_trainer()

    def new_trainer(self):
        """MXNet's momentum buffer holds −learning_rate·v: the same update while the learning rate stays."""
        wanted = self.run["optimizer"]
        if wanted["name"] != "sgd":
            raise Unsupported("mxnet: this adapter has no mapping for optimizer %s" % wanted["name"])
        for parameter in self.parameters:
            parameter._trainer = None
        self.trainer = mx.gluon.Trainer(
            self.parameters,
            "sgd",
            {"learning_rate": wanted["learning_rate"], "momentum": wanted["momentum"], "wd": wanted["weight_decay"]},
        )

    def load(self, arrays):
        if set(arrays) != set(self.slots):
            raise ValueError("mxnet: load needs exactly these arrays, wrong: %s" % sorted(set(arrays) ^ set(self.slots)))
        for name, parameter in self.slots.items():
            array = arrays[name]
            if tuple(array.shape) != tuple(parameter.shape):
                raise ValueError("mxnet: %s has shape %s, not %s" % (name, tuple(parameter.shape), tuple(array.shape)))
            parameter.set_data(mx.nd.array(array, ctx=self.context, dtype="float32"))
        self.new_trainer()
        # the same dropout masks after every load
        mx.random.seed(self.run["seed"])

    def read(self):
        return {name: parameter.data(self.context).asnumpy() for name, parameter in self.slots.items()}

    # -- one batch ---------------------------------------------------------------------------------------------------------
    def to_device(self, inputs, targets):
        """Copies; class indices become float32, as Gluon's losses take them (exact below 2**24)."""
        inputs = mx.nd.array(inputs, ctx=self.context, dtype=inputs.dtype)
        targets = inputs if targets is None else mx.nd.array(targets, ctx=self.context, dtype="float32")
        return inputs, targets if self.classes else targets.reshape((-1,) + self.output_shape)

    def step(self, batch):
        handles = self.gradient(batch)
        if self.clip_norm is not None:
            gradients = [parameter.grad(self.context) for parameter in self.parameters]
            mx.gluon.utils.clip_global_norm(gradients, self.clip_norm, check_isfinite=False)
        # the loss is a mean already
        self.trainer.step(1)
        return handles

    def gradient(self, batch):
        inputs, targets = batch
        if self.with_accuracy:
            with mx.autograd.record():
                loss, correct = self.counted(inputs, targets)
        else:
            correct = None
            with mx.autograd.record():
                loss = self.trained(inputs, targets)
        loss.backward()
        return loss, correct

    def forward(self, batch):
        return self.network(batch[0]), None

    def sync(self):
        mx.nd.waitall()

    def value(self, handle):
        return float(handle[(0,) * handle.ndim].asscalar() if handle.size > 1 else handle.asscalar())

    def probe(self):
        return self.value(self.parameters[-1].data(self.context)) if self.parameters else 0.0

    def evaluate(self, batch):
        loss, correct = self.evaluated(*batch)
        return float(loss.asscalar()), int(correct.asscalar())

    # -- for the ladder -------------------------------------------------------------------------------------------------------
    def output(self, batch, training):
        with mx.autograd.train_mode() if training else mx.autograd.predict_mode(), self.states_kept():
            return self.network(batch[0]).asnumpy()

    def gradients(self, batch):
        with self.states_kept():
            self.gradient(batch)
            mx.nd.waitall()
        return {p["name"]: self.slots[p["name"]].grad(self.context).asnumpy() for p in self.spec["parameters"]}

    @contextlib.contextmanager
    def states_kept(self):
        """Running statistics as they were before."""
        states = [self.slots[state["name"]] for state in self.spec["states"]]
        before = [state.data(self.context).copy() for state in states]
        yield
        for state, value in zip(states, before):
            state.set_data(value)

    # -- facts ------------------------------------------------------------------------------------------------------------------
    def effective(self):
        return {
            "device": str(self.context),
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
