"""PaddlePaddle, 3.x. The layers are in `paddle_layers`."""

import contextlib
import ctypes
import os
import platform

import numpy

from .base import Base, Unsupported

# Set by load_library: importing Paddle is timed, and reads the environment.
paddle = None
layers = None
ranks = None

HALF = {"bf16": "bfloat16", "fp16": "float16"}


class Framework(Base):
    """One replica in each rank, on the CPU or on gpu:<rank> (CUDA_VISIBLE_DEVICES is set by the launcher); see `paddle_ranks`.

    compile=on: network and loss through paddle.jit.to_static, as one whole graph; the optimiser stays as it is. max: CINN as well.
    Only builds with CUDA can do other devices than the CPU and other precisions than fp32: these ways are written by the
    documentation, not tried.
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
    # auto_cast has no effect on the CPU
    precisions = {"cpu": ("fp32",), "gpu": ("fp32", "tf32", "bf16", "fp16")}
    compile_modes = ("off", "on", "max")
    memory_formats = ("contiguous",)
    max_replicas = 1024
    several_machines = True
    frozen_parameters = True

    def __init__(self, run):
        Base.__init__(self, run)
        self.gpu = run["device"] == "gpu"
        self.settings = run["framework"]
        self.compile = self.settings.get("compile", "off")
        # Found by experiment on the CPU; cuDNN keeps n/(n-1) times the batch's variance.
        kept = "unbiased" if self.gpu else "biased"
        for op in self.spec["ops"]:
            if op["op"] == "batch_norm" and op["variance"] != kept:
                self.deviations[op["name"]] = "running variance is %s, the spec's is %s" % (kept, op["variance"])
            if op["op"] == "lstm":
                self.deviations[op["name"]] = "has a second bias (bias_hh): 0, frozen, not counted"
        self.declare_own_statistics()
        self.distributed = run["world_size"] > 1

    # -- before anything is built -------------------------------------------------------------------------------------
    def load_library(self):
        global paddle, layers, ranks
        environment = os.environ
        # What Paddle computes with on the CPU (MKL and its own kernels, by OpenMP) takes its threads from here, and only now.
        environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(self.run["threads"])
        if amd_with_avx2():
            # This MKL (2019) gives AMD's CPUs its slowest code; 5 asks for that of AVX2, 2.5 to 3 times as fast. With 6 (AVX-512)
            # an LSTM ended by an illegal instruction on an EPYC that has AVX-512.
            environment.setdefault("MKL_DEBUG_CPU_TYPE", "5")
        if self.settings.get("deterministic"):
            # MKL's sums then depend on nothing but the numbers (MKL guide, "Conditional Numerical Reproducibility")
            environment.setdefault("MKL_CBWR", "AUTO")
            environment["FLAGS_cudnn_deterministic"] = environment["FLAGS_embedding_deterministic"] = "1"
        if self.gpu:
            environment["FLAGS_cudnn_exhaustive_search"] = "1" if self.settings.get("autotune") else "0"
        else:
            # The graphs of to_static run on one thread, each operator on OpenMP's: by default some more threads take operators.
            environment.setdefault("FLAGS_enable_pir_in_executor_trace_run", "1")
        import paddle as library

        from . import paddle_layers, paddle_ranks

        paddle, layers, ranks = library, paddle_layers, paddle_ranks

    def versions(self):
        found = {"framework": paddle.__version__, "python": platform.python_version(), "numpy": numpy.__version__}
        if paddle.is_compiled_with_cuda():
            found["cuda"], found["cudnn"] = str(paddle.version.cuda()), str(paddle.version.cudnn())
        mkl = own_library("libmklml_intel.so")
        if mkl is not None:
            words = ctypes.create_string_buffer(200)
            mkl.MKL_Get_Version_String(words, len(words))
            found["mkl"] = words.value.decode("ascii", "replace").strip()
        dnnl = own_library("libdnnl.so.3")
        if dnnl is not None:
            dnnl.dnnl_version.restype = ctypes.POINTER(ctypes.c_int * 3)
            found["onednn"] = "%d.%d.%d" % tuple(dnnl.dnnl_version().contents)
        return found

    def check(self):
        Base.check(self)
        version = paddle.__version__
        if self.gpu:
            self.check_gpu()
        if self.compile == "max" and not paddle.is_compiled_with_cinn():
            raise Unsupported(
                "this build of Paddle (%s) has no CINN, the compiler behind framework.compile=max" % version,
                "framework.compile=on",
            )
        if self.distributed and not paddle.distributed.is_available():
            raise Unsupported("this build of Paddle (%s) has no paddle.distributed for several replicas" % version)

    def check_gpu(self):
        version = paddle.__version__
        if not paddle.is_compiled_with_cuda():
            raise Unsupported("this build of Paddle (%s) has no CUDA" % version, "install a CUDA build, or device=cpu")
        if paddle.device.cuda.device_count() <= self.local_rank:
            raise Unsupported("Paddle %s sees %d GPUs" % (version, paddle.device.cuda.device_count()), "device=cpu")
        capability = paddle.device.cuda.get_device_capability(self.local_rank)
        if capability[0] < 8 and self.run["precision"] in ("tf32", "bf16"):
            raise Unsupported(
                "precision=%s needs compute capability 8.0 or newer, this GPU has %d.%d"
                % ((self.run["precision"],) + tuple(capability))
            )

    # -- set up ----------------------------------------------------------------------------------------------------------
    def setup(self):
        self.device = "gpu:%d" % self.local_rank if self.gpu else "cpu"
        paddle.set_device(self.device)
        self.half = HALF.get(self.run["precision"])
        if self.gpu:
            # Paddle has no public switch for TF32; its own default is to allow it
            paddle.base.core.set_cublas_switch(self.run["precision"] == "tf32")
            paddle.base.core.set_cudnn_switch(self.run["precision"] == "tf32")
            paddle.device.cuda.reset_max_memory_allocated(self.device)
        if self.distributed:
            ranks.join(self.run, self.rank)

    def build(self):
        spec = self.spec
        self.network = layers.Network(spec)
        self.slots = self.network.slots
        trained = [parameter["name"] for parameter in self.trained_parameters()]
        for name in set(parameter["name"] for parameter in spec["parameters"]) - set(trained):
            self.slots[name].tensor.stop_gradient = True
        for tensor in self.network.derived:
            tensor.stop_gradient = False
        updated = set(self.slots[name].tensor.name for name in trained)
        self.unused = [tensor for tensor in self.network.derived if tensor.name not in updated]
        self.probed = self.slots[trained[-1]].tensor if trained else None
        self.classes = spec["loss"]["op"] == "softmax_cross_entropy"
        # What the hot path calls. Evaluation stays as it is: it is not timed, and its last batch is smaller.
        self.eager = layers.Trained(self.network, spec["loss"])
        hot = self.static(layers.Trained(self.network, spec["loss"]))
        self.static_layer = hot
        if self.distributed:
            hot = ranks.parallel(hot)
        inference = self.static(layers.Inference(self.network))
        self.entries = (hot, inference, self.eager)
        self.loss_and_output, self.infer = self.with_autocast(hot), self.with_autocast(inference)
        self.new_optimizer()

    def static(self, layer):
        """The layer through to_static, where the run compiles. full_graph: an op that it can not take is an error, not a break."""
        if self.compile == "off":
            return layer
        return paddle.jit.to_static(layer, full_graph=True, backend="CINN" if self.compile == "max" else None)

    def with_autocast(self, call):
        if self.half is None:
            return call

        def under_autocast(*arguments):
            with paddle.amp.auto_cast(level="O1", dtype=self.half):
                return call(*arguments)

        return under_autocast

    def new_optimizer(self):
        """As it is before the first step. Paddle's form is the spec's: clipping, then decay, then momentum.

        Decay is each parameter's own, in one list: of several groups, each would be clipped by its own norm.
        """
        wanted = self.run["optimizer"]
        if wanted["name"] != "sgd":
            raise Unsupported("paddle: this adapter has no mapping for optimizer %s" % wanted["name"])
        parameters = []
        for parameter in self.trained_parameters():
            tensor = self.slots[parameter["name"]].tensor
            decay = wanted["weight_decay"] if parameter["decay"] else 0.0
            tensor.regularizer = paddle.regularizer.L2Decay(decay) if decay else None
            parameters.append(tensor)
        rate, norm = wanted["learning_rate"], wanted["clip_norm"]
        clip = None if norm is None else paddle.nn.ClipGradByGlobalNorm(norm)
        if wanted["momentum"]:
            self.optimizer = paddle.optimizer.Momentum(rate, wanted["momentum"], parameters, grad_clip=clip, use_multi_tensor=True)
        else:
            self.optimizer = paddle.optimizer.SGD(rate, parameters, grad_clip=clip)
        self.scaler = paddle.amp.GradScaler() if self.run["precision"] == "fp16" else None

    def load(self, arrays):
        if set(arrays) != set(self.slots):
            raise ValueError("paddle: load needs exactly these arrays, wrong: %s" % sorted(set(arrays) ^ set(self.slots)))
        for name, slot in self.slots.items():
            array = slot.canonical(arrays[name])
            if list(array.shape) != list(slot.tensor.shape):
                raise ValueError("paddle: %s has shape %s, not %s" % (name, slot.tensor.shape, list(array.shape)))
            slot.tensor.set_value(array)
        self.optimizer.clear_grad(set_to_zero=False)
        self.new_optimizer()
        # the same dropout masks after every load
        paddle.seed(self.run["seed"])

    def read(self):
        return {name: slot.read() for name, slot in self.slots.items()}

    # -- one batch ---------------------------------------------------------------------------------------------------------
    def to_device(self, inputs, targets):
        kind = self.spec["target"]["kind"]
        inputs = paddle.to_tensor(inputs)
        return inputs, inputs if targets is None or kind in ("input", "op") else paddle.to_tensor(targets)

    def step(self, batch):
        handles = self.backward(batch)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return handles

    def gradient(self, batch):
        return self.backward(batch)

    def backward(self, batch):
        """Forward and backward; gradients are those of this batch alone."""
        inputs, targets = batch
        self.mode(True)
        self.optimizer.clear_grad(set_to_zero=False)
        for tensor in self.unused:
            tensor.clear_gradient(False)
        loss, output = self.loss_and_output(inputs, targets)
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
        return loss.detach(), self.correct(output, targets) if self.with_accuracy else None

    def mode(self, training):
        if self.network.training != training:
            for layer in self.entries:
                layer.train() if training else layer.eval()

    def correct(self, output, targets):
        """Number of correct answers, on the device."""
        if not self.classes:
            return paddle.zeros([])
        with paddle.no_grad():
            return paddle.sum(paddle.argmax(output, axis=-1) == targets)

    def forward(self, batch):
        self.mode(False)
        with paddle.no_grad():
            return self.infer(batch[0]), None

    def sync(self):
        # on the CPU nothing is queued
        if self.gpu:
            paddle.device.synchronize(self.device)

    def meet(self):
        if self.distributed:
            ranks.meet()

    def value(self, handle):
        return float(handle.item(0))

    def probe(self):
        return self.value(self.probed) if self.probed is not None else 0.0

    def evaluate(self, batch):
        inputs, targets = batch
        self.mode(False)
        with paddle.no_grad():
            loss, output = self.with_autocast(self.eager)(inputs, targets)
            return self.value(loss), int(self.correct(output, targets))

    # -- for the ladder -------------------------------------------------------------------------------------------------------
    def output(self, batch, training):
        self.mode(training)
        with paddle.no_grad(), self.states_kept():
            return self.with_autocast(self.eager)(*batch)[1].astype("float32").numpy()

    def gradients(self, batch):
        # without loss scaling: its first scales are meant to overflow
        scaler, self.scaler = self.scaler, None
        with self.states_kept():
            self.backward(batch)
        self.scaler = scaler
        slots = {p["name"]: self.slots[p["name"]] for p in self.trained_parameters()}
        # a parameter that the loss does not depend on has no gradient
        found = {name: slot.tensor.grad if slot.tensor.grad is not None else paddle.zeros_like(slot.tensor) for name, slot in slots.items()}
        return {name: slots[name].canonical(gradient.numpy()) for name, gradient in found.items()}

    @contextlib.contextmanager
    def states_kept(self):
        """Running statistics as they were before."""
        states = [self.slots[state["name"]].tensor for state in self.spec["states"]]
        before = [state.clone() for state in states]
        yield
        for state, value in zip(states, before):
            state.set_value(value)

    # -- facts ------------------------------------------------------------------------------------------------------------------
    def peak_memory_mb(self):
        return paddle.device.cuda.max_memory_allocated(self.device) / 1e6 if self.gpu else None

    def effective(self):
        found = {
            "device": paddle.device.cuda.get_device_name(self.local_rank) if self.gpu else paddle.get_device(),
            "threads": int(os.environ["OMP_NUM_THREADS"]),
            "precision": self.run["precision"] if self.half is not None else "fp32",
            "deterministic": self.gpu and bool(flag("FLAGS_cudnn_deterministic")),
            "memory_format": "contiguous",
            "compile": self.compile if layers.is_static(self.static_layer) else "off",
            "autotune": self.gpu and bool(flag("FLAGS_cudnn_exhaustive_search")),
            "onednn": bool(flag("FLAGS_use_onednn")),
            "trace_run": bool(flag("FLAGS_enable_pir_in_executor_trace_run")),
        }
        omp, mkl = own_library("libiomp5.so"), own_library("libmklml_intel.so")
        if omp is not None:
            found["threads"] = omp.omp_get_max_threads()
        if mkl is not None:
            # 0 is MKL's slowest code, 4 that of AVX, 5 of AVX2, 6 of AVX-512; and what it was told to take
            found["mkl_cpu_type"] = mkl.mkl_serv_cpu_detect()
            found["mkl_debug_cpu_type"] = os.environ.get("MKL_DEBUG_CPU_TYPE", "")
            if not self.gpu:
                found["deterministic"] = mkl.mkl_serv_cbwr_get(1) != 1  # MKL_CBWR_BRANCH, MKL_CBWR_BRANCH_OFF
        if self.gpu:
            core = paddle.base.core
            found["tf32_matmul"], found["tf32_cudnn"] = core.get_cublas_switch(), core.get_cudnn_switch()
            if found["tf32_matmul"] and found["tf32_cudnn"] and self.half is None:
                found["precision"] = "tf32"
        return found

    def is_oom(self, error):
        """Paddle raises a MemoryError when GPU or host memory is not enough; in a wrapped one the words are left."""
        words = str(error)
        return isinstance(error, MemoryError) or "ResourceExhausted" in words or "Out of memory error on GPU" in words

    def close(self):
        if self.distributed:
            ranks.leave()


def own_library(name):
    """One of the shared libraries in Paddle's package, the same one that Paddle loads; None where it has none of this name."""
    path = os.path.join(os.path.dirname(paddle.__file__), "libs", name)
    return ctypes.CDLL(path) if os.path.exists(path) else None


def flag(name):
    """The value of one of Paddle's flags; None where this build has none of this name."""
    flags = paddle.base.core.globals()
    return flags[name] if name in flags.keys() else None


def amd_with_avx2():
    """True on a CPU of AMD that has AVX2, by /proc/cpuinfo."""
    try:
        with open("/proc/cpuinfo") as source:
            first = source.read().split("\n\n")[0]
    except (IOError, OSError):
        return False
    return "AuthenticAMD" in first and " avx2 " in first
