"""Theano 1.0. The expressions are in `theano_layers`; each use of the network is one compiled function.

CPU only: for GPUs Theano needs libgpuarray and pygpu, which its wheel does not bring and the package index does not have.
"""

import ctypes
import platform

import numpy

from .base import Base, Unsupported
from .theano_config import compiling, configure, numpy_openblas, openmp

# Set by load_library: importing Theano is timed, and reads its configuration.
theano = None
layers = None


class Framework(Base):
    """A handle is a 0-d array that Theano gives away (of `forward`: the output); a batch is the list of a function's arguments."""

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
    precisions = {"cpu": ("fp32",), "gpu": ()}
    compile_modes = ("on",)
    frozen_parameters = True

    def __init__(self, run):
        Base.__init__(self, run)
        self.settings = run["framework"]
        self.deviations = {
            op["name"]: "the gradient goes to every maximum of a window, where several are equal"
            for op in self.spec["ops"]
            if op["op"] == "max_pool"
        }

    # -- before anything is built -------------------------------------------------------------------------------------
    def load_library(self):
        global theano, layers
        if theano is None:
            configure(self.run["threads"])
            with compiling():  # its own C code, the first time
                import theano as library

                from . import theano_layers

            theano, layers = library, theano_layers

    def versions(self):
        import scipy

        found = {"framework": theano.__version__, "python": platform.python_version(), "numpy": numpy.__version__}
        found["scipy"] = scipy.__version__
        found["compiler"] = "g++ " + theano.gof.cmodule.gcc_version()
        blas = numpy_openblas()
        if blas:
            config = blas.openblas_get_config
            config.restype = ctypes.c_char_p
            found["blas"] = config().decode()
        else:
            found["blas"] = theano.config.blas.ldflags or "numpy's"
        return found

    def check(self):
        if self.run["device"] == "gpu":
            raise Unsupported(
                "Theano %s needs libgpuarray and pygpu for a GPU, which its wheel does not have" % theano.__version__, "device=cpu"
            )
        Base.check(self)
        if not theano.config.cxx:
            raise Unsupported("Theano compiles its functions with a C++ compiler, and g++ is not there", "install g++")

    # -- set up ----------------------------------------------------------------------------------------------------------
    def setup(self):
        threads = self.run["threads"]
        # Convolution, pooling and large elementwise ops are spread by OpenMP, matrix products by OpenBLAS.
        theano.config.openmp = threads > 1
        theano.config.deterministic = "more" if self.settings.get("deterministic") else "default"
        openmp().omp_set_num_threads(threads)
        blas = numpy_openblas()
        if blas:
            blas.openblas_set_num_threads(threads)

    def build(self):
        self.network = layers.Network(self.spec)
        self.slots = self.network.slots
        self.inputs, self.targets = layers.symbols(self.spec)
        with compiling():  # random streams are made by a compiled function
            self.graphs = {training: self.graph(training) for training in (True, False)}
        wanted = self.run["optimizer"]
        if wanted["name"] != "sgd":
            raise Unsupported("theano: this adapter has no mapping for optimizer %s" % wanted["name"])
        self.parameters = [self.slots[parameter["name"]] for parameter in self.trained_parameters()]
        self.velocities = []
        if wanted["momentum"]:
            self.velocities = [theano.shared(numpy.zeros_like(p.get_value(borrow=True)), borrow=True) for p in self.parameters]
        self.functions = {}
        if self.run.get("mode") == "train":
            for use in self.uses():
                self.compiled(use)

    def graph(self, training):
        """(output, loss, number of correct answers, updates of the states) as expressions."""
        values, states = self.network.values(self.inputs, training)
        return (values[self.spec["output"]],) + layers.loss_of(self.spec, values, self.targets) + (states,)

    def uses(self):
        """The compiled functions that this run will call: compiled in `build`, not in the middle of the training."""
        found = [{"training": "step", "gradient": "gradient", "forward": "output"}[self.run["task"]]]
        if self.run["epochs"]:
            found.append("counted step" if self.spec["target"]["kind"] == "class" else "step")
            if self.run["data"]["test"]:
                found.append("evaluation")
        return found

    def compiled(self, use):
        """The compiled function of this use. Compiling takes seconds to minutes, from a filled cache a fraction of it."""
        if use not in self.functions:
            with compiling():
                self.functions[use] = self.compile(use)
        return self.functions[use]

    def compile(self, use):
        output, loss, correct, states = self.graphs[use in ("step", "counted step", "gradient", "training output")]
        updates = []
        if use in ("step", "counted step"):
            updates = states + self.update(self.gradient_of(loss))
        results = {
            "step": lambda: loss,
            "counted step": lambda: [loss, correct],
            # in memory that stays the function's own: nobody reads them but `gradients`, at once
            "gradient": lambda: [loss] + [theano.Out(gradient, borrow=True) for gradient in self.gradient_of(loss)],
            "output": lambda: output,
            "training output": lambda: output,
            "evaluation": lambda: [loss, correct],
        }[use]()
        targeted = self.targets is not None and use not in ("output", "training output")
        inputs = [theano.In(x, borrow=True) for x in ([self.inputs, self.targets] if targeted else [self.inputs])]
        function = theano.function(inputs, results, updates=updates, on_unused_input="ignore", name=use)
        # to_device makes them what the function takes
        function.trust_input = True
        return function

    def gradient_of(self, loss):
        """Expressions of the trained parameters' gradients."""
        return theano.grad(loss, self.parameters, disconnected_inputs="ignore")

    def update(self, gradients):
        """[(shared variable, new value)] of one SGD step. Theano has no optimisers: written out, and compiled to work in place."""
        wanted = self.run["optimizer"]
        # Shared, not constants: these would be compiled into the code, which the cache then holds once for each value.
        rate, momentum, decay = (theano.shared(numpy.float32(wanted[k])) for k in ("learning_rate", "momentum", "weight_decay"))
        if wanted["clip_norm"] is not None and gradients:
            tensor = theano.tensor
            norm = tensor.sqrt(sum(tensor.sqr(gradient).sum() for gradient in gradients))
            # Divided by, not multiplied with its inverse: Theano would draw a factor into the matrix product that makes a gradient,
            # and so do that product twice, with the factor and, for the norm, without.
            excess = tensor.maximum(numpy.float32(1), norm / theano.shared(numpy.float32(wanted["clip_norm"])))
            gradients = [gradient / excess for gradient in gradients]
        found = []
        for index, (entry, parameter, gradient) in enumerate(zip(self.trained_parameters(), self.parameters, gradients)):
            if wanted["weight_decay"] and entry["decay"]:
                gradient = gradient + decay * parameter
            if wanted["momentum"]:
                velocity = self.velocities[index]
                gradient = momentum * velocity + gradient
                found.append((velocity, gradient))
            found.append((parameter, parameter - rate * gradient))
        return found

    def load(self, arrays):
        if set(arrays) != set(self.slots):
            raise ValueError("theano: load needs exactly these arrays, wrong: %s" % sorted(set(arrays) ^ set(self.slots)))
        for name, slot in self.slots.items():
            array, shape = arrays[name], slot.get_value(borrow=True).shape
            if tuple(array.shape) != shape:
                raise ValueError("theano: %s has shape %s, not %s" % (name, shape, tuple(array.shape)))
            slot.set_value(numpy.array(array, "float32", order="C"), borrow=True)
        for velocity in self.velocities:
            velocity.set_value(numpy.zeros_like(velocity.get_value(borrow=True)), borrow=True)
        # the same dropout masks after every load
        with compiling():
            self.network.seed(self.run["seed"])

    def read(self):
        return {name: numpy.array(slot.get_value(borrow=True)) for name, slot in self.slots.items()}

    # -- one batch ---------------------------------------------------------------------------------------------------------
    def to_device(self, inputs, targets):
        """The arrays themselves where they are as the functions take them: do not write into them before the step is done."""
        batch = [as_taken(inputs, self.inputs)]
        if self.targets is not None:
            batch.append(as_taken(targets, self.targets))
        return batch

    def step(self, batch):
        if self.with_accuracy:
            return tuple(self.compiled("counted step")(*batch))
        return self.compiled("step")(*batch), None

    def gradient(self, batch):
        return self.compiled("gradient")(*batch)[0], None

    def forward(self, batch):
        return self.compiled("output")(batch[0]), None

    def sync(self):
        """A Theano function on the CPU returns when it is done."""

    def value(self, handle):
        return float(numpy.asarray(handle).flat[0])

    def probe(self):
        return float(self.parameters[-1].get_value(borrow=True).flat[0]) if self.parameters else 0.0

    def evaluate(self, batch):
        loss, correct = self.compiled("evaluation")(*batch)
        return float(loss), int(correct)

    # -- for the ladder -------------------------------------------------------------------------------------------------------
    def output(self, batch, training):
        return numpy.array(self.compiled("training output" if training else "output")(batch[0]))

    def gradients(self, batch):
        found = self.compiled("gradient")(*batch)[1:]
        return {entry["name"]: numpy.array(gradient) for entry, gradient in zip(self.trained_parameters(), found)}

    # -- facts ------------------------------------------------------------------------------------------------------------------
    def effective(self):
        blas = numpy_openblas()
        spread = openmp().omp_get_max_threads()
        return {
            "device": theano.config.device,
            "threads": blas.openblas_get_num_threads() if blas else spread,
            "openmp_threads": spread if theano.config.openmp else 1,
            "precision": {"float32": "fp32"}.get(theano.config.floatX, theano.config.floatX),
            "deterministic": theano.config.deterministic == "more",
            "memory_format": "contiguous",
            "compile": "on" if theano.config.mode in ("Mode", "FAST_RUN") and theano.config.cxx else "off",
            "autotune": False,
            "blas": theano.config.blas.ldflags or "none",
            "allow_gc": theano.config.allow_gc,
        }

    def is_oom(self, error):
        """numpy's MemoryError, and what Theano's C code says (BaseCorrMM: Failed to allocate output of …)."""
        words = str(error).lower()
        refused = "allocate" in words and any(word in words for word in ("failed to", "unable to", "could not", "cannot"))
        return isinstance(error, MemoryError) or refused


def as_taken(array, variable):
    """The array as a compiled function takes it for this symbolic input without looking at it."""
    return numpy.require(array, variable.dtype, ["C", "A"])
