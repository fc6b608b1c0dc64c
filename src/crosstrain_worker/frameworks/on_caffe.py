"""Caffe 1.0 (BVLC) through pycaffe. The nets are described in `caffe_net`, the layers in `caffe_layers`."""

import contextlib
import ctypes
import mmap
import os
import platform
import tempfile

import numpy

from .base import Base, Unsupported

# Set by load_library: importing Caffe is timed, and reads the environment.
caffe = None
layers = None
nets = None

#: what a build without CUDA says when it aborts; the text is in its library only then
NO_GPU = b"Cannot use GPU in CPU-only Caffe"
LSTM_GATES = ("i", "f", "g", "o")
CAFFE_GATES = ("i", "f", "o", "g")


class Batch(object):
    """A batch as MemoryData takes it: float32, C order, four axes; the arrays are read where they lie.

    `labels` (N, 1, 1, 1); `targets` for the blob of that name, where the targets are no class per sample.
    """

    def __init__(self, inputs, labels, targets):
        self.inputs = inputs
        self.labels = labels
        self.targets = targets
        self.size = len(inputs)


class Graph(object):
    """A Caffe net for one batch size, with its description. `owner()` gives a new Python wrapper of the net."""

    def __init__(self, description, owner):
        self.description = description
        self.owner = owner
        self.net = owner()
        names = list(self.net._layer_names)
        self.loss = names.index("loss/mean")
        self.last = len(names) - 1
        spec = description.spec
        self.output = self.net.blobs[description.blob_of(spec["output"])]
        self.targets = self.net.blobs.get("loss/targets")
        self.given = None

    def give(self, batch):
        """Let the net read this batch: MemoryData gets the addresses of its arrays, which are kept alive here."""
        # pycaffe ties the arrays' lives to the wrapper it is called on, for ever: so to one that is gone at once.
        self.owner()._set_input_arrays(batch.inputs, batch.labels)
        if self.targets is not None:
            self.targets.data[...] = batch.targets
        self.given = batch

    def read_output(self):
        """A copy of the output, the batch first."""
        array = self.output.data.copy()
        return numpy.ascontiguousarray(array.swapaxes(0, 1)) if self.description.time_major else array


