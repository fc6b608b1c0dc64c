"""The description (NetParameter) of a Caffe net for one batch size, written with NetSpec. The ops' layers are in `caffe_layers`."""

import caffe

from .base import Unsupported

#: the most numbers in a blob (INT_MAX): Caffe ends the process where it would be larger
MOST = 2 ** 31 - 1
#: ops that treat every time step alike, and so keep the order of the two first axes
EACH_STEP = ("linear", "tied_linear", "relu", "tanh", "sigmoid", "gelu", "dropout", "softmax", "layer_norm", "add", "embedding")


def size_of(shape):
    size = 1
    for length in shape:
        size *= length
    return size


class NoLayer(Exception):
    """This build of Caffe does not have the layer."""


class Layers(object):
    """caffe.layers of those layers that this build has: Caffe ends the process where it does not know one."""

    known = frozenset(caffe.layer_type_list())

    def __getattr__(self, name):
        if name not in self.known:
            raise NoLayer(name)
        return getattr(caffe.layers, name)


L = Layers()


class Description(object):
    """A net for `batch` samples, for training (with the loss) or for inference and evaluation (with the right answers, too).

    `proto` describes its layers. `slots` maps the spec's parameter and state names to (layer, index of the blob); `gates` names
    the parameters whose rows are an LSTM's gates; `unasked` are the slots of frozen parameters whose gradient Caffe computes all
    the same; `carried` are (layer with a running statistic, blob with its next value). Where the spec has an LSTM, values run
    through the net as (T, N, …), as Caffe's LSTM takes them; `time_major` says whether the output does, and so the targets must.
    `builders`: {kind of op: function of this object, the op and its inputs that gives the op's layer}.
    """

    def __init__(self, spec, batch, training, builders):
        self.spec = spec
        self.builders = builders
        self.batch = batch
        self.training = training
        self.ops = {op["name"]: op for op in spec["ops"]}
        self.parameters = {parameter["name"]: parameter for parameter in spec["parameters"]}
        self.shapes = {"input": tuple(spec["input"]["shape"])}
        self.shapes.update((op["name"], tuple(op["shape"])) for op in spec["ops"])
        self.uses = {}
        for op in spec["ops"]:
            for name in op["inputs"]:
                self.uses[name] = self.uses.get(name, 0) + 1
        self.shared = set(op["tied"] + ".weight" for op in spec["ops"] if op["op"] == "tied_linear")
        self.slots, self.gates, self.unasked, self.carried = {}, set(), [], []
        self.net = caffe.NetSpec()
        self.values = {}  # (op's name, time major?): top
        self.major = {}  # op's name: whether it was made time major
        self.check_sizes()
        self.add_data()
        for op in spec["ops"]:
            self.add_op(op)
        self.add_loss()
        self.proto = self.net.to_proto()

    def check_sizes(self):
        sizes = [(name, self.batch * size_of(shape)) for name, shape in self.shapes.items()]
        sizes += [(name, size_of(parameter["shape"])) for name, parameter in self.parameters.items()]
        for name, size in sizes:
            if size > MOST:
                reason = "caffe: %s holds %d numbers with %d samples, a blob of Caffe at most %d" % (name, size, self.batch, MOST)
                raise Unsupported(reason, "lower batch_size")

    # Names of ops are letters, digits and _: a "/" keeps the names of the helpers apart.
    def put(self, name, top):
        """Name a layer and its top."""
        self.net[name] = top
        return top

    def add_data(self):
        """MemoryData takes the inputs and one class index per sample where they lie; other targets are copied into a blob."""
        shape, target = self.shapes["input"], self.spec["target"]["kind"]
        channels, height, width = shape if len(shape) == 3 else shape + (1, 1)
        data, label = L.MemoryData(batch_size=self.batch, channels=channels, height=height, width=width, ntop=2)
        self.net["input/data"], self.net["input/label"] = data, label
        out = self.shapes[self.spec["output"]]
        self.labelled = target == "class" and len(out) == 1
        recurrent = any(op["op"] == "lstm" for op in self.spec["ops"])
        if len(shape) == 1:
            data = self.put("input/flat", L.Flatten(data))
        self.values["input", False] = data
        self.major["input"] = self.spec["input"]["kind"] == "tokens" and recurrent
        if self.labelled:
            self.targets = label
        elif target in ("class", "values"):
            # its shape follows from the output's order: see add_loss
            self.targets = None
        else:
            self.targets = self.values["input", False]

    def add_op(self, op):
        name = op["name"]
        major = any(self.major[source] for source in op["inputs"]) if op["op"] in EACH_STEP else op["op"] == "lstm"
        inputs = [self.value(source, major) for source in op["inputs"]]
        self.major[name] = major
        try:
            self.values[name, major] = self.put(name, self.builders[op["op"]](self, op, *inputs))
        except NoLayer as error:
            reason = "caffe: %s %s needs the layer %s, which this build does not have" % (op["op"], name, error)
            raise Unsupported(reason) from None

    def value(self, name, major):
        """The top of an op as (N, T, …) or as (T, N, …)."""
        if (name, major) not in self.values:
            rank = len(self.shapes[name]) + 1
            other = L.Permute(self.values[name, not major], order=[1, 0] + list(range(2, rank)))
            self.values[name, major] = self.put(name + ("/time_first" if major else "/batch_first"), other)
        return self.values[name, major]

    def add_loss(self):
        """The mean over all samples and steps or elements; outside training also the share of right answers."""
        name, loss = self.spec["output"], self.spec["loss"]["op"]
        self.time_major = self.major[name]
        output = self.value(name, self.time_major)
        shape = (self.batch,) + self.shapes[name]
        if loss == "softmax_cross_entropy":
            shape = shape[:-1]
        if self.spec["target"]["kind"] == "op":
            self.targets = self.value(self.spec["target"]["name"], self.time_major)
        elif self.targets is None:
            if self.time_major:
                shape = (shape[1], shape[0]) + shape[2:]
            self.targets = self.put("loss/targets", L.Input(shape=[dict(dim=list(shape))]))
        if loss == "softmax_cross_entropy":
            self.put("loss/mean", L.SoftmaxWithLoss(output, self.targets, softmax_param=dict(axis=-1)))
            if not self.training:
                self.put("loss/right", L.Accuracy(output, self.targets, axis=-1))
        elif loss == "mean_squared_error":
            # EuclideanLoss is half the sum of squares over the length of the first axis
            first = self.shapes[name][0] if self.time_major else self.batch
            weight = 2.0 * first / (self.batch * size_of(self.shapes[name]))
            top = L.EuclideanLoss(output, self.targets, loss_weight=weight, propagate_down=[True, False])
            self.put("loss/mean", top)
        else:
            raise Unsupported("caffe has no mapping for loss %s" % loss)

    def blob_of(self, name):
        """The blob that holds an op's output (in-place layers have their input's)."""
        return next(layer.top[0] for layer in self.proto.layer if layer.name == name)

    # -- for the builders ----------------------------------------------------------------------------------------------
    def weights(self, op, layer, *suffixes):
        """`param` of a layer whose blobs are these parameters of the op, which are noted in `slots`."""
        entries = []
        for index, suffix in enumerate(suffixes):
            name = "%s.%s" % (op["name"], suffix)
            self.slots[name] = (layer, index)
            entries.append(self.entry(name))
        return entries

    def parameter(self, op, suffix, shape):
        """A blob of its own for a parameter or state of the op."""
        layer = "%s/%s" % (op["name"], suffix)
        self.slots["%s.%s" % (op["name"], suffix)] = (layer, 0)
        entry = self.entry("%s.%s" % (op["name"], suffix))
        return self.put(layer, L.Parameter(shape=dict(dim=list(shape)), param=[entry]))

    def entry(self, name):
        if name not in self.parameters:  # a state
            return dict(lr_mult=0.0, decay_mult=0.0)
        parameter = self.parameters[name]
        # lr_mult 0: the layer computes no gradient of it
        entry = dict(lr_mult=float(parameter.get("trained", True)), decay_mult=float(parameter["decay"]))
        if name in self.shared:
            entry["name"] = name
        return entry

    def alone(self, op):
        """True when no other op, nor the loss, looks at what this op is given."""
        source = op["inputs"][0]
        looked_at = (self.spec["output"], self.spec["target"].get("name"), "input")
        return self.uses[source] == 1 and source not in looked_at

    def made_by(self, op, kinds):
        source = op["inputs"][0]
        return source in self.ops and self.ops[source]["op"] in kinds

    def input_shape(self, op):
        return self.shapes[op["inputs"][0]]

    def constant(self, name, shape, value):
        return self.put(name, L.DummyData(shape=[dict(dim=list(shape))], data_filler=[dict(type="constant", value=value)]))

    def padded(self, x, name, shape, pads, value):
        """x, of this shape (N, C, H, W), with `pads` (top, bottom, left, right) of `value` around it, of constants and Concat."""
        samples, channels, height, width = shape
        top, bottom, left, right = pads

        def joined(x, word, axis, before, after, shape_of):
            if not before and not after:
                return x
            parts = [x]
            if before:
                parts.insert(0, self.constant("%s/%s_before" % (name, word), shape_of(before), value))
            if after:
                parts.append(self.constant("%s/%s_after" % (name, word), shape_of(after), value))
            return self.put("%s/%s" % (name, word), L.Concat(*parts, axis=axis))

        x = joined(x, "rows", 2, top, bottom, lambda count: (samples, channels, count, width))
        height += top + bottom
        return joined(x, "columns", 3, left, right, lambda count: (samples, channels, height, count))


def counting_net(shape):
    """A net of one Accuracy layer for outputs of this shape (the batch included), the classes last."""
    net = caffe.NetSpec()
    net.output = L.Input(shape=[dict(dim=list(shape))])
    net.targets = L.Input(shape=[dict(dim=list(shape[:-1]))])
    net.right = L.Accuracy(net.output, net.targets, axis=-1)
    return net.to_proto()
