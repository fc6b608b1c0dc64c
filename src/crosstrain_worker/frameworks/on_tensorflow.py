"""TensorFlow 2, with tf.function and a loop of its own. The layers are in `tensorflow_layers`, the steps in `tensorflow_steps`."""

import json
import os
import platform

import numpy

from crosstrain_worker import machines

from . import with_horovod
from .base import Base, Unsupported

# Set by load_library: importing TensorFlow is timed, and reads the environment.
tf = None
layers = None
steps = None
tf_config = None
hvd = None

HALF = {"bf16": "bfloat16", "fp16": "float16"}


class Framework(Base):
    """All replicas of a machine in one rank: MirroredStrategy over CPU:0, CPU:1, … (logical devices) or the GPUs that are visible,
    MultiWorkerMirroredStrategy on several machines. With Horovod (TensorFlow 2.15 at most) one in each rank.

    compile: off = eager, on = tf.function, max = tf.function with XLA (jit_compile). A batch is (inputs, targets): tensors, or
    PerReplica values of the replicas' shares. A handle is (tensors of the replicas, divisor): its value is their sum over the divisor.
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
        #: several machines natively
        self.wide = machines.nodes(run) > 1 and not self.horovod
        self.distributed = self.horovod and run["world_size"] > 1
        #: what the last call gave, on several machines
        self.pending = ()
        self.declare_own_statistics()

    # -- before anything is built -------------------------------------------------------------------------------------
    def load_library(self):
        global tf, layers, steps, tf_config, hvd
        # warnings and errors only
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
        os.environ["TF_CUDNN_USE_AUTOTUNE"] = "1" if self.settings.get("autotune") else "0"
        import tensorflow as library
        from tensorflow.python.framework import config

        from . import tensorflow_layers, tensorflow_steps

        tf, layers, steps, tf_config = library, tensorflow_layers, tensorflow_steps, config
        if self.distributed:
            import horovod.tensorflow as hvd

    def versions(self):
        found = {
            "framework": tf.__version__,
            "python": platform.python_version(),
            "numpy": numpy.__version__,
            "onednn": "on" if onednn() else "off",
        }
        if self.horovod:
            found["horovod"] = with_horovod.version()
        build = tf.sysconfig.get_build_info()
        for key, name in (("cuda", "cuda_version"), ("cudnn", "cudnn_version")):
            if build.get(name):
                found[key] = str(build[name])
        return found

    def check(self):
        Base.check(self)
        if self.compile == "max" and self.run["replicas"] > 1:
            raise Unsupported(
                "tensorflow: XLA (framework.compile=max) can not compile a step that reduces gradients over several replicas",
                "framework.compile=on",
            )
        if self.wide and self.replicas > 1 and not self.gpu:
            raise Unsupported(
                "tensorflow: MultiWorkerMirroredStrategy has one replica on the CPU of each machine, asked for %d" % self.replicas,
                "replicas=%d" % machines.nodes(self.run),
            )
        if self.distributed:
            with_horovod.check(hvd, self.run["device"])
        if self.gpu:
            self.check_gpu()
        elif not onednn():
            self.check_plain_cpu()

    def check_plain_cpu(self):
        """Found by experiment (2.21): what TensorFlow's own CPU kernels, without oneDNN, have no gradient for."""
        nchw = self.settings.get("memory_format", "contiguous") == "contiguous"
        for op in self.spec["ops"]:
            if op["op"] == "conv2d" and (nchw or op["groups"] > 1 or op["dilation"] != [1, 1]):
                what = "groups" if op["groups"] > 1 else "dilation" if op["dilation"] != [1, 1] else "NCHW"
                raise Unsupported(
                    "tensorflow: conv2d %s has %s, which on the CPU only oneDNN can train, and it is off here" % (op["name"], what),
                    "+framework.env.TF_ENABLE_ONEDNN_OPTS=1" + (", or framework.memory_format=channels_last" if what == "NCHW" else ""),
                )

    def check_gpu(self):
        version = tf.__version__
        if not tf.test.is_built_with_cuda():
            raise Unsupported("this build of TensorFlow (%s) has no CUDA" % version, "install tensorflow[and-cuda], or device=cpu")
        gpus = tf.config.list_physical_devices("GPU")
        if len(gpus) < self.here:
            raise Unsupported("TensorFlow %s sees %d GPUs, not %d" % (version, len(gpus), self.here), "device=cpu")
        capability = tf.config.experimental.get_device_details(gpus[0]).get("compute_capability")
        if capability and capability[0] < 8 and self.run["precision"] in ("tf32", "bf16"):
            raise Unsupported(
                "precision=%s needs compute capability 8.0 or newer, this GPU has %d.%d" % ((self.run["precision"],) + capability)
            )

    # -- set up ----------------------------------------------------------------------------------------------------------
    def setup(self):
        self.set_devices()
        tf.config.experimental.enable_tensor_float_32_execution(self.run["precision"] == "tf32")
        if self.settings.get("deterministic"):
            tf.config.experimental.enable_op_determinism()
        elif tf_config.is_op_determinism_enabled():
            tf_config.disable_op_determinism()
        self.half = getattr(tf, HALF[self.run["precision"]]) if self.run["precision"] in HALF else None
        if self.wide:
            self.join()  # before it does anything
        if self.gpu:
            # else it makes another memory format out of the one that was asked for
            tf.config.optimizer.set_experimental_options({"layout_optimizer": False})
            for device in self.devices:
                tf.config.experimental.reset_memory_stats(device)
        # On GPUs its own choice (NCCL). Between the CPU devices of one process nothing has to be copied; collectives do, and they fail
        # when a process makes a second strategy (found by experiment, 2.21).
        reduction = None if self.gpu else tf.distribute.ReductionToOneDevice()
        if not self.wide:
            self.strategy = tf.distribute.MirroredStrategy(self.devices, reduction) if self.replicas > 1 else None
        if self.distributed:
            with_horovod.join(hvd, self.run, self.rank, self.share)

    def join(self):
        """Meet the ranks of the other machines; waits for them."""
        cluster = {"worker": machines.addresses(self.run, self.rank)}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": self.rank}})
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def set_devices(self):
        """Threads and devices: they can be set once in a process, before TensorFlow does anything. `effective` tells what came of it."""
        kind = "GPU" if self.gpu else "CPU"
        self.devices = ["%s:%d" % (kind, i) for i in range(self.replicas)]
        try:
            # One pool for the work inside kernels, which all CPU devices share, and a thread that starts kernels for each replica.
            tf.config.threading.set_intra_op_parallelism_threads(self.run["threads"] * self.replicas)
            tf.config.threading.set_inter_op_parallelism_threads(self.replicas)
            if self.gpu:
                gpus = tf.config.list_physical_devices("GPU")
                first = self.local_rank if self.distributed else 0
                tf.config.set_visible_devices(gpus[first : first + self.replicas], "GPU")
                for device in gpus:
                    tf.config.experimental.set_memory_growth(device, True)
            else:
                tf.config.set_visible_devices([], "GPU")
                logical = [tf.config.LogicalDeviceConfiguration() for _ in self.devices]
                tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], logical)
        except RuntimeError:
            if len(tf.config.list_logical_devices(kind)) < self.replicas:
                raise

    def build(self):
        last = self.settings.get("memory_format", "contiguous") == "channels_last"
        self.image_format = "NHWC" if last else "NCHW"
        with self.scope():
            self.network = layers.Network(self.spec, self.image_format, self.half, self.gpu, self.compile)
            self.steps = steps.Steps(self.run, self.network, self.trained_parameters(), self.strategy, hvd if self.distributed else None)
        self.slots = self.network.slots
        self.build_calls()

    def scope(self):
        """Where variables are made."""
        return self.strategy.scope() if self.strategy else tf.device("/%s:0" % ("GPU" if self.gpu else "CPU"))

    def build_calls(self):
        """What the loop calls, compiled as asked for. A function is traced when first called, and again for another batch size.

        With XLA only what is timed is compiled by it: the rest would cost minutes.
        """
        xla, made = self.compile == "max", self.steps
        self.calls = {
            "step": self.compiled(lambda x, y: made.train(x, y, False), xla),
            "step counting": self.compiled(lambda x, y: made.train(x, y, True), xla),
            "gradient": self.compiled(lambda x, y: made.gradient(x, y, False), xla),
            "gradient counting": self.compiled(lambda x, y: made.gradient(x, y, True), xla),
            "infer": self.compiled(made.infer, xla),
            "gradients": self.compiled(made.gradients),
            "output": self.compiled(made.output),
            "evaluate": self.compiled(made.sums),
            "evaluate alone": made.sums if self.compile == "off" else tf.function(made.sums, autograph=False),
        }

    def compiled(self, call, jit=False):
        strategy = self.strategy
        whole = call if strategy is None else (lambda *arguments: strategy.run(call, arguments))
        return whole if self.compile == "off" else tf.function(whole, autograph=False, jit_compile=jit)

    def load(self, arrays):
        if set(arrays) != set(self.slots):
            raise ValueError("tensorflow: load needs exactly these arrays, wrong: %s" % sorted(set(arrays) ^ set(self.slots)))
        for name, slot in self.slots.items():
            array = slot.native(arrays[name])
            if array.shape != tuple(slot.variable.shape):
                raise ValueError("tensorflow: %s has shape %s" % (name, tuple(arrays[name].shape)))
            slot.variable.assign(array)
        # also the seed of dropout: the same masks after every load
        self.steps.forget()

    def read(self):
        return self.read_replica(0)

    def read_replicas(self):
        return [self.read_replica(i) for i in range(self.replicas)]

    def read_replica(self, index):
        return {
            name: numpy.ascontiguousarray(slot.canonical(self.local(slot.variable)[index].numpy())) for name, slot in self.slots.items()
        }

    def local(self, value):
        """The replicas' parts of what may be one value or one of each."""
        return (value,) if self.strategy is None else self.strategy.experimental_local_results(value)

    # -- one batch ---------------------------------------------------------------------------------------------------------
    def to_device(self, inputs, targets):
        """On the CPU tensors may share the arrays' memory: do not write into the arrays before the step is done."""
        own = targets is None or self.spec["target"]["kind"] in ("input", "op")
        inputs = self.shared_out(inputs)
        return inputs, inputs if own else self.shared_out(targets)

    def shared_out(self, array):
        """Each replica's part on its device. The last batch of a test set may be too small for that: then the first has it all."""
        if self.strategy is None or len(array) < self.replicas:
            return self.tensor(array, self.devices[0])
        parts = numpy.array_split(array, self.replicas)

        def part(context):
            index = context.replica_id_in_sync_group % self.replicas
            return self.tensor(parts[index], self.devices[index])

        return self.strategy.experimental_distribute_values_from_function(part)

    def tensor(self, array, device):
        with tf.device(device):
            # a copy only where the device is another one
            return tf.identity(self.network.native(array) if array.ndim == 4 else tf.convert_to_tensor(array))

    def step(self, batch):
        counting = self.with_accuracy
        loss, correct = self.calls["step counting" if counting else "step"](*batch)
        if self.wide:
            self.pending = (loss, self.steps.count)
        return (self.local(loss), self.replicas), (self.local(correct), 1) if counting else None

    def gradient(self, batch):
        counting = self.with_accuracy
        loss, correct, gradients = self.calls["gradient counting" if counting else "gradient"](*batch)
        if self.wide:
            self.pending = (loss, *gradients)
        return (self.local(loss), self.replicas), (self.local(correct), 1) if counting else None

    def forward(self, batch):
        output = self.calls["infer"](batch[0])
        if self.wide:
            self.pending = (output,)
        return (self.local(output)[:1], 1), None

    def sync(self):
        if not self.wide:
            tf.test.experimental.sync_devices()
            return
        # which TensorFlow refuses in a cluster: read back what came of the last call
        for value in self.pending:
            for part in self.local(value):
                first_element(part)

    def meet(self):
        if self.distributed:
            hvd.allreduce(tf.zeros(1), name="meet").numpy()
        elif self.wide:
            self.strategy.reduce("SUM", self.strategy.run(tf.zeros, [1]), axis=None)

    def value(self, handle):
        tensors, divisor = handle
        return sum(first_element(tensor) for tensor in tensors) / divisor

    def probe(self):
        trained = self.steps.trained
        return sum(first_element(part) for part in self.local(trained[-1])) if trained else 0.0

    def evaluate(self, batch):
        if isinstance(batch[0], tf.Tensor) or self.spec["states"]:
            # of running statistics, those of the first replica
            parts = zip(self.local(batch[0]), self.local(batch[1]))
            found = [self.calls["evaluate alone"](*part) for part in parts]
        else:
            found = zip(*[self.local(value) for value in self.calls["evaluate"](*batch)])
        loss, count, correct = (sum(float(value) for value in values) for values in zip(*found))
        return loss / count, int(correct)

    # -- for the ladder -------------------------------------------------------------------------------------------------------
    def output(self, batch, training):
        found = self.local(self.calls["output" if training else "infer"](batch[0]))
        array = numpy.concatenate([part.numpy() for part in found])
        return numpy.ascontiguousarray(self.network.canonical(array) if array.ndim == 4 else array)

    def gradients(self, batch):
        found = {}
        for parameter, gradient in zip(self.trained_parameters(), self.calls["gradients"](*batch)):
            array = self.slots[parameter["name"]].canonical(self.local(gradient)[0].numpy())
            found[parameter["name"]] = numpy.ascontiguousarray(array)
        return found

    # -- facts ------------------------------------------------------------------------------------------------------------------
    def peak_memory_mb(self):
        if not self.gpu:
            return None
        return max(tf.config.experimental.get_memory_info(device)["peak"] for device in self.devices) / 1e6

    def effective(self):
        jit = getattr(self.calls["step"], "_jit_compile", None)
        graph = hasattr(self.calls["step"], "get_concrete_function")
        tf32 = self.gpu and self.half is None and tf.config.experimental.tensor_float_32_execution_enabled()
        return {
            "device": ", ".join(self.device_name(part.device) for part in self.local(self.steps.count)),
            "threads": tf.config.threading.get_intra_op_parallelism_threads() // self.replicas,
            "interop_threads": tf.config.threading.get_inter_op_parallelism_threads(),
            "precision": "tf32" if tf32 else "fp32" if self.half is None else self.run["precision"],
            "deterministic": tf_config.is_op_determinism_enabled(),
            "memory_format": "channels_last" if self.network.image_format == "NHWC" else "contiguous",
            "compile": "max" if jit else "on" if graph else "off",
            "autotune": self.gpu and os.environ["TF_CUDNN_USE_AUTOTUNE"] == "1",
            "onednn": onednn(),
        }

    def device_name(self, device):
        """CPU:0, or the GPU's own name; `device` is where a variable is."""
        kind, index = device.rsplit(":", 2)[-2:]
        if kind == "CPU":
            return "CPU:" + index
        return tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[int(index)])["device_name"]

    def is_oom(self, error):
        """TensorFlow's allocators, and XLA's, raise this for host and device memory; CUDA's libraries say it in words."""
        words = str(error)
        return isinstance(error, tf.errors.ResourceExhaustedError) or (
            isinstance(error, tf.errors.OpError) and ("CUDA_ERROR_OUT_OF_MEMORY" in words or "STATUS_ALLOC_FAILED" in words)
        )

    def close(self):
        if self.distributed:
            hvd.shutdown()


def onednn():
    """True when TensorFlow computes with oneDNN on this CPU; TF_ENABLE_ONEDNN_OPTS=0 turns it off."""
    from tensorflow.python.util import _pywrap_util_port

    return bool(_pywrap_util_port.IsMklEnabled())


def first_element(tensor):
    """A Python float. Waits for the tensor."""
    return float(tensor[(0,) * tensor.shape.rank] if tensor.shape.rank else tensor)
