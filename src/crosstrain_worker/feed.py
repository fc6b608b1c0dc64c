"""Batches of the run's data, the same in the same order for every framework.

Epoch e takes the samples in the order of `RandomState(seed + e).permutation(n)`, drops the last partial batch, and rank r
takes the r-th contiguous slice of each global batch. Where the data name more `samples` than their files hold (synthetic ones, for
large batches), an epoch goes through that order again and again until it has had as many.

A batch is `(inputs, targets)`: inputs C-contiguous float32 in the network's input shape, `float32(x) * scale[c] + offset[c]`, or
int32 tokens; targets int64 or float32 as stored, or the inputs themselves where the run names no targets.
"""

import itertools
import queue
import threading
import weakref

import numpy

PREFETCH = 2  # batches made ahead
RING_BYTES = 512 * 1000 * 1000  # of inputs on the device, when the data set is larger


class Feed(object):
    """The training batches of one rank, and the test batches.

    Attributes: `batch` (samples per rank), `batches_per_epoch`. Raises ValueError where the data does not fit the run.
    """

    def __init__(self, run, rank):
        self.run = run
        self.seed = run["seed"]
        self.batch_global = run["batch_global"]
        ranks = run["world_size"]
        if self.batch_global % ranks:
            raise ValueError("batch_size: a global batch of %d can not be split evenly over %d ranks" % (self.batch_global, ranks))
        self.batch = self.batch_global // ranks
        self.first = rank * self.batch
        self.train = _Split(run, "train")
        self.batches_per_epoch = self.train.count // self.batch_global
        if not self.batches_per_epoch:
            raise ValueError(
                "batch_size: a global batch of %d is larger than data %s (%d training samples)"
                % (self.batch_global, run["data"]["name"], self.train.count)
            )
        self._prefetches = weakref.WeakSet()

    def epoch(self, epoch):
        """Iterator over the `batches_per_epoch` batches of this epoch (0, 1, …), made ahead by a thread."""
        return self._prefetched(self._epoch(epoch))

    def endless(self):
        """Iterator over epoch 0, 1, 2, … without an end, made ahead by a thread."""
        return self._prefetched(self._endless())

    def ring(self, size=None):
        """List of the first `size` batches, at least 2 and all different where the data has 2, for keeping on the device.

        Without `size`: all of epoch 0, up to 512 MB of inputs.
        """
        if size is None:
            size = min(self.batches_per_epoch, RING_BYTES // (self.batch * self.train.sample_bytes))
        return list(itertools.islice(self._endless(), max(2, size)))

    def test_batches(self, batch=None):
        """Iterator over the whole test set in its stored order (every rank sees all of it); the last batch may be smaller.

        `batch`: samples each, default the rank's batch. Raises ValueError when there is no test set.
        """
        if not self.run["data"]["test"]:
            raise ValueError("data %s has no test set" % self.run["data"]["name"])
        batch = batch or self.batch
        test = _Split(self.run, "test")
        starts = range(0, test.count, batch)
        return self._prefetched(test.take(numpy.arange(i, min(i + batch, test.count))) for i in starts)

    def close(self):
        """Stop all threads that still make batches and wait for them. The iterators end."""
        for prefetch in list(self._prefetches):
            prefetch.close()

    def _epoch(self, epoch):
        # RandomState takes seeds below 2**32.
        order = numpy.random.RandomState((self.seed + epoch) % 2 ** 32).permutation(self.train.stored)
        for index in range(self.batches_per_epoch):
            start = index * self.batch_global + self.first
            yield self.train.take(order.take(numpy.arange(start, start + self.batch), mode="wrap"))

    def _endless(self):
        return itertools.chain.from_iterable(self._epoch(epoch) for epoch in itertools.count())

    def _prefetched(self, batches):
        prefetch = Prefetch(batches)
        self._prefetches.add(prefetch)
        return prefetch


class _Split(object):
    """The mmapped arrays of one split (`train` or `test`): `stored` samples, which count as `count`."""

    def __init__(self, run, split):
        data, network = run["data"], run["network"]["input"]
        self.inputs = _opened(data[split]["inputs"])
        self.targets = _opened(data[split]["targets"]) if data[split]["targets"] else None
        self.stored = len(self.inputs)
        self.count = data[split].get("samples", self.stored)
        self.tokens = network["kind"] == "tokens"
        self.shape = tuple(network["shape"])
        stored = self.inputs.shape[1:]
        flattened = network["kind"] == "vector" and _size(stored) == _size(self.shape)
        if stored != self.shape and not flattened:
            raise ValueError(
                "data %s has samples of shape %s, the network takes %s" % (data["name"], list(stored), list(self.shape))
            )
        if self.targets is not None and len(self.targets) != self.stored:
            raise ValueError(
                "data %s has %d inputs and %d targets (%s)" % (data["name"], self.stored, len(self.targets), split)
            )
        self.scale = _per_channel(data["scale"], stored, 1)
        self.offset = _per_channel(data["offset"], stored, 0)
        self.sample_bytes = 4 * _size(self.shape)

    def take(self, indices):
        """(inputs, targets) of these samples, as the network takes them."""
        inputs = numpy.take(self.inputs, indices, axis=0)
        if self.tokens:
            inputs = inputs.astype(numpy.int32, copy=False)
        else:
            inputs = inputs.astype(numpy.float32, copy=False)
            if self.scale is not None:
                inputs *= self.scale
            if self.offset is not None:
                inputs += self.offset
        inputs = numpy.ascontiguousarray(inputs.reshape((len(indices),) + self.shape))
        if self.targets is None:
            return inputs, inputs
        return inputs, numpy.take(self.targets, indices, axis=0)


def _opened(path):
    # asarray: a plain array over the same mapping, so that no framework meets a numpy.memmap.
    return numpy.asarray(numpy.load(path, mmap_mode="r", allow_pickle=False))


def _size(shape):
    return int(numpy.prod(shape, dtype=numpy.int64))


def _per_channel(values, shape, neutral):
    """float32 array that broadcasts over samples of this shape along their first axis; None where all values are `neutral`."""
    if all(value == neutral for value in values):
        return None
    return numpy.asarray(values, numpy.float32).reshape((-1,) + (1,) * (len(shape) - 1))


class Prefetch(object):
    """Iterator over `batches` that a daemon thread runs through up to 2 items ahead. What it raises comes out of `next`.

    The thread ends with the items, at `close()`, or when this iterator is forgotten: it keeps no reference to it.
    """

    def __init__(self, batches):
        self._queue = queue.Queue(PREFETCH)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=_pump, args=(iter(batches), self._queue, self._stop), name="crosstrain-feed")
        self._thread.daemon = True
        self._thread.start()

    def __iter__(self):
        return self

    def __next__(self):
        if self._ended:
            raise StopIteration
        item, error = self._queue.get()
        if error is None:
            return item
        self._ended = True
        self._thread.join()
        raise error

    def close(self):
        """Stop the thread and wait until it has ended (at most one batch long)."""
        self._release()
        self._thread.join()

    def _release(self):
        self._ended = True
        self._stop.set()
        # The thread may wait for room in the queue; after `stop` it puts at most one more item, which finds room then.
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            pass

    def __del__(self):
        if hasattr(self, "_thread"):
            self._release()


def _pump(batches, items, stop):
    """Put (item, None) for every batch, at last (None, error): StopIteration at the end."""
    error = StopIteration()
    try:
        for item in batches:
            items.put((item, None))
            if stop.is_set():
                return
    except BaseException as caught:
        error = caught
    items.put((None, error))
