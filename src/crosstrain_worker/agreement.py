"""What all ranks of a run must decide alike: rank 0 decides, the others read it in the run folder. Always outside the clock.

Ranks that reduce gradients together must do the same number of iterations: in one more, a rank waits for the others for ever.
Each decision is a line `{"<what>": value}` of `decisions.jsonl`. One rank alone decides without a file.
"""

import json
import os
import time

FILE = "decisions.jsonl"
POLL_S = 0.001


class Agreement(object):
    """One rank's side. All ranks must ask for the same things in the same order."""

    def __init__(self, folder, rank, world_size):
        self.rank = rank
        # Every rank opens it for appending, so that it is there for whoever comes first; only rank 0 writes.
        self.file = open(os.path.join(folder, FILE), "a+b", buffering=0) if world_size > 1 else None
        self.read = 0
        self.rest = b""

    def share(self, what, decide, *arguments):
        """Rank 0's `decide(*arguments)` (of JSON types), on every rank. Raises RuntimeError where this rank is out of step."""
        if self.file is None:
            return decide(*arguments)
        if self.rank == 0:
            value = decide(*arguments)
            self.file.write(json.dumps({what: value}).encode() + b"\n")
            return value
        decision = json.loads(self.next_line().decode())
        if what not in decision:
            raise RuntimeError("rank %d is out of step: it came to %r when rank 0 decided %s" % (self.rank, what, decision))
        return decision[what]

    def next_line(self):
        """Waits as long as it takes: when rank 0 is gone, the driver stops the other ranks."""
        while True:
            line, newline, rest = self.rest.partition(b"\n")
            if newline:
                self.rest = rest
                return line
            self.file.seek(self.read)
            new = self.file.read()
            self.read += len(new)
            self.rest += new
            if not new:
                time.sleep(POLL_S)

    def close(self):
        if self.file is not None:
            self.file.close()
