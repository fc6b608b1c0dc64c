"""The timed loop: first step, iteration pass, block pass, then training with evaluation.

Clock: `time.perf_counter`, both ends after the adapter's sync(). Outside the clock: reading the loss back, recording, deciding.
Rank 0 decides for all ranks how many iterations come next (see `agreement`); in training their number is given.
"""

import gc
import itertools
import math
import os
import time

import numpy

from crosstrain_worker import feed as feeds
from crosstrain_worker import steady
from crosstrain_worker.record import BLOCK, EVALUATE, FIRST_STEP, ITERATION, TRAIN

clock = time.perf_counter
#: two clocks read within this are read at one moment; a read takes well under 1 us, 10 us where a hypervisor answers it
ONE_MOMENT_S = 1e-4
NAN = float("nan")
#: seconds of iterations between two looks at the series: a look costs some 10 ms of the host
CHECK_S = 0.25
#: after so many iterations the sync is looked at, and how long one takes is known well enough
FIRST = 5


class Diverged(Exception):
    """The loss is NaN or infinite."""


class ClockError(Exception):
    """What was timed can not have been the work."""


def measure_and_train(session, initial_arrays):
    """Everything between `build` and `done`: fills session.result (see result.py)."""
    run = session.run
    feed = feeds.Feed(run, session.rank)
    try:
        before = initial_arrays(run)
        measuring = Measuring(session, feed)
        session.timed("first_step", measuring.first_step)
        measuring.iteration_pass()
        measuring.block_pass()
        session.result["parameters_changed"] = changed(session, before) if run["task"] == "training" else None
        if run["epochs"] > 0:
            measuring.batches = None
            session.framework.load(before)
            train(session, feed)
    finally:
        feed.close()


def changed(session, before):
    """True when at least one parameter differs from `before` (the initial weights)."""
    now = session.framework.read()
    names = [entry["name"] for entry in session.run["network"]["parameters"]]
    return any(not numpy.array_equal(now[name], before[name]) for name in names)


def check_loss(value, session, iteration):
    if math.isnan(value) or math.isinf(value):
        raise Diverged("the loss became %r in phase %s, iteration %d" % (value, session.result["phase"], iteration))


def two_clocks():
    """(clock(), time.monotonic()) of one moment: read once more while something came between the two, as on a busy machine."""
    for _ in range(100):
        before, other, after = clock(), time.monotonic(), clock()
        if after - before < ONE_MOMENT_S:
            break
    return (before + after) / 2, other


