"""The timed loop: first step, iteration pass, block pass, then training with evaluation.

Clock: `time.perf_counter`, both ends after the adapter's sync(). Outside the clock: reading the loss back, recording, deciding.
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
NAN = float("nan")


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
        settings = self.settings
        self.session.enter("iteration", total=settings["iterations"], budget_s=steady.PASS_SHARE * settings["max_s"])
        gc.collect()
        durations, readbacks = [], []
        self.iteration = 0
        begin = next_check = clock()
        monotonic = time.monotonic()
        while True:
            start, duration, wait, handle = self.timed_iteration()
            ended = time.monotonic()
            read = clock()
            loss = self.loss_of(handle)
            readbacks.append(clock() - read)
            durations.append(duration)
            self.keep(ITERATION, 1, start, duration, wait, loss)
            now = clock()
            if len(durations) == 5:
                self.check_sync(durations, readbacks)
            if settings["iterations"]:
                if len(durations) >= settings["iterations"]:
                    break
            elif now >= next_check:
                # The check costs time on the host between two iterations, so it is made a few times a second only.
                if steady.enough(durations, now - begin, settings):
                    break
                next_check = clock() + 0.25
        self.session.result["wall_s"] = ended - monotonic
        self.durations = numpy.array(durations)
        self.find_start()

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
        self.session.result["steady"] = {"start": start, "found": found.start is not None, "reason": found.reason}
        self.session.result["phases"]["warmup_s"] = float(self.durations[:start].sum())
        self.step_s = float(numpy.median(self.durations[start:]))

    def block_pass(self):
        """Blocks of at least block_s with one sync at each end: what an asynchronous framework really reaches."""
        settings = self.settings
        least_s, most_s = steady.PASS_SHARE * settings["min_s"], steady.PASS_SHARE * settings["max_s"]
        size, _ = steady.blocks(self.step_s, most_s, settings["block_s"])
        self.session.enter("block", total=None, budget_s=most_s, size=size)
        readbacks, per_iteration = [], []
        self.framework.probe()
        cpu_before = thread_cpu_seconds()
        begin = clock()
        while True:
            start, duration, wait, handle = self.timed_block(size)
            read = clock()
            loss = self.loss_of(handle)
            self.framework.probe()
            readbacks.append((clock() - read) / duration)
            self.keep(BLOCK, size, start, duration, wait, loss)
            per_iteration.append(duration / size)
            elapsed = clock() - begin
            narrow = not settings["interval_required"] or steady.half_width(per_iteration) <= settings["ci_target"]
            if elapsed >= most_s or (narrow and elapsed >= least_s and len(per_iteration) >= settings["min_blocks"]):
                break
            # With a sync each the iterations took longer than in a block, which may have come out too short.
            size = max(size, steady.blocks(min(per_iteration), most_s, settings["block_s"])[0])
        result = self.session.result
        result["threads"] = busy_threads(cpu_before, thread_cpu_seconds(), clock() - begin)
        result["readback"] = readbacks
        result["ci_missed"] = not narrow

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
        framework, run = self.session.framework, self.session.run
        losses, accuracies = [], []
        batches = self.feed.epoch(epoch)
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
            accuracy = NAN if correct is None else framework.value(correct) / run["batch_per_replica"]
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
    losses = correct = count = 0
    for inputs, targets in feed.test_batches():
        loss, right = framework.evaluate(framework.to_device(inputs, targets))
        losses += loss * len(inputs)
        correct += right
        count += len(inputs)
    loss = losses / count
    accuracy = correct / float(count) if framework.with_accuracy else None
    recorder.add(
        iteration, EVALUATE, 1, epoch, start, clock() - start, 0.0, loss, NAN if accuracy is None else accuracy
    )
    return {"test_loss": loss, "test_accuracy": accuracy}
