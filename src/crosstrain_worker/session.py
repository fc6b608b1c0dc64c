"""The order of events in one worker, and how each possible ending is written down."""

import importlib
import os
import platform
import sys
import time
import traceback

import numpy

from crosstrain_worker import ladder, loop, result
from crosstrain_worker.agreement import Agreement, link
from crosstrain_worker.events import Events
from crosstrain_worker.frameworks.base import Unsupported
from crosstrain_worker.record import Recorder


class Session(object):
    """What the phases share: the run, this rank, the files it writes, and the result so far."""

    def __init__(self, run, rank):
        self.run = run
        self.rank = rank
        self.folder = run["folder"]
        self.events = Events(self.folder, rank)
        self.recorder = Recorder(os.path.join(self.folder, "samples.%d.bin" % rank))
        self.agreement = Agreement(self.folder, rank, run["world_size"], link(run, rank))
        self.result = {
            "schema": result.SCHEMA,
            "status": "ok",
            "phase": "import",
            "message": "",
            "hint": "",
            "error_type": "",
            "versions": {"python": platform.python_version(), "numpy": numpy.__version__},
            "effective": {},
            "phases": {},
        }
        self.framework = None
        # Rows carry perf_counter; this turns them into unix time.
        host = os.environ.get("SLURMD_NODENAME") or platform.node()
        self.events.write("clock", unix_minus_perf_counter=time.time() - time.perf_counter(), host=host)

    def enter(self, phase, **fields):
        """A phase begins: told to the driver, kept for the result, and (for faults on request) to the framework."""
        self.result["phase"] = phase
        if self.framework is not None:
            self.framework.phase = phase
        self.events.write("phase", name=phase, **fields)

    def agree(self, what, decide, *arguments):
        """Rank 0's `decide(*arguments)` on every rank; they go on together. Outside the clock."""
        value = self.agreement.share(what, decide, *arguments)
        self.framework.meet()
        return value

    def timed(self, phase, work):
        """Run `work()` as a phase of its own and keep its seconds as `<phase>_s`."""
        self.enter(phase)
        start = time.perf_counter()
        value = work()
        self.result["phases"][phase + "_s"] = time.perf_counter() - start
        return value


def initial_arrays(run):
    """{name: float32 array} of the spec's parameters and states, cut out of the flat weights file."""
    network = run["network"]
    flat = numpy.load(run["weights"], mmap_mode="r")
    arrays, at = {}, 0
    for entry in network["parameters"] + network["states"]:
        size = 1
        for length in entry["shape"]:
            size *= length
        arrays[entry["name"]] = numpy.array(flat[at : at + size]).reshape(entry["shape"])
        at += size
    if at != flat.size:
        raise ValueError("weights file holds %d numbers, the network needs %d" % (flat.size, at))
    return arrays


def start(session):
    """import and build: afterwards the framework holds the network with the initial weights (mode `shapes`: with any)."""
    run = session.run
    module = importlib.import_module("crosstrain_worker.frameworks.on_" + run["framework"]["name"])
    framework = module.Framework(run)
    framework.rank = session.rank
    framework.share = session.agreement.share
    session.framework = framework
    session.timed("import", framework.load_library)
    session.result["versions"].update(framework.versions())
    session.events.write("versions", **session.result["versions"])
    framework.check()

    def build():
        framework.setup()
        framework.build()
        if run["mode"] != "shapes":
            framework.load(initial_arrays(run))

    session.timed("build", build)
    session.result["effective"] = framework.effective()
    session.result["deviations"] = "; ".join("%s: %s" % item for item in sorted(framework.deviations.items()))
    session.events.write("effective", **session.result["effective"])


def describe(session, error):
    """(status, message, hint) of an exception that ended the work."""
    if isinstance(error, Unsupported):
        return "unsupported", error.reason, error.hint
    if isinstance(error, loop.Diverged):
        return "diverged", str(error), "lower learning_rate, or check the data"
    if isinstance(error, loop.ClockError):
        return "invalid", str(error), ""
    # an adapter knows its errors once the framework is imported
    imported = session.framework is not None and session.result["phase"] != "import"
    out_of_memory = imported and session.framework.is_oom(error)
    if out_of_memory and session.run["device"] == "gpu":
        return "device_oom", first_line(error), "lower batch_size"
    if out_of_memory or isinstance(error, MemoryError):
        return "host_oom", first_line(error) or "out of host memory", "lower batch_size or free memory"
    return "failed", first_line(error), ""


def first_line(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:500] if lines else type(error).__name__


def with_network(session):
    """All modes but `ceilings`."""
    run = session.run
    start(session)
    if run["mode"] == "parity":
        session.enter("ladder")
        ladder.run(run, session.framework, session.rank)
    elif run["mode"] == "shapes":
        ladder.write_shapes(run, session.framework)
    else:
        loop.measure_and_train(session, initial_arrays)
    session.result["peak_memory_mb"] = session.framework.peak_memory_mb()


def work(run, rank):
    """Do one rank's whole work. Returns the process's exit code; never raises."""
    session = Session(run, rank)
    out = session.result
    try:
        if run["mode"] == "ceilings":
            name = "crosstrain_worker.frameworks.%s_ceilings" % run["framework"]["name"]
            session.timed("import", lambda: importlib.import_module(name)).measure(session)
        else:
            with_network(session)
        session.enter("done")
        if session.framework is not None:
            session.agreement.leave_together()
            session.framework.close()
    except BaseException as error:  # also SystemExit of a library: a worker always says how it ended
        out["status"], out["message"], out["hint"] = describe(session, error)
        out["error_type"] = type(error).__name__
        traceback.print_exc(file=sys.stderr)
        if session.framework is not None and out["status"] == "device_oom":
            out["peak_memory_mb"] = session.framework.peak_memory_mb()
    session.recorder.close()
    session.agreement.close()
    result.write(session.folder, rank, out)
    session.events.write("end", status=out["status"], phase=out["phase"])
    session.events.close()
    if out["status"] == "ok":  # else the others wait for this one until the driver stops them
        session.agreement.stay_for_the_others()
    return 0 if out["status"] == "ok" else 1