class Measuring(object):
    """First step, iteration pass and block pass of one rank, over one endless stream of batches."""

    def __init__(self, session, feed):
        run = session.run
        self.session = session
        self.framework = session.framework
        self.settings = run["measure"]
        self.action = getattr(self.framework, {"training": "step"}.get(run["task"], run["task"]))
        self.has_loss = run["task"] != "forward"
        self.on_device = run["data"]["placement"] == "device"
        if self.on_device:
            ring = [self.framework.to_device(inputs, targets) for inputs, targets in feed.ring()]
            self.batches = itertools.cycle(ring)
        else:
            self.batches = feed.endless()
        self.iteration = 0

    def run_one(self, batch):
        """Everything of an iteration behind the fetch, without waiting."""
        if not self.on_device:
            batch = self.framework.to_device(*batch)
        return self.action(batch)

    def timed_iteration(self):
        """(start, duration, data_wait, loss handle) of one iteration with a sync at its end. Seconds."""
        start = clock()
        batch = next(self.batches)
        fetched = clock()
        handle, _ = self.run_one(batch)
        self.framework.sync()
        end = clock()
        return start, end - start, fetched - start, handle

    def first_step(self):
        """The first iteration: compilation, autotuning, allocation."""
        self.framework.meet()
        self.framework.sync()
        start, duration, wait, handle = self.timed_iteration()
        self.keep(FIRST_STEP, 1, start, duration, wait, self.loss_of(handle))

    def loss_of(self, handle):
        value = self.framework.value(handle)
        if self.has_loss:
            check_loss(value, self.session, self.iteration)
        return value if self.has_loss else NAN

    def keep(self, phase, size, start, duration, wait, loss):
        self.session.recorder.add(self.iteration, phase, size, 0, start, duration, wait, loss, NAN)
        self.iteration += size

    def iteration_pass(self):
        """One sync per iteration until the steady state is found (or the budget is spent)."""
        settings, agree = self.settings, self.session.agree
        self.session.enter("iteration", total=settings["iterations"], budget_s=steady.PASS_SHARE * settings["max_s"])
        gc.collect()
        durations, readbacks = [], []
        self.iteration = 0
        self.framework.meet()
        begin, monotonic = two_clocks()
        first, count = None, 1
        while count:
            chunk_begin = clock()
            for _ in range(count):
                start, duration, wait, handle = self.timed_iteration()
                first = start if first is None else first
                read = clock()
                loss = self.loss_of(handle)
                readbacks.append(clock() - read)
                durations.append(duration)
                self.keep(ITERATION, 1, start, duration, wait, loss)
                if len(durations) == FIRST:
                    self.check_sync(durations, readbacks)
            now = clock()
            count = agree("iterations", self.next_iterations, durations, now - begin, (now - chunk_begin) / count)
        now, ended = two_clocks()
        # From the first start to the last end: what lay before and behind, also an interruption, is not the pass's.
        self.session.result["wall_s"] = (ended - monotonic) - (first - begin) - (now - (start + duration))
        self.durations = numpy.array(durations)
        self.session.result["steady"] = agree("steady", self.find_start)
        self.use_start(self.session.result["steady"])

    def next_iterations(self, durations, elapsed_s, each_s):
        """How many iterations to do before the next look; 0 when the pass is over. each_s: what the last ones took, one by one."""
        done, asked = len(durations), self.settings["iterations"]
        if asked:
            return asked - done
        if steady.enough(durations, elapsed_s, self.settings):
            return 0
        return max(1, int(CHECK_S / each_s)) if done >= FIRST else 1

    def check_sync(self, durations, readbacks):
        """A sync that does not wait leaves the work to the read-back: seen early, before a block queues hours of it.

        The block pass has the fine test (2 %); this one only stops what is grossly wrong.
        """
        duration, readback = float(numpy.median(durations)), float(numpy.median(readbacks))
        if readback > max(duration, 0.001):
            raise ClockError(
                "sync() does not wait: reading the loss back took %.3g ms after an iteration of %.3g ms"
                % (1e3 * readback, 1e3 * duration)
            )

    def find_start(self):
        """Where the steady state starts: what was asked for, what was found, or for measure=smoke the last window."""
        settings = self.settings
        if settings["warmup"] is not None:
            found = steady.Steady(settings["warmup"], "measure.warmup")
        elif settings["steady_required"]:
            found = steady.find_steady(self.durations, settings["window"])
        else:
            found = steady.Steady(max(0, len(self.durations) - settings["window"]), "the last window, steadiness not required")
        start = found.start if found.start is not None else len(self.durations) // 2
        return {"start": start, "found": found.start is not None, "reason": found.reason}

    def use_start(self, found):
        start = found["start"]
        self.session.result["phases"]["warmup_s"] = float(self.durations[:start].sum())
        self.step_s = float(numpy.median(self.durations[start:]))

    def block_pass(self):
        """Blocks of at least block_s with one sync at each end: what an asynchronous framework really reaches."""
        settings, agree = self.settings, self.session.agree
        size = agree("block", self.block_size, self.step_s)
        self.session.enter("block", total=None, budget_s=steady.PASS_SHARE * settings["max_s"], size=size)
        readbacks, per_iteration = [], []
        self.framework.probe()
        self.framework.meet()
        cpu_before = thread_cpu_seconds()
        begin = clock()
        while size:
            start, duration, wait, handle = self.timed_block(size)
            read = clock()
            loss = self.loss_of(handle)
            self.framework.probe()
            readbacks.append((clock() - read) / duration)
            self.keep(BLOCK, size, start, duration, wait, loss)
            per_iteration.append(duration / size)
            size = agree("block", self.next_block, size, per_iteration, clock() - begin)
        result = self.session.result
        result["threads"] = busy_threads(cpu_before, thread_cpu_seconds(), clock() - begin)
        result["readback"] = readbacks
        result["ci_missed"] = not agree("narrow", self.narrow, per_iteration)

    def block_size(self, step_s):
        return steady.blocks(step_s, steady.PASS_SHARE * self.settings["max_s"], self.settings["block_s"])[0]

    def next_block(self, size, per_iteration, elapsed_s):
        """The next block's iterations, 0 when the pass is over."""
        settings = self.settings
        least_s, most_s = steady.PASS_SHARE * settings["min_s"], steady.PASS_SHARE * settings["max_s"]
        if elapsed_s >= most_s:
            return 0
        if elapsed_s >= least_s and len(per_iteration) >= settings["min_blocks"] and self.narrow(per_iteration):
            return 0
        # With a sync each the iterations took longer than in a block, which may have come out too short.
        return max(size, self.block_size(min(per_iteration)))

    def narrow(self, per_iteration):
        """True when the interval of the median is as narrow as is asked for."""
        settings = self.settings
        return bool(not settings["interval_required"] or steady.half_width(per_iteration) <= settings["ci_target"])

    def timed_block(self, size):
        batches, run_one = self.batches, self.run_one
        wait = 0.0
        start = clock()
        for _ in range(size):
            asked = clock()
            batch = next(batches)
            wait += clock() - asked
            handle, _ = run_one(batch)
        self.framework.sync()
        return start, clock() - start, wait, handle