class Framework(Base):
    """One replica. Caffe is synchronous on the CPU: handles are Python floats.

    A net has one batch size. The solver owns the one that trains; those for inference and evaluation share its weights and are
    made when their batch size first comes.
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
            # refused with the reason
            "attention",
            "masked_mean",
        )
    )
    precisions = {"cpu": ("fp32",), "gpu": ("fp32",)}
    compile_modes = ("off",)
    memory_formats = ("contiguous",)
    max_replicas = 1
    frozen_parameters = True

    def __init__(self, run):
        Base.__init__(self, run)
        self.gpu = run["device"] == "gpu"
        self.shapes = {entry["name"]: tuple(entry["shape"]) for entry in self.spec["parameters"] + self.spec["states"]}

    # -- before anything is built -------------------------------------------------------------------------------------
    def load_library(self):
        global caffe, layers, nets
        os.environ["OPENBLAS_NUM_THREADS"] = str(self.run["threads"])
        # No log of every layer; what ends the process is still told.
        os.environ["GLOG_minloglevel"] = "2"
        import caffe as library

        from . import caffe_layers, caffe_net

        caffe, layers, nets = library, caffe_layers, caffe_net

    def versions(self):
        import google.protobuf

        found = {"framework": caffe.__version__, "python": platform.python_version(), "numpy": numpy.__version__}
        found["protobuf"] = google.protobuf.__version__
        found["blas"] = "openblas" if openblas() is not None else "unknown"
        return found

    def check(self):
        Base.check(self)
        # set_mode_gpu() succeeds in such a build, and the first GPU call ends the process.
        if self.gpu and not has_gpu_code(caffe._caffe.__file__):
            raise Unsupported("this build of Caffe (%s) has no CUDA" % caffe.__version__, "a build with CUDA, or device=cpu")
        if self.run["optimizer"]["name"] != "sgd":
            raise Unsupported("caffe: this adapter has no mapping for optimizer %s" % self.run["optimizer"]["name"])

    # -- set up ----------------------------------------------------------------------------------------------------------
    def setup(self):
        if openblas() is not None:  # the environment counts only before the import
            openblas().openblas_set_num_threads(self.run["threads"])
        if self.gpu:
            caffe.set_mode_gpu()
            caffe.set_device(0)
            self.timer = caffe.Timer()
        else:
            caffe.set_mode_cpu()

    def build(self):
        self.make(self.run.get("batch_per_replica", 1))

    def make(self, size):
        """A new solver for this batch size: weights 0, no momentum."""
        # the old one first: one set of weights and activations at a time
        self.training = self.solver = self.counter = None
        self.inference = {}
        description = layers.describe(self.spec, size, training=True)
        with written(self.solver_proto(description.proto)) as path:
            self.solver = caffe.SGDSolver(path)
        self.training = Graph(description, lambda: self.solver.net)
        self.slots = description.slots
        self.classes = self.spec["loss"]["op"] == "softmax_cross_entropy"
        trained = [parameter["name"] for parameter in self.trained_parameters()]
        self.probed = self.blob(trained[-1]) if trained else None
        params, blobs = self.training.net.params, self.training.net.blobs
        self.unasked = [params[layer][index] for layer, index in description.unasked]
        self.carried = [(params[layer][0], blobs[following]) for layer, following in description.carried]
        self.started = False

    def solver_proto(self, net):
        """Caffe's SGD is the spec's: V = momentum·V + rate·(g + decay·w), w −= V, the same while the rate stays.

        It clips the norm of all gradients before it adds the decay; those of parameters with lr_mult 0 stay 0.
        """
        wanted = self.run["optimizer"]
        solver = caffe.proto.caffe_pb2.SolverParameter()
        solver.train_net_param.CopyFrom(net)
        solver.type = "SGD"
        solver.lr_policy = "fixed"
        solver.base_lr = wanted["learning_rate"]
        solver.momentum = wanted["momentum"]
        solver.weight_decay = wanted["weight_decay"]
        if wanted["clip_norm"] is not None:
            solver.clip_gradients = wanted["clip_norm"]
        solver.max_iter = 2 ** 31 - 1
        solver.snapshot_after_train = False
        solver.solver_mode = solver.GPU if self.gpu else solver.CPU
        return solver

    def blob(self, name):
        layer, index = self.slots[name]
        return self.training.net.params[layer][index]

    def graph_for(self, size):
        """The net that trains, remade where the batches are of another size than the run said."""
        if size != self.training.description.batch:
            if self.started:
                raise ValueError("caffe: the batch size can not change from %d to %d" % (self.training.description.batch, size))
            arrays = self.read()
            self.make(size)
            self.put(arrays)
        return self.training

    def inference_for(self, size):
        """The net that evaluates batches of this size, with the weights of the one that trains."""
        if size not in self.inference:
            description = layers.describe(self.spec, size, training=False)
            # Nets in a NetVec get a new wrapper each time they are asked for: see Graph.give
            vector = caffe._caffe.NetVec()
            with written(description.proto) as path:
                vector.append(caffe.Net(path, caffe.TEST))
            vector[0].share_with(self.solver.net)
            self.inference[size] = Graph(description, lambda: vector[0])
        return self.inference[size]

    # -- parameters and states ---------------------------------------------------------------------------------------------
    def load(self, arrays):
        if set(arrays) != set(self.slots):
            raise ValueError("caffe: load needs exactly these arrays, wrong: %s" % sorted(set(arrays) ^ set(self.slots)))
        for name, shape in self.shapes.items():
            if tuple(arrays[name].shape) != shape:
                raise ValueError("caffe: %s has shape %s, not %s" % (name, shape, tuple(arrays[name].shape)))
        if self.started:  # Python can not reach the solver's momentum
            self.make(self.training.description.batch)
        self.put(arrays)
        # the same dropout masks after every load
        caffe.set_random_seed(self.run["seed"] % 2 ** 32)

    def put(self, arrays):
        gates = self.training.description.gates
        for name in self.slots:
            data = self.blob(name).data
            array = reordered(arrays[name], LSTM_GATES, CAFFE_GATES) if name in gates else arrays[name]
            data[...] = array.reshape(data.shape)

    def read(self):
        return {name: self.canonical(name, self.blob(name).data) for name in self.slots}

    def canonical(self, name, array):
        """A copy in the spec's shape and order."""
        if name in self.training.description.gates:
            array = reordered(array, CAFFE_GATES, LSTM_GATES)
        return numpy.array(array).reshape(self.shapes[name])

    # -- one batch ---------------------------------------------------------------------------------------------------------
    def to_device(self, inputs, targets):
        """Copies only what is not float32 yet; class indices become float32, as Caffe's losses take them (exact below 2**24)."""
        description = self.training.description
        inputs = numpy.ascontiguousarray(inputs, "float32")
        shape = (inputs.shape + (1, 1))[:4] if inputs.ndim < 4 else inputs.shape
        labels = numpy.zeros((len(inputs), 1, 1, 1), "float32")
        if self.spec["target"]["kind"] not in ("class", "values"):
            targets = None
        elif description.labelled:
            labels[:, 0, 0, 0] = targets
            targets = None
        else:
            targets = numpy.ascontiguousarray(targets.swapaxes(0, 1) if description.time_major else targets, "float32")
        return Batch(inputs.reshape(shape), labels, targets)

    def step(self, batch):
        graph = self.graph_for(batch.size)
        self.started = True
        loss = self.backward(graph, batch)
        correct = self.count_correct(graph, batch) if self.with_accuracy else None
        self.solver.apply_update()
        self.carry()
        return loss, correct

    def gradient(self, batch):
        loss = self.backward(self.graph_for(batch.size), batch)
        self.carry()
        return loss, None

    def backward(self, graph, batch):
        """Forward and backward; the mean loss."""
        graph.give(batch)
        net, last = graph.net, graph.loss
        net.clear_param_diffs()
        loss = net._forward(0, last)
        net._backward(last, 0)
        for blob in self.unasked:
            blob.diff[...] = 0
        return loss

    def carry(self):
        """The running statistics take the values that the forward pass computed for them."""
        for running, following in self.carried:
            running.data[...] = following.data

    def count_correct(self, graph, batch):
        """Right answers of the last forward pass, by a net of an Accuracy layer alone: the one that trains is spared its split."""
        if not self.classes:
            return 0.0
        if self.counter is None:
            with written(nets.counting_net(graph.output.data.shape)) as path:
                self.counter = caffe.Net(path, caffe.TEST)
        blobs = self.counter.blobs
        blobs["output"].data[...] = graph.output.data
        blobs["targets"].data.reshape(-1)[:] = (batch.labels if batch.targets is None else batch.targets).reshape(-1)
        self.counter.forward()
        return float(round(float(blobs["right"].data) * blobs["targets"].count))

    def forward(self, batch):
        graph = self.inference_for(batch.size)
        graph.give(batch)
        graph.net._forward(0, graph.loss - 1)
        return float(graph.output.data.flat[0]), None

    def sync(self):
        if self.gpu:  # stopping waits for an event behind everything queued
            self.timer.start()
            self.timer.stop()

    def value(self, handle):
        return handle

    def probe(self):
        return float(self.probed.data.flat[0]) if self.probed is not None else 0.0

    def evaluate(self, batch):
        graph = self.inference_for(batch.size)
        graph.give(batch)
        loss = graph.net._forward(0, graph.last)
        if not self.classes:
            return loss, 0
        answers = graph.output.count // graph.output.shape[-1]
        return loss, int(round(float(graph.net.blobs["loss/right"].data) * answers))

    # -- for the ladder -------------------------------------------------------------------------------------------------------
    def output(self, batch, training):
        if not training:
            self.forward(batch)
            return self.inference_for(batch.size).read_output()
        graph = self.graph_for(batch.size)
        graph.give(batch)
        graph.net._forward(0, graph.loss)
        return graph.read_output()

    def gradients(self, batch):
        self.backward(self.graph_for(batch.size), batch)
        return {p["name"]: self.canonical(p["name"], self.blob(p["name"]).diff) for p in self.trained_parameters()}

    # -- facts ------------------------------------------------------------------------------------------------------------------
    def effective(self):
        found = {
            "device": "gpu 0" if self.gpu else "cpu",
            "precision": "fp32",
            # nothing on the CPU depends on the order in which threads finish
            "deterministic": not self.gpu,
            "memory_format": "contiguous",
            "compile": "off",
            "autotune": False,
        }
        if any(op["op"] == "batch_norm" for op in self.spec["ops"]):
            found["batch_norm"] = "Reduction, Bias, Power and Scale (BatchNorm can not train)"
        if openblas() is not None:
            found["threads"] = openblas().openblas_get_num_threads()
        return found

    # is_oom: Caffe ends the process where memory is not enough; the driver reads it from stderr.


def openblas():
    """The OpenBLAS inside (or linked with) Caffe's library, or None where it has another BLAS."""
    library = ctypes.CDLL(caffe._caffe.__file__)
    return library if hasattr(library, "openblas_get_num_threads") else None


def has_gpu_code(path):
    """False when the library at `path` was compiled without CUDA (CPU_ONLY)."""
    with open(path, "rb") as source:
        with contextlib.closing(mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)) as text:
            return text.find(NO_GPU) < 0


def reordered(array, have, want):
    """Rows in blocks of one per gate, from one order of the gates to another."""
    blocks = numpy.split(array, len(have))
    return numpy.concatenate([blocks[have.index(gate)] for gate in want])


@contextlib.contextmanager
def written(proto):
    """The path of a file with this message as text, for as long as the block lasts: Caffe reads nets and solvers from files."""
    with tempfile.NamedTemporaryFile("w", suffix=".prototxt") as file:
        file.write(str(proto))
        file.flush()
        yield file.name
