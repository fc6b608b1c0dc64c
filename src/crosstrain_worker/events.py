"""events.<rank>.jsonl: what the driver shows while a run lives, one JSON object a line."""

import json
import os
import time


class Events(object):
    def __init__(self, folder, rank):
        self._out = open(os.path.join(folder, "events.%d.jsonl" % rank), "w")

    def write(self, event, **fields):
        """Append `{"t": unix time, "event": event, …}` and hand it to the kernel at once: a killed worker loses nothing."""
        record = {"t": time.time(), "event": event}
        record.update(fields)
        self._out.write(json.dumps(record) + "\n")
        self._out.flush()

    def close(self):
        self._out.close()