def thread_cpu_seconds():
    """{thread id: CPU seconds} of this process, from /proc (user + system time)."""
    ticks = float(os.sysconf("SC_CLK_TCK"))
    seconds = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            with open("/proc/self/task/%s/stat" % thread) as source:
                fields = source.read().rsplit(")", 1)[1].split()
        except (IOError, OSError):
            continue  # it ended meanwhile
        seconds[thread] = (int(fields[11]) + int(fields[12])) / ticks
    return seconds


def busy_threads(before, after, wall_s):
    """What the threads of this process did over `wall_s`: CPU seconds together, and how many worked > 10 % of the time."""
    spent = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()]
    return {"cpu_s": sum(spent), "wall_s": wall_s, "busy": sum(1 for s in spent if s > 0.1 * wall_s)}


def train(session, feed):
    """`epochs` epochs from the initial weights, one sync per iteration; evaluation on the test set outside the clock."""
    run, framework, result = session.run, session.framework, session.result
    framework.with_accuracy = run["network"]["target"]["kind"] == "class"
    session.enter("train", total=run["epochs"] * feed.batches_per_epoch)
    trainer = Training(session, feed)
    result["epochs"], result["time_to_accuracy_s"] = [], None
    trained_s = 0.0
    for epoch in range(run["epochs"]):
        report = trainer.epoch(epoch)
        trained_s += report["train_s"]
        if run["data"]["test"]:
            session.enter("evaluate")
            report.update(evaluate(framework, feed, session.recorder, trainer.iteration, epoch))
            session.enter("train")
            reached = run["target_accuracy"] is not None and report["test_accuracy"] is not None
            if reached and result["time_to_accuracy_s"] is None and report["test_accuracy"] >= run["target_accuracy"]:
                result["time_to_accuracy_s"] = trained_s
        result["epochs"].append(report)
        session.events.write("epoch", **report)
    result["samples_seen"] = trainer.iteration * run["batch_global"]


class Training(object):
    def __init__(self, session, feed):
        self.session = session
        self.feed = feed
        self.iteration = 0

    def epoch(self, epoch):
        """Train one epoch. Returns {"epoch" (from 1), "loss", "accuracy" (means over its iterations), "train_s" (elapsed)}."""
        framework = self.session.framework
        losses, accuracies = [], []
        batches = self.feed.epoch(epoch)
        framework.meet()
        begin = clock()
        for _ in range(self.feed.batches_per_epoch):
            start = clock()
            batch = next(batches)
            fetched = clock()
            loss, correct = framework.step(framework.to_device(*batch))
            framework.sync()
            end = clock()
            value = framework.value(loss)
            check_loss(value, self.session, self.iteration)
            accuracy = NAN if correct is None else framework.value(correct) / batch[1].size
            self.session.recorder.add(
                self.iteration, TRAIN, 1, epoch, start, end - start, fetched - start, value, accuracy
            )
            losses.append(value)
            accuracies.append(accuracy)
            self.iteration += 1
        known = framework.with_accuracy
        return {
            "epoch": epoch + 1,
            "loss": float(numpy.mean(losses)),
            "accuracy": float(numpy.mean(accuracies)) if known else None,
            "train_s": clock() - begin,
        }


def evaluate(framework, feed, recorder, iteration, epoch):
    """{"test_loss", "test_accuracy" (fraction)} over the whole test set, the last, smaller batch included."""
    start = clock()
    losses = correct = count = answers = 0
    for inputs, targets in feed.test_batches():
        loss, right = framework.evaluate(framework.to_device(inputs, targets))
        losses += loss * len(inputs)
        correct += right
        count += len(inputs)
        answers += targets.size  # a language model answers at every token
    loss = losses / count
    accuracy = correct / float(answers) if framework.with_accuracy else None
    recorder.add(
        iteration, EVALUATE, 1, epoch, start, clock() - start, 0.0, loss, NAN if accuracy is None else accuracy
    )
    return {"test_loss": loss, "test_accuracy": accuracy}
