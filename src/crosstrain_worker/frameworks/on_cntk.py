"""CNTK 2.7. The layers are in `cntk_layers`, the losses in `cntk_losses`."""

import contextlib
import ctypes
import glob
import os
import platform
import re
import warnings

import numpy

from . import old_mkl
from .base import Base, Unsupported

# Set by load_library: importing CNTK is timed.
C = None
layers = None
losses = None


class Framework(Base):
    """One replica in each rank, on the CPU or on the rank's GPU (CUDA_VISIBLE_DEVICES is set by the launcher).

    CNTK is synchronous where a value is fetched: on the CPU a step is done when `train_minibatch` returns. Several ranks are started by
    mpirun; CNTK's data-parallel learner adds up their gradients, sample counts and losses, so the loss is that of the global batch.
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
    compile_modes = ("off",)
    memory_formats = ("contiguous",)
    max_replicas = 1024
    several_machines = True
    frozen_parameters = True

    def __init__(self, run):
        Base.__init__(self, run)
        self.gpu = run["device"] == "gpu"
        self.settings = run["framework"]
        self.deviations = {}
        for op in self.spec["ops"]:
            if op["op"] == "batch_norm" and op["variance"] != "unbiased":
                self.deviations[op["name"]] = "running variance is unbiased, the spec's is %s" % op["variance"]
        self.declare_own_statistics()
        self.distributed = run["world_size"] > 1

    # -- before anything is built -------------------------------------------------------------------------------------
    def load_library(self):
        global C, layers, losses
        # CNTK sets the number of OpenMP threads itself; this it can not exceed. (Intel's OpenMP would warn of each try.)
        os.environ["OMP_THREAD_LIMIT"] = str(self.run["threads"])
        os.environ["KMP_WARNINGS"] = "0"
        old_mkl.take_avx2_on_amd()
        with warnings.catch_warnings():
            # that this is not Ubuntu 16.04, and that there is no GPU
            warnings.simplefilter("ignore")
            import cntk as library

            from . import cntk_layers, cntk_losses

        C, layers, losses = library, cntk_layers, cntk_losses

    def versions(self):
        found = {"framework": C.__version__, "python": platform.python_version(), "numpy": numpy.__version__}
        library = mkl()
        if library:
            text = ctypes.create_string_buffer(200)
            library.MKL_Get_Version_String(text, len(text))
            found["mkl"] = re.search(r"Version (\S+)|$", text.value.decode("ascii", "replace")).group(1) or "unknown"
        return found

    def check(self):
        Base.check(self)
        if self.distributed and os.environ.get("OMPI_COMM_WORLD_SIZE") != str(self.run["world_size"]):
            raise Unsupported("cntk's ranks must be started by mpirun, these were not", "framework.started_by=mpirun")
        if self.gpu:
            self.check_gpu()

    def check_gpu(self):
        version = C.__version__
        if not glob.glob(os.path.join(os.path.dirname(C.__file__), "libs", "libcudart*")):
            raise Unsupported("this build of CNTK (%s) has no CUDA" % version, "install cntk-gpu, or device=cpu")
        seen = sum(1 for device in C.device.all_devices() if device.type() == C.device.DeviceKind.GPU)
        if seen <= self.local_rank:
            which = " %d" % self.local_rank if seen else ""
            raise Unsupported("CNTK %s sees no GPU%s: the driver is missing or too old" % (version, which), "device=cpu")
        found = C.device.get_gpu_properties(C.device.gpu(self.local_rank))
        capability = (found.version_major, found.version_minor)
        # By NVIDIA's documentation of CUDA 10.0 and cuDNN 7, which the wheel brings along; not tried.
        if capability > (7, 5):
            raise Unsupported(
                "CNTK %s computes with CUDA 10.0 and cuDNN 7, which end at compute capability 7.5, this GPU has %d.%d"
                % ((version,) + capability),
                "device=cpu",
            )

    # -- set up ----------------------------------------------------------------------------------------------------------
    def setup(self):
        C.logging.set_trace_level(C.logging.TraceLevel.Error)
        self.device = C.device.gpu(self.local_rank) if self.gpu else C.device.cpu()
        C.device.try_set_default_device(self.device)
        # Before the first Trainer, which would take all CPUs.
        C.cntk_py.set_max_num_cputhreads(self.run["threads"])
        if self.settings.get("deterministic"):
            C.cntk_py.force_deterministic_algorithms()
        if self.distributed:
            self.communicator = C.train.distributed.mpi_communicator()

    def build(self):
        self.network = layers.Network(self.spec, self.run["batch_per_replica"], self.run["seed"], self.gpu)
        self.criterion = losses.Criterion(self.network, self.spec)
        self.slots = self.network.slots
        self.model = C.combine([self.network.output])
        loss, wrong = self.criterion.loss, self.criterion.wrong
        everything = C.Axis.all_axes()
        self.mean_loss = C.reduce_mean(loss, axis=everything)
        self.evaluated = C.combine([self.mean_loss] + ([] if wrong is None else [C.reduce_mean(wrong, axis=everything)]))
        self.parameters = [self.slots[entry["name"]].variable for entry in self.trained_parameters()]
        self.build_learners()
        learners = self.learners
        if self.distributed:
            learners = [C.train.distributed.data_parallel_distributed_learner(learner) for learner in learners]
            # one of them also adds up losses and sample counts
            learners[0].set_as_metric_aggregator()
        self.trainer = C.Trainer(self.model, (loss, None), learners)
        # counts the wrong answers, too; a network of its own for CNTK, which is allocated when it is first used
        self.counting = self.trainer if wrong is None else C.Trainer(self.model, (loss, wrong), learners)

    def build_learners(self):
        wanted = self.run["optimizer"]
        if wanted["name"] != "sgd":
            raise Unsupported("cntk: this adapter has no mapping for optimizer %s" % wanted["name"])
        self.velocities = []
        if wanted["clip_norm"] is not None:
            # CNTK's learners clip each parameter's gradient by its own norm.
            self.learners = [C.universal(lambda parameters, gradients: self.clipped_update(parameters, gradients), self.parameters)]
            return
        self.learners = []
        for decay in (True, False):
            group = [self.slots[entry["name"]].variable for entry in self.trained_parameters() if entry["decay"] == decay]
            if group:
                self.learners.append(self.sgd(group, wanted, wanted["weight_decay"] if decay else 0.0))

    def sgd(self, parameters, wanted, weight_decay):
        """CNTK's own learner. It adds up the gradients of a batch; `IGNORE` has it take their mean and leaves all factors as they are."""
        settings = {"l2_regularization_weight": weight_decay, "minibatch_size": C.learners.IGNORE}
        rate = C.learning_parameter_schedule(wanted["learning_rate"])
        if not wanted["momentum"]:
            return C.sgd(parameters, rate, **settings)
        return C.momentum_sgd(parameters, rate, C.momentum_schedule(wanted["momentum"]), unit_gain=False, **settings)

    def clipped_update(self, parameters, gradients):
        """The update of design.md as a graph; the velocities hold learning_rate·v, which is a pass less over all parameters.

        `gradients` are those of the sum of all losses of the global batch.
        """
        wanted = self.run["optimizer"]
        rate, count = wanted["learning_rate"], float(self.run["batch_global"] * self.criterion.losses)
        squares = [C.reduce_sum_square(gradient, axis=C.Axis.all_static_axes()) for gradient in gradients]
        norm = C.sqrt(C.reduce_sum(C.splice(*[C.reshape(square, (1,)) for square in squares]))) / count
        scale = C.element_min(1.0, wanted["clip_norm"] / norm) * (rate / count)
        decayed = {self.slots[entry["name"]].variable.uid for entry in self.trained_parameters() if entry["decay"]}
        updates = []
        for parameter, gradient in zip(parameters, gradients):
            step = scale * gradient
            if wanted["weight_decay"] and parameter.uid in decayed:
                step = step + rate * wanted["weight_decay"] * parameter
            if wanted["momentum"]:
                self.velocities.append(C.constant(0, shape=parameter.shape))
                step = C.assign(self.velocities[-1], wanted["momentum"] * self.velocities[-1] + step)
            updates.append(C.assign(parameter, parameter - step))
        return C.combine(updates)

    def load(self, arrays):
        if set(arrays) != set(self.slots):
            raise ValueError("cntk: load needs exactly these arrays, wrong: %s" % sorted(set(arrays) ^ set(self.slots)))
        for name, slot in self.slots.items():
            array = arrays[name]
            if tuple(array.shape) != slot.shape:
                raise ValueError("cntk: %s has shape %s, not %s" % (name, slot.shape, tuple(array.shape)))
            slot.load(array)
        for learner in self.learners:
            learner.reset_smoothed_gradients()
        for velocity in self.velocities:
            velocity.value = numpy.zeros(velocity.shape, "float32")
        # the same dropout masks after every load
        self.network.restart_dropout()

    def read(self):
        return {name: slot.read() for name, slot in self.slots.items()}

    # -- one batch ---------------------------------------------------------------------------------------------------------
    def to_device(self, inputs, targets):
        """CNTK's values of the inputs and of the targets (if any); tokens and class indices become float32 (exact below 2**24)."""
        variables, arrays = self.arguments(), (inputs, targets)
        return tuple(self.value_of(variable, array) for variable, array in zip(variables, arrays))

    def arguments(self):
        """The variables that take a batch."""
        return [self.network.input] + ([] if self.criterion.targets is None else [self.criterion.targets])

    def given(self, batch, function=None):
        """{variable: value} of all of the batch, or of what `function` takes."""
        values = dict(zip(self.arguments(), batch))
        return values if function is None else {variable: values[variable] for variable in function.arguments}

    def value_of(self, variable, array):
        if layers.is_sequence(variable):
            array = array.reshape(array.shape[:2] + variable.shape)
        return C.Value(C.NDArrayView.from_dense(numpy.ascontiguousarray(array, dtype="float32"), self.device))

    def step(self, batch):
        if not self.with_accuracy:
            self.trainer.train_minibatch(self.given(batch), device=self.device)
            return self.trainer.previous_minibatch_loss_average, None
        trainer = self.counting
        trainer.train_minibatch(self.given(batch), device=self.device)
        correct = 0.0
        if self.criterion.wrong is not None:
            correct = self.right(trainer.previous_minibatch_evaluation_average, batch)
        return trainer.previous_minibatch_loss_average, correct

    def right(self, wrong, batch):
        """The number of right answers in a batch by the share of the wrong ones; of a rank its share of all ranks' right ones."""
        answers = batch[0].shape[0] * self.criterion.answers
        right = (1 - wrong) * answers
        return right if self.distributed else float(round(right))

    def gradient(self, batch):
        gradients, loss = self.mean_loss.grad(self.given(batch), self.parameters, [self.mean_loss.output], self.device, as_numpy=False)
        if self.distributed:
            values = gradients.values() if isinstance(gradients, dict) else [gradients]
            self.communicator.aggregate_in_place([value.data for value in values], self.communicator.workers())
        return float(loss.asarray()), None

    def forward(self, batch):
        # CNTK's values last until its next pass: a copy
        return self.model.eval(self.given(batch, self.model), device=self.device, as_numpy=False).deep_clone(), None

    def sync(self):
        """Every step has fetched its loss by now; what is queued behind it on a GPU is waited for by fetching an updated parameter."""
        if self.gpu:
            self.probe()

    def meet(self):
        if self.distributed:
            self.communicator.barrier()

    def value(self, handle):
        return handle if isinstance(handle, float) else float(handle.asarray().flat[0])

    def probe(self):
        return float(self.parameters[-1].value.flat[0]) if self.parameters else 0.0

    def evaluate(self, batch):
        found = self.evaluated.eval(self.given(batch), device=self.device)
        if self.criterion.wrong is None:
            return float(found), 0
        loss, wrong = (float(found[output]) for output in self.evaluated.outputs)
        return loss, int(round(self.right(wrong, batch)))

    # -- for the ladder -------------------------------------------------------------------------------------------------------
    def output(self, batch, training):
        given = self.given(batch, self.model)
        if not training:
            found = self.model.eval(given, device=self.device)
        else:
            with self.states_kept():
                # CNTK is in training mode where a backward pass may follow
                _, values = self.model.forward(given, keep_for_backward=set(self.model.outputs), device=self.device)
            (found,) = values.values()
        return numpy.array(found, "float32")

    def gradients(self, batch):
        with self.states_kept():
            found = self.mean_loss.grad(self.given(batch), self.parameters, [self.mean_loss.output], self.device)[0]
        if len(self.parameters) == 1:
            found = {self.parameters[0]: found}
        slots = {entry["name"]: self.slots[entry["name"]] for entry in self.trained_parameters()}
        return {name: slot.in_spec_layout(found[slot.variable]) for name, slot in slots.items()}

    @contextlib.contextmanager
    def states_kept(self):
        """Running statistics as they were before."""
        states = [self.slots[state["name"]] for state in self.spec["states"]]
        before = [state.read() for state in states]
        yield
        for state, value in zip(states, before):
            state.load(value)

    # -- facts ------------------------------------------------------------------------------------------------------------------
    def effective(self):
        found = {
            "device": str(C.device.use_default_device()),
            "threads": C.cntk_py.get_max_num_cputhreads(),
            "precision": "fp32",
            "deterministic": C.cntk_py.should_force_deterministic_algorithms(),
            "memory_format": "contiguous",
            "compile": "off",
            "autotune": False,
        }
        if mkl():
            # 0 is MKL's slowest code, 4 that of AVX, 5 of AVX2, 6 of AVX-512
            found["mkl_cpu_type"] = mkl().mkl_serv_cpu_detect()
        return found

    def is_oom(self, error):
        words = str(error)
        return "bad_alloc" in words or "out of memory" in words.lower()

    def close(self):
        if self.distributed:
            C.train.distributed.Communicator.finalize()


def mkl():
    """The MKL that CNTK brings along, or None."""
    try:
        return ctypes.CDLL(os.path.join(os.path.dirname(C.__file__), "libs", "libmklml_intel.so"))
    except OSError:
        return None
