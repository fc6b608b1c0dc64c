"""What the adapter of JAX does with its own process. Imports no JAX: flags are set before that."""

import os

#: XLA's compute threads on the CPU have this name
POOL = "tf_XLAEigen"


def add_xla_flag(flag):
    """XLA reads them when its first client is made; a user's own (framework.env) stay."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    if flag not in flags:
        os.environ["XLA_FLAGS"] = " ".join(flags + [flag])


def pool_threads():
    """How many compute threads XLA has on the CPU, counted in this process."""
    count = 0
    for thread in os.listdir("/proc/self/task"):
        try:
            with open("/proc/self/task/%s/comm" % thread) as source:
                count += source.read().strip() == POOL
        except (IOError, OSError):
            continue  # it ended meanwhile
    return count
