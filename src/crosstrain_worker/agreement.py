"""What all ranks of a run must decide alike: rank 0 decides, the others read it in the run folder. Always outside the clock.

Ranks that reduce gradients together must do the same number of iterations: in one more, a rank waits for the others for ever.
Each decision is a line `{"<what>": value}` of `decisions.jsonl`. One rank alone decides without a file. Ranks on several machines get
the lines over TCP, too: a file system that they share may show them seconds later.
"""

import json
import os
import socket
import time

from crosstrain_worker import machines

FILE = "decisions.jsonl"
#: host and port at which rank 0 tells the other machines
ADDRESS = "agreement"
POLL_S = 0.001
NEW_FILE_POLL_S = 0.1


class Agreement(object):
    """One rank's side. All ranks must ask for the same things in the same order."""

    def __init__(self, folder, rank, world_size, link=None):
        """`link`: a `Listener` for rank 0, a `Line` for the others, where they are on several machines."""
        self.rank = rank
        # Every rank opens it for appending, so that it is there for whoever comes first; only rank 0 writes.
        self.file = open(os.path.join(folder, FILE), "a+b", buffering=0) if world_size > 1 else None
        self.link = link
        self.read = 0
        self.rest = b""

    def share(self, what, decide, *arguments):
        """Rank 0's `decide(*arguments)` (of JSON types), on every rank. Raises RuntimeError where this rank is out of step."""
        if self.file is None:
            return decide(*arguments)
        if self.rank == 0:
            value = decide(*arguments)
            line = json.dumps({what: value}).encode() + b"\n"
            self.file.write(line)
            if self.link is not None:
                self.link.send(line)
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
            self.rest += self.new()

    def leave_together(self):
        """Returns when all ranks have called it. Of use between machines alone; on one it does nothing.

        A collective of the framework is not enough before a rank ends what the others need (a server, its own end of a connection):
        it can be over for this rank while its last message to another is still on its way.
        """
        if self.link is None:
            return
        if self.rank == 0:
            self.link.hear()
        else:
            self.link.tell()
        self.share("leave", lambda: True)

    def stay_for_the_others(self):
        """Rank 0, of several machines: returns when the other ranks' processes have ended.

        TensorFlow's and JAX's coordinator lives in rank 0, and a rank that sees it go ends itself, perhaps before it has told its result.
        """
        if self.rank == 0 and self.link is not None:
            self.link.hear()  # they say no more: what comes is that the kernel has closed the connection

    def new(self):
        """What came since the last time, perhaps nothing."""
        if self.link is not None:
            return self.link.receive()
        self.file.seek(self.read)
        new = self.file.read()
        self.read += len(new)
        if not new:
            time.sleep(POLL_S)
        return new

    def close(self):
        if self.file is not None:
            self.file.close()


def link(run, rank):
    """The `link` of an Agreement: None on one machine."""
    if machines.nodes(run) == 1:
        return None
    return Listener(run) if rank == 0 else Line(run)


class Listener(object):
    """Rank 0's side: a free port, written into the run folder. Who comes must know the run's id."""

    def __init__(self, run):
        self.run, self.lines = run, []
        self.socket = socket.socket()
        self.socket.bind(("", 0))
        self.socket.listen(run["world_size"])
        path = os.path.join(run["folder"], ADDRESS)
        with open(path + ".tmp", "w") as out:
            out.write("%s %d" % (run["address"], self.socket.getsockname()[1]))
        os.rename(path + ".tmp", path)

    def accept(self):
        """Waits until all others are here."""
        while len(self.lines) < self.run["world_size"] - 1:
            connection, _ = self.socket.accept()
            connection.settimeout(10)
            try:
                known = connection.recv(32, socket.MSG_WAITALL) == self.run["run_id"].encode()
            except OSError:
                known = False
            connection.settimeout(None)
            if known:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.lines.append(connection)
            else:
                connection.close()

    def send(self, line):
        """To all others."""
        self.accept()
        for connection in self.lines:
            try:
                connection.sendall(line)
            except OSError:  # that rank is gone, and the driver knows better why
                pass

    def hear(self):
        """Waits for one `tell` of each other, or its end."""
        self.accept()
        for connection in self.lines:
            try:
                connection.recv(1)
            except OSError:  # as above
                pass


class Line(object):
    """Another rank's side."""

    def __init__(self, run):
        self.run, self.socket = run, None

    def connect(self):
        if self.socket is None:
            self.socket = socket.create_connection(self.address())
            self.socket.sendall(self.run["run_id"].encode())

    def tell(self):
        """Rank 0 that this rank is here."""
        self.connect()
        try:
            self.socket.sendall(b".")
        except OSError:  # rank 0 is gone: as in `receive`
            pass

    def receive(self):
        self.connect()
        try:
            new = self.socket.recv(65536)
        except OSError:
            new = b""
        if not new:
            time.sleep(NEW_FILE_POLL_S)  # rank 0 is gone: the driver stops this one, and tells why
        return new

    def address(self):
        """Of rank 0. Listing the folder, unlike asking for a name, makes NFS look at once."""
        folder = self.run["folder"]
        while ADDRESS not in os.listdir(folder):
            time.sleep(NEW_FILE_POLL_S)
        with open(os.path.join(folder, ADDRESS)) as source:
            host, port = source.read().split()
        return host, int(port)
