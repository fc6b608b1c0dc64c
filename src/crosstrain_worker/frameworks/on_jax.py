"""JAX with Flax and Optax, 0.11 and newer. The layers are in `jax_layers`, the functions of an iteration in `jax_steps`."""

import functools
import os
import platform

import numpy

from crosstrain_worker import machines

from . import jax_process
from .base import Base, Unsupported

# Set by load_library: importing JAX is timed, and reads the environment.
jax = None
layers = None
steps = None
optax = None

#: jax_default_matmul_precision, which convolutions follow, too; with half precisions nothing is computed from float32
MATMUL_PRECISION = {"fp32": "highest", "tf32": "tensorfloat32", "bf16": None, "fp16": None}
#: precision → the type in which the network computes; parameters, statistics and momentum are float32 always
HALF = {"bf16": "bfloat16", "fp16": "float16"}
#: seconds until a rank that waits for the others gives up: the driver has the time limits
FOREVER_S = 86400


class Framework(Base):
    """All replicas of a machine in one rank: a mesh of the CPU devices or GPUs of all machines with one axis, `replicas`.

    Parameters lie whole on every device, batches are split along their first axis. Several replicas: the step is mapped over them
    (shard_map) with the mean of their gradients in it, and XLA makes one program of it all. States then have a first axis of replicas:
    batch norm's statistics are each replica's own. (Left to jit alone they would be those of the global batch, at the price of two
    reductions for every batch norm.)
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
    compile_modes = ("off", "on")
    memory_formats = ("channels_last",)
    max_replicas = 1024
    replicas_per_rank = "all"
    several_machines = True
    frozen_parameters = True

    def __init__(self, run):
        Base.__init__(self, run)
        self.gpu = run["device"] == "gpu"
        self.settings = run["framework"]
        self.compile = self.settings.get("compile", "off")
        self.replicas = run["replicas"]
        self.nodes = machines.nodes(run)
        #: replicas of this machine
        self.here = self.replicas // self.nodes
        for op in self.spec["ops"]:
            if op["op"] == "batch_norm" and op["variance"] != "biased":
                self.deviations[op["name"]] = "running variance is biased, the spec's is %s" % op["variance"]
        self.declare_own_statistics()

    # -- before anything is built -------------------------------------------------------------------------------------
    def load_library(self):
        global jax, layers, optax, steps
        if self.gpu:
            # memory as it is needed, not three quarters of the GPU at once
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
            if not self.settings.get("autotune"):
                jax_process.add_xla_flag("--xla_gpu_autotune_level=0")
            if self.settings.get("deterministic"):
                jax_process.add_xla_flag("--xla_gpu_deterministic_ops=true")
                # cuDNN's LSTM multiplies by cuBLAS, which reads this when its first handle is made
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        else:
            # The size of XLA's thread pools. Without it they are as large as the CPU affinity, which is not set for every run.
            os.environ["NPROC"] = str(self.run["threads"] * self.here)
        import jax as library
        import optax as optimizers

        from . import jax_layers, jax_steps

        jax, layers, optax, steps = library, jax_layers, optimizers, jax_steps

    def versions(self):
        import importlib.metadata  # here, since Python 3.6 has none and this file can be imported there

        found = {"framework": jax.__version__, "python": platform.python_version(), "numpy": numpy.__version__}
        wanted = {"jaxlib": "jaxlib", "flax": "flax", "optax": "optax"}
        if self.gpu:
            wanted.update({"cuda": "nvidia-cuda-runtime", "cudnn": "nvidia-cudnn-cu13", "nccl": "nvidia-nccl-cu13"})
        for key, distribution in wanted.items():
            try:
                found[key] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                pass  # a part of the system then
        return found

    def check(self):
        Base.check(self)
        if self.nodes > 1:
            self.join()  # before it looks for devices
        if self.gpu:
            self.check_gpu()
        try:
            self.uses_cudnn_lstm()
        except ValueError as error:
            raise Unsupported("jax: %s" % error, "framework.lstm=auto") from None

    def uses_cudnn_lstm(self):
        return layers.jax_lstm.uses_cudnn(self.settings.get("lstm", "auto"), self.gpu, self.run["precision"])

    def join(self):
        """Meet the ranks of the other machines; waits for them."""
        jax.distributed.initialize(
            "%s:%d" % (self.run["address"], self.share("rendezvous", machines.free_port)),
            num_processes=self.nodes,
            process_id=self.rank,
            local_device_ids=list(range(self.here)),
            initialization_timeout=FOREVER_S,
        )

    def check_gpu(self):
        import importlib.metadata

        plugins = [point.name for point in importlib.metadata.entry_points(group="jax_plugins")]
        if not any("cuda" in name for name in plugins):
            raise Unsupported("this installation of JAX (%s) has no CUDA" % jax.__version__, "install jax[cuda13], or device=cpu")
        # named, so that it does not fall back to the CPU
        jax.config.update("jax_platforms", "cuda")
        try:
            gpus = jax.devices()
        except RuntimeError as error:
            raise Unsupported("JAX %s sees no GPU: %s" % (jax.__version__, " ".join(str(error).split())[:300])) from None
        if len(gpus) < self.replicas:
            raise Unsupported("JAX %s sees %d GPUs, not %d" % (jax.__version__, len(gpus), self.replicas))
        capability = float(gpus[0].compute_capability)
        if capability < 8 and self.run["precision"] in ("tf32", "bf16"):
            wanted = "precision=%s needs compute capability 8.0 or newer" % self.run["precision"]
            raise Unsupported("%s, this GPU has %.1f" % (wanted, capability))

    # -- set up ----------------------------------------------------------------------------------------------------------
    def setup(self):
        if not self.gpu:
            jax.config.update("jax_platforms", "cpu")
            if self.replicas > 1:
                jax.config.update("jax_num_cpu_devices", self.here)
            if self.nodes > 1:
                jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_default_matmul_precision", MATMUL_PRECISION[self.run["precision"]])
        self.devices = jax.devices()[: self.replicas]
        #: those of this machine
        self.local = [device for device in self.devices if device.process_index == self.rank]
        self.mesh = jax.sharding.Mesh(numpy.array(self.devices), ("replicas",))
        self.everywhere = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        self.split = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec("replicas"))

    def build(self):
        spec = self.spec
        self.dtype = jax.numpy.dtype(HALF.get(self.run["precision"], "float32"))
        # cuDNN's fused attention is for half precisions, from compute capability 8.0 on
        flash = self.gpu and self.run["precision"] in HALF and float(self.devices[0].compute_capability) >= 8
        space_to_depth = bool(self.settings.get("space_to_depth"))
        self.network = layers.network_of(spec, self.dtype, flash, self.uses_cudnn_lstm(), space_to_depth)
        self.places = layers.places_of(spec)
        self.state_names = [state["name"] for state in spec["states"]]
        self.trained_names = [parameter["name"] for parameter in self.trained_parameters()]
        self.trained = self.frozen = self.states = self.momentum = self.scale = self.key = self.pending = None
        self.optimizer = self.build_optimizer()
        self.compile_functions()
        self.check_places()

    def check_places(self):
        """Keep the shapes of what Flax would initialise, which must be what the spec names alone, and the classes of its layers."""
        shape = (1,) + tuple(self.spec["input"]["shape"])
        kind = "int32" if self.spec["input"]["kind"] == "tokens" else "float32"
        example = jax.eval_shape(layers.to_nhwc, jax.ShapeDtypeStruct(shape, kind))
        made, self.layers = layers.initialized(self.network, example)
        self.shapes = layers.flat(self.places, made, self.places)
        if len(jax.tree.leaves(made)) != len(self.shapes):
            raise ValueError("jax: Flax has %d arrays where the spec has %d" % (len(jax.tree.leaves(made)), len(self.shapes)))

    def build_optimizer(self):
        """Optax's chain is the spec's form: the global norm is clipped, then decay is added, then v = momentum·v + g."""
        wanted = self.run["optimizer"]
        if wanted["name"] != "sgd":
            raise Unsupported("jax: this adapter has no mapping for optimizer %s" % wanted["name"])
        parts = []
        if wanted["clip_norm"] is not None:
            parts.append(optax.clip_by_global_norm(wanted["clip_norm"]))
        if wanted["weight_decay"]:
            decayed = {parameter["name"]: parameter["decay"] for parameter in self.trained_parameters()}
            parts.append(optax.add_decayed_weights(wanted["weight_decay"], mask=decayed))
        parts.append(optax.sgd(wanted["learning_rate"], momentum=wanted["momentum"] or None))
        return optax.chain(*parts)

    def compile_functions(self):
        """What the steps call. With compile=off these are the same functions, each operation run on its own."""
        compiled = self.compile != "off"
        self.functions = work = steps.Functions(self.spec, self.network, self.places, self.optimizer, self.replicas)
        self.steps = {counting: work.train(self.mesh, compiled, counting) for counting in (False, True)}
        self.with_gradients = work.gradients(self.mesh, compiled)
        self.infer = {training: work.outputs(self.mesh, compiled, training) for training in (False, True)}
        plain = jax.jit if compiled else (lambda function: function)
        # not mapped over the replicas: the last batch of a test set may not be divisible, then each computes all of it
        self.judge, self.prepare, self.first = plain(work.judged), plain(layers.to_nhwc), plain(steps.first_element)

    # -- parameters ---------------------------------------------------------------------------------------------------------
    def load(self, arrays):
        if set(arrays) != set(self.places):
            raise ValueError("jax: load needs exactly these arrays, wrong: %s" % sorted(set(arrays) ^ set(self.places)))
        placed = {}
        for name, (_, _, axes) in self.places.items():
            array = numpy.asarray(arrays[name], numpy.float32)
            array = array if axes is None else array.transpose(axes)
            if array.shape != self.shapes[name].shape:
                raise ValueError("jax: %s has shape %s, not %s" % (name, array.shape, self.shapes[name].shape))
            each = self.replicas > 1 and name in self.state_names
            array = numpy.array([array] * self.here if each else array, order="C")
            # a copy: a step gives the memory of its arguments away
            placed[name] = self.put(array, self.split if each else self.everywhere, may_alias=False)
        self.trained = {name: placed.pop(name) for name in self.trained_names}
        self.states = {name: placed.pop(name) for name in self.state_names}
        self.frozen = placed
        start = functools.partial(self.functions.start, self.run["precision"] == "fp16")
        self.momentum, self.scale = jax.jit(start, out_shardings=self.everywhere)(self.trained)
        # the same dropout masks after every load
        self.key = jax.jit(lambda: jax.random.key(self.run["seed"]), out_shardings=self.everywhere)() if self.functions.random else None
        self.sync()

    def put(self, array, where, may_alias=None):
        """On the devices: all of the array, or this machine's part of it."""
        if self.nodes > 1:
            return jax.make_array_from_process_local_data(where, array)
        return jax.device_put(array, where, may_alias=may_alias)

    def read(self):
        return self.read_replicas(self.local[:1])[0]

    def read_replicas(self, devices=None):
        if self.trained is None:
            return [self.to_canonical({name: numpy.zeros(shape.shape) for name, shape in self.shapes.items()})]
        return [self.to_canonical(self.values(device)) for device in devices or self.local]

    def values(self, device):
        """{the spec's name: array in Flax's layout} of what one device has."""
        values = dict(self.trained)
        values.update(self.frozen)
        values.update(self.states)
        values = {name: on(device, array) for name, array in values.items()}
        values.update(self.functions.own({name: values[name] for name in self.states}))
        return values

    def to_canonical(self, values):
        return {name: layers.canonical(array, self.places[name][2]) for name, array in values.items()}

    # -- one batch ---------------------------------------------------------------------------------------------------------
    def to_device(self, inputs, targets):
        """On the CPU the arrays may be used in place: do not write into them before the step is done."""
        where = self.split if len(inputs) % self.here == 0 else self.everywhere
        kind = self.spec["target"]["kind"]
        placed = self.placed(inputs, where)
        if targets is None or kind in ("input", "op"):
            return placed, None
        return placed, self.placed(numpy.asarray(targets, "int32") if kind == "class" else targets, where)

    def placed(self, array, where):
        array = self.put(array, where)
        return self.prepare(array) if array.ndim == 4 else array

    def step(self, batch):
        carried = (self.trained, self.momentum, self.scale, self.states, self.key)
        carried, loss, correct = self.steps[self.with_accuracy](carried, self.frozen, *batch)
        self.trained, self.momentum, self.scale, self.states, self.key = carried
        self.pending = loss
        return loss, correct

    def gradient(self, batch):
        self.pending = None
        loss, gradients, self.states = self.with_gradients(self.trained, self.scale, self.frozen, self.states, self.key, *batch)
        self.pending = (loss, gradients)
        return loss, None

    def forward(self, batch):
        self.pending = self.infer[False](self.trained, self.frozen, self.states, None, batch[0])
        return self.pending, None

    def sync(self):
        jax.block_until_ready((self.pending, self.trained, self.momentum, self.states))

    def meet(self):
        if self.nodes > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("crosstrain")

    def value(self, handle):
        return float(handle if handle.ndim == 0 else self.first(on(self.local[0], handle)))

    def probe(self):
        if not self.trained_names:
            return 0.0
        array = self.trained[self.trained_names[-1]]
        return sum(float(self.first(on(device, array))) for device in self.local)

    def evaluate(self, batch):
        loss, correct = self.judge(self.trained, self.frozen, self.states, *batch)
        # every machine gave the whole batch
        return float(loss), int(correct) // (1 if batch[0].is_fully_replicated else self.nodes)

    # -- for the ladder -------------------------------------------------------------------------------------------------------
    def output(self, batch, training):
        output = self.infer[training](self.trained, self.frozen, self.states, self.key, batch[0])
        return layers.canonical(layers.from_nhwc(output), None)

    def gradients(self, batch):
        # without loss scaling: its first scales are meant to overflow
        found = self.with_gradients(self.trained, None, self.frozen, self.states, self.key, *batch)[1]
        return self.to_canonical(found)

    # -- facts ------------------------------------------------------------------------------------------------------------------
    def peak_memory_mb(self):
        if not self.gpu:
            return None
        return max(device.memory_stats()["peak_bytes_in_use"] for device in self.local) / 1e6

    def effective(self):
        found = {
            "device": ", ".join(device.device_kind if self.gpu else "cpu:%d" % device.local_hardware_id for device in self.local),
            "precision": self.effective_precision(),
            "deterministic": not self.gpu or "--xla_gpu_deterministic_ops=true" in os.environ.get("XLA_FLAGS", ""),
            "memory_format": "channels_last",
            "compile": "on" if hasattr(self.steps[False], "lower") else "off",
            "autotune": self.gpu and "--xla_gpu_autotune_level=0" not in os.environ.get("XLA_FLAGS", ""),
        }
        if any(op["op"] == "lstm" for op in self.spec["ops"]):
            found["lstm"] = "cudnn" if self.network.cudnn_lstm else "scan"
        if self.settings.get("space_to_depth"):
            found["space_to_depth"] = layers.jax_space_to_depth.SpaceToDepthConv in self.layers
        if not self.gpu:
            found["threads"] = jax_process.pool_threads() // self.here
        return found

    def effective_precision(self):
        if self.network.dtype != jax.numpy.float32:
            return next(name for name, dtype in HALF.items() if self.network.dtype == jax.numpy.dtype(dtype))
        found = jax.config.jax_default_matmul_precision
        return next((name for name, wanted in MATMUL_PRECISION.items() if wanted == found), str(found))

    def is_oom(self, error):
        """XLA says it in its status, on the CPU and on GPUs, at a call or at the next wait."""
        words = str(error)
        return isinstance(error, jax.errors.JaxRuntimeError) and (
            "RESOURCE_EXHAUSTED" in words or "out of memory" in words.lower() or "CUDA_ERROR_OUT_OF_MEMORY" in words
        )

    def close(self):
        if self.nodes > 1:
            jax.distributed.shutdown()


def on(device, array):
    """What one device holds of an array."""
    return next(shard.data for shard in array.addressable_shards if shard.device == device)
