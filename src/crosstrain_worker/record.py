"""samples.<rank>.bin: one fixed-size row per measured piece of work, written through mmap.

A row is in the page cache as soon as `add` returns, so a worker that is killed (SIGKILL, out of memory) loses none. The layout is
the protocol of docs/design.md; the driver reads it with `crosstrain.samples`, which takes these constants.

What a reader may already look at (the count, a loss filled in later) is stored through memoryviews, as one aligned word.
struct.pack_into zeroes its target first: a worker killed in between would leave a count of 0. (Machines are little-endian here.)
"""

import mmap
import os
import struct

MAGIC = b"CTSAMPL1"
HEADER = struct.Struct("<8sIIq")  # magic, row size, header size, row count
HEADER_SIZE = 64  # zero padded
ROW = struct.Struct("<iiiiddddd")  # iteration, phase, size, epoch, start, duration, data_wait, loss, accuracy
ROW_SIZE = ROW.size
_COUNT_WORD = 16 // 8  # where things are, in words of 8 bytes
_ROWS_WORD, _ROW_WORDS, _LOSS_WORD = HEADER_SIZE // 8, ROW_SIZE // 8, 40 // 8

IMPORT, BUILD, FIRST_STEP, ITERATION, BLOCK, TRAIN, EVALUATE = range(7)
PHASES = ("import", "build", "first_step", "iteration", "block", "train", "evaluate")

NAN = float("nan")
CHUNK = 65536  # rows (3.7 MB); the least by which a full file grows
_pack_row = ROW.pack_into


class Recorder(object):
    """The samples file of one rank, created anew. `count` is the number of rows written so far.

    Raises OSError (with the path) when the file can not be made or the disk is full; never in `add` while room is reserved.
    """

    def __init__(self, path, capacity=CHUNK):
        self.path = path
        self.count = 0
        self._capacity = 0
        self._map = None
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            self._resize(max(1, capacity))
        except OSError:
            os.close(self._file)
            raise
        HEADER.pack_into(self._map, 0, MAGIC, ROW_SIZE, HEADER_SIZE, 0)

    def add(self, iteration, phase, size, epoch, start, duration, data_wait=0.0, loss=NAN, accuracy=NAN):
        """Append a row and return its index. About 1 µs (benchmarks/recording.py).

        iteration, phase (a constant of this module), size (iterations in this row) and epoch are int; start (time.perf_counter),
        duration and data_wait are seconds; accuracy is a fraction; NaN = unknown.
        """
        row = self.count
        if row == self._capacity:
            self.reserve(1)
        _pack_row(
            self._map, HEADER_SIZE + row * ROW_SIZE, iteration, phase, size, epoch, start, duration, data_wait, loss, accuracy
        )
        self.count = row + 1
        self._integers[_COUNT_WORD] = row + 1  # after the row: a reader never sees a row that is not whole
        return row

    def set_loss(self, row, loss, accuracy=NAN):
        """Fill in the loss and accuracy of an earlier row (its index, from `add`), once they were fetched from the device."""
        if not 0 <= row < self.count:
            raise IndexError("row %d of %s, which has %d" % (row, self.path, self.count))
        word = _ROWS_WORD + row * _ROW_WORDS + _LOSS_WORD
        self._doubles[word] = loss
        self._doubles[word + 1] = accuracy

    def reserve(self, rows):
        """Make room for `rows` more rows. Call it outside the clock: `add` then neither grows the file nor allocates."""
        if self.count + rows > self._capacity:
            self._resize(max(self.count + rows, self._capacity + CHUNK))

    def close(self):
        """Cut the file to the rows written. May be called twice."""
        if self._map is not None:
            self._unmap()
            os.ftruncate(self._file, HEADER_SIZE + self.count * ROW_SIZE)
            os.close(self._file)

    def _resize(self, capacity):
        old_end = HEADER_SIZE + self._capacity * ROW_SIZE if self._map is not None else 0
        end = HEADER_SIZE + capacity * ROW_SIZE
        try:
            # Real blocks, not a hole: on a full disk writing to a hole through mmap would end the process with SIGBUS.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, old_end, end - old_end)
            else:
                os.ftruncate(self._file, end)
            grown = mmap.mmap(self._file, end)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from None
        for page in range(-(-old_end // mmap.PAGESIZE) * mmap.PAGESIZE, end, mmap.PAGESIZE):
            grown[page] = 0  # take the page fault here, not inside the clock
        if self._map is not None:
            self._unmap()
        self._map, self._capacity = grown, capacity
        self._integers, self._doubles = memoryview(grown).cast("q"), memoryview(grown).cast("d")

    def _unmap(self):
        self._integers.release()
        self._doubles.release()
        self._map.close()
        self._map = None
