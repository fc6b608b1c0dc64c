"""Intel's neon 2.6, with its back end `cpu` (NervanaCPU: numpy). It is on no package index: only in an interpreter that the user has.

Its back ends `mkl` and `gpu` need libraries that are no longer distributed; they could not be tried and are not mapped.
"""

import ctypes
import glob
import os
import platform

import numpy

from .base import Base, Unsupported

# Set by load_library: importing neon is timed.
neon = None


class Framework(Base):
    """Networks that are one chain of the layers below. neon's arrays are (features, batch), for one fixed batch size.

    A batch is (inputs, one-hot targets, class indices as numpy, number of samples); smaller ones are filled up with zeros, which only
    evaluation may do. A handle is a float, of `forward` an array. NervanaCPU is done when a call returns.
    """

    ops = frozenset(("linear", "conv2d", "max_pool", "avg_pool", "relu", "tanh", "sigmoid", "flatten"))
    precisions = {"cpu": ("fp32",), "gpu": ()}

    # -- before anything is built -------------------------------------------------------------------------------------
    def load_library(self):
        global neon
        import neon as library

        try:
            import neon.backends
            import neon.initializers
            import neon.layers
            import neon.models
            import neon.optimizers
            import neon.transforms
        except ImportError as error:
            # the package index has another package of this name
            raise Unsupported("the package neon of this interpreter can not be used as Intel's neon: %s" % error) from error
        neon = library

    def versions(self):
        found = {"framework": neon.__version__, "python": platform.python_version(), "numpy": numpy.__version__}
        blas = numpy_openblas()
        if blas:
            config = blas.openblas_get_config
            config.restype = ctypes.c_char_p
            found["blas"] = config().decode()
        return found

    def check(self):
        if self.run["device"] == "gpu":
            raise Unsupported("neon: its GPU back end has no code for GPUs newer than 2017 and is not mapped", "device=cpu")
        Base.check(self)
        if self.spec["loss"]["op"] != "softmax_cross_entropy" or self.spec["target"]["kind"] != "class":
            raise Unsupported("neon: this adapter has no mapping for the loss %s" % self.spec["loss"]["op"])
        if self.run["optimizer"]["name"] != "sgd":
            raise Unsupported("neon: this adapter has no mapping for optimizer %s" % self.run["optimizer"]["name"])
        before = "input"
        for op in self.spec["ops"]:
            if op["inputs"] != [before]:
                raise Unsupported("neon: this adapter builds one chain of layers, and %s (%s) branches off" % (op["op"], op["name"]))
            before = op["name"]

    # -- set up ----------------------------------------------------------------------------------------------------------
    def setup(self):
        blas = numpy_openblas()
        if blas:
            blas.openblas_set_num_threads(self.run["threads"])
        self.size = self.run["batch_per_replica"]
        seed = self.run["seed"]
        self.backend = neon.backends.gen_backend("cpu", batch_size=self.size, rng_seed=seed, datatype=numpy.float32)

    def build(self):
        #: the spec's name of a parameter -> (its layer, the kind of op)
        self.slots = {}
        layers, shaped = [], []
        for op in self.spec["ops"]:
            layers += self.layers_of(op)
            shaped.append((op, layers[-1] if layers else None))
        # softmax and its cross-entropy are made for each other: only together their gradients are right
        layers.append(neon.layers.Activation(neon.transforms.Softmax()))
        self.model = neon.models.Model(layers)
        shape = self.spec["input"]["shape"]
        cost = neon.layers.GeneralizedCost(neon.transforms.CrossEntropyMulti())
        self.model.initialize(tuple(shape) if len(shape) > 1 else shape[0], cost)
        for op, layer in shaped:
            if layer is not None and op["op"] != "flatten" and numpy.prod(layer.out_shape) != numpy.prod(op["shape"]):
                raise Unsupported("neon gives %s (%s) the shape %s, not %s" % (op["op"], op["name"], layer.out_shape, op["shape"]))
        self.classes = self.spec["ops"][-1]["shape"][-1]
        self.new_optimizers()

    def layers_of(self, op):
        """neon's layers for an op; its parameters go into `slots`."""
        kind, start, layers = op["op"], neon.initializers.Constant(0.0), neon.layers
        if kind == "flatten":
            return []
        if kind in ("relu", "tanh", "sigmoid"):
            transform = {"relu": "Rectlin", "tanh": "Tanh", "sigmoid": "Logistic"}[kind]
            return [layers.Activation(getattr(neon.transforms, transform)())]
        if kind == "linear":
            made = [layers.Linear(op["out"], init=start)]
        elif kind == "conv2d":
            if op["groups"] != 1:
                raise Unsupported("neon has no conv2d with groups (%s)" % op["name"])
            height, width = op["kernel"]
            dilation = dict(zip(("dil_h", "dil_w"), op["dilation"]))
            made = [layers.Convolution((height, width, op["out_channels"]), strides_of(op), padding_of(op), dilation, init=start)]
        else:
            padding = padding_of(op)
            if kind == "avg_pool" and op["count_include_pad"] and any(padding.values()):
                raise Unsupported("neon's avg_pool leaves the padding out of the mean, %s counts it" % op["name"])
            return [layers.Pooling(tuple(op["kernel"]), kind[:3], strides_of(op), padding)]
        self.slots[op["name"] + ".weight"] = (made[0], kind)
        if op["bias"]:
            made.append(layers.Bias(start))
            self.slots[op["name"] + ".bias"] = (made[1], "bias")
        return made

    def new_optimizers(self):
        """Two, since weight decay is an optimiser's; each clips by the norm of all gradients."""
        wanted = self.run["optimizer"]
        everything = self.model.layers_to_optimize

        class Momentum(neon.optimizers.GradientDescentMomentum):
            def clip_gradient_norm(self, _own, clip_norm):
                gradients = neon.optimizers.optimizer.get_param_list(everything)
                return super(Momentum, self).clip_gradient_norm(gradients, clip_norm)

        self.optimizers = []
        for decay in (True, False):
            names = [parameter["name"] for parameter in self.spec["parameters"] if parameter["decay"] == decay]
            settings = {"wdecay": wanted["weight_decay"] if decay else 0.0, "gradient_clip_norm": wanted["clip_norm"]}
            if names:
                made = Momentum(wanted["learning_rate"], wanted["momentum"], **settings)
                self.optimizers.append((made, [self.slots[name][0] for name in names]))

    def load(self, arrays):
        if set(arrays) != set(self.slots):
            raise ValueError("neon: load needs exactly these arrays, wrong: %s" % sorted(set(arrays) ^ set(self.slots)))
        for name, (layer, kind) in self.slots.items():
            array = arrays[name]
            layer.W[:] = array.reshape(len(array), -1).T if kind == "conv2d" else array.reshape(len(array), -1)
            layer.states = []
        self.new_optimizers()

    def read(self):
        return self.canonical("W")

    def canonical(self, attribute):
        """{name: array} of the layers' W or dW. neon keeps a convolution's weight as (I kH kW, O), a bias as (n, 1)."""
        found = {}
        for parameter in self.spec["parameters"]:
            layer, kind = self.slots[parameter["name"]]
            array = getattr(layer, attribute).get()
            found[parameter["name"]] = numpy.array((array.T if kind == "conv2d" else array).reshape(parameter["shape"]))
        return found

    # -- one batch ---------------------------------------------------------------------------------------------------------
    def to_device(self, inputs, targets):
        count = len(inputs)
        if count > self.size:
            raise ValueError("neon: a batch of %d samples, built for %d" % (count, self.size))
        features = numpy.zeros((inputs[0].size, self.size), dtype=numpy.float32)
        features[:, :count] = inputs.reshape(count, -1).T
        indices = numpy.zeros((1, self.size), dtype=numpy.int32)
        indices[0, :count] = targets
        answers = self.backend.empty((self.classes, self.size))
        answers[:] = self.backend.onehot(self.backend.array(indices, dtype=numpy.int32), axis=0)
        return self.backend.array(features), answers, indices[0, :count], count

    def step(self, batch):
        handles = self.gradient(batch)
        for optimizer, layers in self.optimizers:
            optimizer.optimize(layers, epoch=0)
        return handles

    def gradient(self, batch):
        inputs, answers, indices, count = batch
        if count != self.size:
            raise ValueError("neon: a step of %d samples, built for %d" % (count, self.size))
        output = self.model.fprop(inputs)
        loss = float(self.model.cost.get_cost(output, answers)[0, 0])
        correct = right_answers(output, indices) if self.with_accuracy else None
        self.model.bprop(self.model.cost.get_errors(output, answers))
        return loss, correct

    def logits(self, batch, inference):
        """All but the softmax, which works in place."""
        value = batch[0]
        for layer in self.model.layers.layers[:-1]:
            value = layer.fprop(value, inference)
        return value

    def forward(self, batch):
        return self.logits(batch, True), None

    def sync(self):
        """Nothing is ever queued."""

    def value(self, handle):
        return float(handle) if isinstance(handle, (float, int)) else float(handle.get()[0, 0])

    def probe(self):
        return float(self.model.layers_to_optimize[-1].W.get()[0, 0])

    def evaluate(self, batch):
        inputs, answers, indices, count = batch
        output, cost = self.model.fprop(inputs, inference=True), self.model.cost
        cost.outputs[:] = cost.costfunc(output, answers)
        return float(cost.outputs.get()[0, :count].mean()), right_answers(output, indices)

    # -- for the ladder -------------------------------------------------------------------------------------------------------
    def output(self, batch, training):
        return numpy.array(self.logits(batch, not training).get().T[: batch[3]]).reshape([batch[3]] + self.spec["ops"][-1]["shape"])

    def gradients(self, batch):
        self.gradient(batch)
        return {name: array / self.size for name, array in self.canonical("dW").items()}

    # -- facts ------------------------------------------------------------------------------------------------------------------
    def effective(self):
        blas = numpy_openblas()
        return {
            "device": "cpu",
            "backend": type(self.backend).__name__,
            "threads": blas.openblas_get_num_threads() if blas else self.run["threads"],
            "precision": "fp32",
            "deterministic": True,
            "memory_format": "contiguous",
            "compile": "off",
            "autotune": False,
        }


def strides_of(op):
    return dict(zip(("str_h", "str_w"), op["stride"]))


def padding_of(op):
    top, bottom, left, right = op["padding"]
    if top != bottom or left != right:
        raise Unsupported("neon pads both sides alike, %s (%s) wants %s" % (op["op"], op["name"], op["padding"]))
    return {"pad_h": top, "pad_w": left}


def right_answers(output, indices):
    return int((output.get()[:, : len(indices)].argmax(0) == indices).sum())


def numpy_openblas():
    """The OpenBLAS in numpy's wheel, or None: another BLAS."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(numpy.__file__)))
    for path in glob.glob(os.path.join(folder, "numpy.libs", "libopenblas*.so*")):
        library = ctypes.CDLL(path)
        if hasattr(library, "openblas_set_num_threads"):
            return library
    return None
