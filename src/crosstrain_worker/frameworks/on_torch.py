"""PyTorch, 2.9 and newer. The layers are in `torch_layers`."""

import contextlib
import functools
import importlib.util
import os
import platform
import re
import shutil

import numpy

from . import with_horovod
from .base import Base, Unsupported

# Set by load_library: importing PyTorch is timed.
torch = None
layers = None
ranks = None

HALF = {"bf16": "bfloat16", "fp16": "float16"}


class Framework(Base):
    """One replica in each rank, on the CPU or on cuda:<local rank> (CUDA_VISIBLE_DEVICES is set by the launcher).

    `torch_ranks` and `torch_horovod` hold how several ranks reduce their gradients.
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
    precisions = {"cpu": ("fp32", "bf16"), "gpu": ("fp32", "tf32", "bf16", "fp16")}
    compile_modes = ("off", "on", "max")
    memory_formats = ("contiguous", "channels_last")
    max_replicas = 1024
    several_machines = True
    frozen_parameters = True

    def __init__(self, run):
        Base.__init__(self, run)
        self.gpu = run["device"] == "gpu"
        self.settings = run["framework"]
        self.compile = self.settings.get("compile", "off")
        self.deviations = {}
        for op in self.spec["ops"]:
            if op["op"] == "batch_norm" and op["variance"] != "unbiased":
                self.deviations[op["name"]] = "running variance is unbiased, the spec's is %s" % op["variance"]
            if op["op"] == "lstm":
                self.deviations[op["name"]] = "has a second bias (bias_hh): 0, frozen, not counted"
        self.declare_own_statistics()
        self.distributed = run["world_size"] > 1

    # -- before anything is built -------------------------------------------------------------------------------------
    def load_library(self):
        global torch, layers, ranks
        if self.settings.get("deterministic"):
            # cuBLAS reads this when its first handle is made
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        import torch as library

        from . import torch_layers

        torch, layers = library, torch_layers
        if self.distributed and self.horovod:
            from . import torch_horovod as ranks
        elif self.distributed:
            from . import torch_ranks as ranks

    def versions(self):
        found = {"framework": torch.__version__, "python": platform.python_version(), "numpy": numpy.__version__}
        if torch.version.cuda:
            found["cuda"] = torch.version.cuda
        if torch.backends.cudnn.is_available():
            found["cudnn"] = str(torch.backends.cudnn.version())
        if self.horovod:
            found["horovod"] = with_horovod.version()
        build = torch.__config__.show()
        patterns = (("mkl", r"Math Kernel Library Version (\S+)"), ("onednn", r"MKL-DNN v(\S+)"), ("blas", r"BLAS_INFO=(\w+)"))
        for key, pattern in patterns:
            match = re.search(pattern, build)
            if match:
                found[key] = match.group(1)
        return found

    def check(self):
        Base.check(self)
        if self.gpu:
            self.check_gpu()
        if self.distributed:
            ranks.check(self.run)
        if self.compile != "off":
            # torch.compile generates C++ for the CPU and Triton for the GPU
            compiler = os.environ.get("CXX", "g++")
            if not self.gpu and shutil.which(compiler) is None:
                raise Unsupported(
                    "torch.compile needs a C++ compiler on the CPU, %s is not there" % compiler, "install g++ or set CXX"
                )
            if self.gpu and importlib.util.find_spec("triton") is None:
                raise Unsupported("torch.compile needs Triton on the GPU, it is not in this environment", "install triton")

    def check_gpu(self):
        version = torch.__version__
        if not torch.backends.cuda.is_built():
            raise Unsupported("this build of PyTorch (%s) has no CUDA" % version, "install the CUDA build, or device=cpu")
        if torch.cuda.device_count() <= self.local_rank:
            which = " %d" % self.local_rank if torch.cuda.device_count() else ""
            raise Unsupported(
                "PyTorch %s (CUDA %s) sees no GPU%s: the driver is missing or too old" % (version, torch.version.cuda, which)
            )
        capability = torch.cuda.get_device_capability(self.local_rank)
        architectures = torch.cuda.get_arch_list()
        if not has_code(architectures, capability):
            raise Unsupported(
                "PyTorch %s has no code for compute capability %d.%d (it has %s)"
                % ((version,) + capability + (" ".join(architectures),)),
                "another version of PyTorch, or device=cpu",
            )
        if capability[0] < 8 and self.run["precision"] in ("tf32", "bf16"):
            raise Unsupported(
                "precision=%s needs compute capability 8.0 or newer, this GPU has %d.%d" % ((self.run["precision"],) + capability)
            )

    # -- set up ----------------------------------------------------------------------------------------------------------
    def setup(self):
        torch.set_num_threads(self.run["threads"])
        if torch.get_num_interop_threads() != 1:  # can be set once in a process
            torch.set_num_interop_threads(1)
        self.device = torch.device("cuda:%d" % self.local_rank if self.gpu else "cpu")
        tf32 = self.run["precision"] == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = bool(self.settings.get("autotune")) and self.gpu
        torch.use_deterministic_algorithms(bool(self.settings.get("deterministic")))
        self.half = getattr(torch, HALF[self.run["precision"]]) if self.run["precision"] in HALF else None
        if self.gpu:
            torch.cuda.set_device(self.device)
            torch.cuda.reset_peak_memory_stats()
        if self.distributed:
            ranks.join(self.run, self.rank, self.device, self.share)

    def build(self):
        with torch.device(self.device):
            self.network, with_target, slots = layers.build(self.spec, bool(self.settings.get("space_to_depth")))
            loss = layers.build_loss(self.spec)
        self.channels_last = self.settings.get("memory_format", "contiguous") == "channels_last"
        if self.channels_last:
            self.network.to(memory_format=torch.channels_last)
        self.tensors = {name: getattr(module, attribute) for name, (module, attribute) in slots.items()}
        names = [parameter["name"] for parameter in self.trained_parameters()]
        for name, tensor in self.tensors.items():
            tensor.requires_grad_(name in names)
        self.probed = self.tensors[names[-1]] if names else None
        self.trained = layers.Trained(self.network, loss, with_target)
        self.image = self.spec["input"]["kind"] == "image"
        self.classes = self.spec["loss"]["op"] == "softmax_cross_entropy"
        self.build_optimizer()
        # What the hot path calls. Evaluation stays eager: it is not timed, and compiling it again would cost minutes.
        compiled = self.compiled if self.compile != "off" else (lambda module: module)
        trained = self.trained
        if self.distributed:
            trained = ranks.parallel(trained, self.device, self.compile != "off")
        self.loss_and_output = self.with_autocast(compiled(trained))
        self.infer = self.with_autocast(compiled(self.network))
        # CUDA graphs (mode max-autotune) reuse the memory of what they return
        self.copy_outputs = self.compile == "max" and self.gpu

    def compiled(self, module):
        return torch.compile(module, dynamic=False, mode="max-autotune" if self.compile == "max" else None)

    def with_autocast(self, call):
        if self.half is None:
            return call

        def under_autocast(*arguments):
            with torch.autocast(self.device.type, self.half):
                return call(*arguments)

        return under_autocast

    def build_optimizer(self):
        wanted = self.run["optimizer"]
        if wanted["name"] != "sgd":
            raise Unsupported("torch: this adapter has no mapping for optimizer %s" % wanted["name"])
        decayed = [self.tensors[p["name"]] for p in self.trained_parameters() if p["decay"]]
        others = [self.tensors[p["name"]] for p in self.trained_parameters() if not p["decay"]]
        self.parameters = decayed + others
        groups = [{"params": decayed, "weight_decay": wanted["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.SGD(
            [group for group in groups if group["params"]],
            lr=wanted["learning_rate"],
            momentum=wanted["momentum"],
            fused=True if self.gpu else None,
        )
        self.stepping = contextlib.nullcontext
        if self.distributed:
            named = [(p["name"], self.tensors[p["name"]]) for p in self.trained_parameters()]
            self.optimizer = ranks.optimizer(self.optimizer, named)
            self.stepping = functools.partial(ranks.stepping, self.optimizer)
        self.clip_norm = wanted["clip_norm"]
        self.forget()

    def forget(self):
        """The optimiser's state as it is before the first step; for fp16 also that of the loss scaling."""
        self.optimizer.state.clear()
        self.scaler = None
        if self.run["precision"] == "fp16":
            self.scaler = torch.amp.GradScaler("cuda")
            # When the scaler skips the first step (usual: it tries a large scale first), fused SGD leaves the momentum
            # buffers that it has just allocated unwritten, and reads them in the second: write the zeros here.
            for parameter in self.parameters if self.run["optimizer"]["momentum"] else ():
                self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def load(self, arrays):
        if set(arrays) != set(self.tensors):
            raise ValueError("torch: load needs exactly these arrays, wrong: %s" % sorted(set(arrays) ^ set(self.tensors)))
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                array = arrays[name]
                if tuple(array.shape) != tuple(tensor.shape):
                    raise ValueError("torch: %s has shape %s, not %s" % (name, tuple(tensor.shape), tuple(array.shape)))
                tensor.copy_(torch.from_numpy(writable(array)))
        self.optimizer.zero_grad()
        self.forget()
        # the same dropout masks after every load
        torch.manual_seed(self.run["seed"])

    def read(self):
        return {name: to_numpy(tensor) for name, tensor in self.tensors.items()}

    # -- one batch ---------------------------------------------------------------------------------------------------------
    def to_device(self, inputs, targets):
        """On the CPU the tensors share the arrays' memory: do not write into the arrays before the step is done."""
        inputs = torch.from_numpy(writable(inputs))
        if self.gpu:
            inputs = inputs.pin_memory().to(self.device, non_blocking=True)
        if self.channels_last and self.image:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        if targets is None or self.spec["target"]["kind"] in ("input", "op"):
            targets = inputs
        else:
            targets = torch.from_numpy(writable(targets))
            if self.gpu:
                targets = targets.pin_memory().to(self.device, non_blocking=True)
        return inputs, targets

    def step(self, batch):
        loss, correct = self.backward(batch)
        scaler = self.scaler
        if self.clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        with self.stepping():
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
                scaler.update()
        return loss, correct

    def gradient(self, batch):
        return self.backward(batch)

    def backward(self, batch):
        """Forward and backward; gradients are those of this batch alone."""
        inputs, targets = batch
        if not self.network.training:
            self.trained.train()
        self.optimizer.zero_grad()
        loss, output = self.loss_and_output(inputs, targets)
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
        if self.distributed:
            ranks.reduced(self.optimizer)
        loss = loss.detach()
        if self.copy_outputs:
            loss = loss.clone()
        return loss, self.correct(output, targets) if self.with_accuracy else None

    def correct(self, output, targets):
        """Number of correct answers, on the device."""
        if not self.classes:
            return torch.zeros((), device=self.device)
        with torch.no_grad():
            return (output.argmax(-1) == targets).sum()

    def forward(self, batch):
        if self.network.training:
            self.trained.eval()
        with torch.inference_mode():
            output = self.infer(batch[0])
            return output.clone() if self.copy_outputs else output, None

    def sync(self):
        # on the CPU nothing is queued
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def meet(self):
        if self.distributed:
            ranks.meet()

    def value(self, handle):
        return float(handle if handle.dim() == 0 else handle[(0,) * handle.dim()])

    def probe(self):
        return self.value(self.probed.detach()) if self.probed is not None else 0.0

    def evaluate(self, batch):
        inputs, targets = batch
        self.trained.eval()
        with torch.inference_mode():
            loss, output = self.with_autocast(self.trained)(inputs, targets)
            return float(loss), int(self.correct(output, targets))

    # -- for the ladder -------------------------------------------------------------------------------------------------------
    def output(self, batch, training):
        self.trained.train(training)
        with torch.no_grad(), self.states_kept():
            return to_numpy(self.with_autocast(self.network)(batch[0]))

    def gradients(self, batch):
        # without loss scaling: its first scales are meant to overflow
        scaler, self.scaler = self.scaler, None
        with self.states_kept():
            self.backward(batch)
        self.scaler = scaler
        grads = {p["name"]: self.tensors[p["name"]].grad for p in self.trained_parameters()}
        # a parameter that the loss does not depend on has no gradient tensor
        return {name: to_numpy(torch.zeros_like(self.tensors[name]) if grad is None else grad) for name, grad in grads.items()}

    def executed_flops(self, batch):
        if self.compile != "off" or self.settings.get("space_to_depth"):
            return None  # PyTorch's counter does not see into compiled kernels; the other does more than the spec's, on purpose
        from . import torch_flops

        return torch_flops.count(lambda: self.step(batch))

    @contextlib.contextmanager
    def states_kept(self):
        """Running statistics as they were before."""
        states = [self.tensors[state["name"]] for state in self.spec["states"]]
        before = [state.clone() for state in states]
        yield
        with torch.no_grad():
            for state, value in zip(states, before):
                state.copy_(value)

    # -- facts ------------------------------------------------------------------------------------------------------------------
    def peak_memory_mb(self):
        return torch.cuda.max_memory_allocated(self.device) / 1e6 if self.gpu else None

    def effective(self):
        images = [t for t in self.network.parameters() if t.dim() == 4]
        last = bool(images) and all(t.is_contiguous(memory_format=torch.channels_last) for t in images)
        contiguous = all(t.is_contiguous() for t in images)
        found = {
            "device": torch.cuda.get_device_name(self.device) if self.gpu else "cpu",
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
            "precision": "fp32" if self.half is None else self.run["precision"],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            # 1×1 kernels are both at once: the one that was asked for counts
            "memory_format": "channels_last" if last and (self.channels_last or not contiguous) else "contiguous",
            "compile": self.compile,
            "autotune": torch.backends.cudnn.benchmark,
            "mkldnn": torch.backends.mkldnn.is_available() and getattr(torch.backends.mkldnn, "enabled", True),
        }
        if self.settings.get("space_to_depth"):
            found["space_to_depth"] = any(isinstance(module, layers.SpaceToDepthConv2d) for module in self.network.modules())
        if self.gpu:
            found["tf32_matmul"] = torch.backends.cuda.matmul.allow_tf32
            found["tf32_cudnn"] = torch.backends.cudnn.allow_tf32
            if found["tf32_matmul"] and found["tf32_cudnn"] and self.half is None:
                found["precision"] = "tf32"
        return found

    def is_oom(self, error):
        """On the CPU PyTorch's allocator says it in words."""
        words = str(error)
        return (
            isinstance(error, torch.OutOfMemoryError)
            or "CUDA out of memory" in words
            or "CUBLAS_STATUS_ALLOC_FAILED" in words
            or "DefaultCPUAllocator" in words
        )

    def close(self):
        if self.distributed:
            ranks.leave()


def has_code(architectures, capability):
    """True when a build for `architectures` (sm_80, compute_90, …) runs on a GPU of this compute capability (major, minor).

    Machine code (sm) runs on the same major and an equal or higher minor, PTX (compute) on anything equal or newer
    (CUDA C++ Programming Guide, "Binary compatibility"); an `a` at the end means this very one.
    """
    for name in architectures:
        match = re.match(r"(sm|compute)_(\d+)(\d)([af]?)$", name)
        if not match:
            continue
        kind, built = match.group(1), (int(match.group(2)), int(match.group(3)))
        if match.group(4) == "a":
            fits = built == capability
        else:
            fits = built <= capability and (kind == "compute" or built[0] == capability[0])
        if fits:
            return True
    return False


def writable(array):
    """The array itself where it is contiguous and writable (torch.from_numpy wants both), else a copy."""
    return numpy.require(array, requirements=["C", "W"])


def to_numpy(tensor):
    """A float32 copy in the canonical layout."""
    return tensor.detach().to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format).numpy()
