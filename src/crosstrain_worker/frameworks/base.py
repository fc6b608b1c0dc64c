"""What a framework must be able to do. One subclass, named `Framework`, in one file `on_<name>.py`.

Everything here is called by `loop` (measuring and training) and `ladder` (parity). Arrays that cross this boundary are numpy,
in the spec's canonical layouts (NCHW, OIHW, (out, in)), float32 unless said otherwise.
"""

from crosstrain_worker import machines


class Unsupported(Exception):
    """This framework, here, can not do what the run asks. The cell ends as `unsupported`; `hint` may say how to get it."""

    def __init__(self, reason, hint=""):
        Exception.__init__(self, reason)
        self.reason = reason
        self.hint = hint


class Base(object):
    """Base class of the adapters.

    Order of the calls: `load_library`, `check`, `setup`, `build`, `load`, then steps. `run` is the parsed run.json, `spec` the
    network.
    """

    #: ops of the spec this adapter maps; anything else is Unsupported (checked by `check`)
    ops = frozenset()
    #: precisions per device kind
    precisions = {"cpu": ("fp32",), "gpu": ("fp32",)}
    #: values of framework.compile that mean something here
    compile_modes = ("off",)
    #: values of framework.memory_format that mean something here
    memory_formats = ("contiguous",)
    #: most replicas this adapter can drive natively
    max_replicas = 1
    #: how many of a run's replicas one rank drives natively: `one` or `all`; conf/framework/<name>.yaml says the same to the driver
    replicas_per_rank = "one"
    #: whether its own way of reducing gradients reaches over several machines; Horovod's does
    several_machines = False
    #: whether it keeps parameters with `trained: false` as they are loaded, and takes an op of the network as the target
    frozen_parameters = False
    #: named differences from the spec that can not be configured away: {op or parameter: words}
    deviations = {}

    def __init__(self, run):
        self.run = run
        self.spec = run["network"]
        self.deviations = {}
        #: gradients are reduced by Horovod, which has one replica in each rank
        self.horovod = run.get("parallelism") == "horovod"
        if self.horovod:
            self.replicas_per_rank = "one"
        #: this worker's rank, set by the session
        self.rank = 0
        #: share(what, decide): what rank 0 decides, on every rank; set by the session
        self.share = None
        #: the phase the run is in, set by the session
        self.phase = "import"
        #: set by the loop: also compute the number of correct answers in each step
        self.with_accuracy = False

    # -- before anything is built -------------------------------------------------------------------------------------
    def load_library(self):
        """Import the framework. Timed apart (`import_s`). Thread settings that must precede the import go here."""
        raise NotImplementedError

    def versions(self):
        """{"framework": "2.13.0", ...}: the framework's version and those of what it computes with (BLAS, CUDA, cuDNN)."""
        raise NotImplementedError

    def check(self):
        """Raise Unsupported when this run can not be done here. Called after the import, before anything is built."""
        run = self.run
        name = run["framework"]["name"]
        for op in self.spec["ops"]:
            if op["op"] not in self.ops:
                raise Unsupported("%s has no mapping for op %s (%s)" % (name, op["op"], op["name"]))
        frozen = len(self.trained_parameters()) < len(self.spec["parameters"]) or self.spec["target"]["kind"] == "op"
        if frozen and not self.frozen_parameters:
            raise Unsupported("%s: this adapter can not freeze parameters, as network %s asks" % (name, self.spec["name"]))
        checks = (
            ("precision", run["precision"], self.precisions.get(run["device"], ())),
            ("framework.compile", run["framework"].get("compile", "off"), self.compile_modes),
            ("framework.memory_format", run["framework"].get("memory_format", "contiguous"), self.memory_formats),
        )
        for key, value, allowed in checks:
            if value not in allowed:
                raise Unsupported(
                    "%s can not do %s=%s on %s" % (name, key, value, run["device"]),
                    "it can do %s" % (", ".join(allowed) or "nothing there"),
                )
        nodes = machines.nodes(run)
        if nodes > 1 and not (self.several_machines or self.horovod):
            raise Unsupported(
                "crosstrain drives %s's own data parallelism on one machine only, asked for %d" % (name, nodes),
                "launcher.nodes=1, or parallelism=horovod where the framework has it",
            )
        if run["replicas"] > self.max_replicas:
            raise Unsupported("%s drives at most %d replica here, asked for %d" % (name, self.max_replicas, run["replicas"]))
        ranks = run["replicas"] if self.replicas_per_rank == "one" else nodes
        if run["world_size"] != ranks:
            raise Unsupported(
                "%s needs %d ranks for replicas=%d, it got %d" % (name, ranks, run["replicas"], run["world_size"]),
                "framework.replicas_per_rank=%s" % self.replicas_per_rank,
            )

    @property
    def local_rank(self):
        """This worker's number among those of its machine: which of the devices it takes."""
        return machines.local_rank(self.run, self.rank)

    def trained_parameters(self):
        """The spec's entries of the parameters that are trained; the others are loaded and stay as they are."""
        return [parameter for parameter in self.spec["parameters"] if parameter.get("trained", True)]

    def declare_own_statistics(self):
        """With several replicas, each normalises its own part of the batch: declare it for every batch norm."""
        if self.run["replicas"] < 2:
            return
        words = "statistics are each replica's own, evaluation takes those of the first"
        for op in self.spec["ops"]:
            if op["op"] == "batch_norm":
                before = self.deviations.get(op["name"])
                self.deviations[op["name"]] = before + "; " + words if before else words

    # -- set up ----------------------------------------------------------------------------------------------------------
    def setup(self):
        """Device, threads, precision, seed, determinism; with several ranks, the process group."""
        raise NotImplementedError

    def build(self):
        """The network, the loss and the optimiser, from the spec, with the framework's own layers."""
        raise NotImplementedError

    def load(self, arrays):
        """Set parameters and states ({name: float32 array}, the spec's names) and forget the optimiser's state."""
        raise NotImplementedError

    def read(self):
        """{name: float32 array} of all parameters and states, in the canonical layouts; of the rank's first replica.

        Also between `build` and `load`, when the values mean nothing yet.
        """
        raise NotImplementedError

    def read_replicas(self):
        """What `read` gives, of every replica of this rank."""
        return [self.read()]

    # -- one batch ---------------------------------------------------------------------------------------------------------
    def to_device(self, inputs, targets):
        """The rank's batch on its device(s), in whatever form `step` takes. May be asynchronous."""
        raise NotImplementedError

    def step(self, batch):
        """Forward, backward, reduction, update. Returns (loss handle, correct handle or None); does not wait.

        Loss and correct answers are the rank's. The gradient that is clipped and applied is that of the mean loss over the global
        batch: the replicas have equal shares of it, so it is the mean of theirs.
        """
        raise NotImplementedError

    def gradient(self, batch):
        """Forward, backward, reduction, no update. Returns (loss handle, None); does not wait."""
        raise NotImplementedError

    def forward(self, batch):
        """Inference: the output alone, no loss, evaluation mode, no gradient bookkeeping. Returns (output handle, None)."""
        raise NotImplementedError

    def sync(self):
        """Wait until everything queued on every used device is done."""
        raise NotImplementedError

    def meet(self):
        """Wait until all ranks are here. Outside the clock; nothing to do for frameworks whose ranks do not wait for each other."""

    def value(self, handle):
        """A Python float of a loss or correct handle (for an output handle of `forward`: its first element)."""
        raise NotImplementedError

    def probe(self):
        """Host read-back of one element of one updated parameter from every device (a float). Cheap once everything is done."""
        raise NotImplementedError

    def evaluate(self, batch):
        """(mean loss as float, correct answers as int) of one batch in evaluation mode. Waits."""
        raise NotImplementedError

    # -- for the ladder -------------------------------------------------------------------------------------------------------
    def output(self, batch, training):
        """float32 array of the network's output (logits) for one batch, in training or evaluation mode, without any update."""
        raise NotImplementedError

    def executed_flops(self, batch):
        """{kernel: FLOPs} of one training iteration, as the framework itself counts what it executes; None where it can not."""
        return None

    def gradients(self, batch):
        """{name: float32 array}: the loss's gradient of every trained parameter (before clipping and weight decay). No update."""
        raise NotImplementedError

    # -- facts ------------------------------------------------------------------------------------------------------------------
    def peak_memory_mb(self):
        """The framework's own peak of device memory in MB (1e6 bytes), or None when it can not tell."""
        return None

    def effective(self):
        """Settings read back from the framework after setup: {"threads": 2, "deterministic": False, ...}."""
        return {}

    def is_oom(self, error):
        """True when this exception means that device memory was not enough."""
        return False

    def close(self):
        """Leave process groups and the like."""
