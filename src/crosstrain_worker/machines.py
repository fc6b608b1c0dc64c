"""Ranks on several machines: which of its machine's devices a rank has, and by which way the machines reach each other.

run.json has `nodes` (machines; the ranks lie in blocks, equally many on each), `address` (that of the first, where rank 0 is) and
`hosts` (their names where the user has given them, else empty).
"""

import os
import socket
import struct
import time


def nodes(run):
    return run.get("nodes", 1)


def ranks_here(run):
    """How many ranks each machine has."""
    return run["world_size"] // nodes(run)


def local_rank(run, rank):
    """The number of a rank among those of its machine."""
    return rank % ranks_here(run)


def choose_gpus(run, rank):
    """Which GPUs this process sees. On one machine the launcher has said it. Before anything is imported that looks.

    On several each machine has others: those of the first are leased by the driver, on the others Slurm has said which are the job's;
    without Slurm they are the first of the machine.
    """
    if nodes(run) == 1:
        return
    if run["device"] == "cpu" or rank < ranks_here(run):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(run["gpus"])
    elif run.get("hosts"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(run["replicas"] // nodes(run))))


def own_address(run):
    """That of this machine on the way to the first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((run["address"], 9))  # sends nothing
        return probe.getsockname()[0]


def addresses(run, rank):
    """`host:port` of every rank, for libraries that want to know them all; each port is free now. Waits for all ranks' files."""
    path = os.path.join(run["folder"], "address.%d")
    with open(path % rank + ".tmp", "w") as out:
        out.write("%s:%d" % (own_address(run), free_port()))
    os.rename(path % rank + ".tmp", path % rank)
    names = [os.path.basename(path % other) for other in range(run["world_size"])]
    while not set(names) <= set(os.listdir(run["folder"])):  # listing, unlike asking for a name, makes NFS look at once
        time.sleep(0.1)
    found = []
    for name in names:
        with open(os.path.join(run["folder"], name)) as source:
            found.append(source.read())
    return found


def interface(run):
    """The name of the network interface for gloo: the one by which this machine reaches the first; None where it is not to be found.

    On one machine the loopback: gloo would look for the address of the host's name, which is not always there.
    """
    if nodes(run) == 1:
        return "lo"
    import fcntl

    own = own_address(run)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                # SIOCGIFADDR, netdevice(7): a struct ifreq, the address behind 20 bytes
                found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found[20:24]) == own:
                return name
    return None


def prefer_interface(run, *variables):
    """Name the interface in these environment variables, unless the user has (framework.env)."""
    name = interface(run)
    if name is not None:
        for variable in variables:
            os.environ.setdefault(variable, name)


def free_port():
    """A TCP port of this machine that is free now, for libraries that do not take one themselves."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
