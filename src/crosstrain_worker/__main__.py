"""One rank of one run: `<interpreter> -u src/crosstrain_worker <run folder> <rank>`.

Started by path, so that any interpreter can run it without an installation. Exit code 0: result.<rank>.json says ok;
1: it says why not; anything else (a signal, 2): the process could not speak for itself.
"""

import os
import sys

PACKAGE = "crosstrain_worker"


def register_package():
    """Make `crosstrain_worker` importable although this folder was started as a script.

    Python put this folder first on sys.path, where our own files would shadow other modules of the same name: take it away.
    """
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]
    if PACKAGE in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        PACKAGE, os.path.join(here, "__init__.py"), submodule_search_locations=[here]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


def prepare_process(run, rank):
    """CPU affinity and thread variables: both must be set before numpy or a framework is imported."""
    threads = run["threads"]
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        os.environ.setdefault(variable, str(threads))
    cpus = run["cpus"]
    if cpus:
        share = len(cpus) // run["world_size"]
        os.sched_setaffinity(0, cpus[rank * share : (rank + 1) * share])
    from crosstrain_worker import machines

    machines.choose_gpus(run, rank)


def main(argv):
    if len(argv) != 3 or not argv[2].isdigit():
        sys.stderr.write("usage: python crosstrain_worker <run folder> <rank>\n")
        return 2
    folder, rank = argv[1], int(argv[2])
    register_package()
    import faulthandler
    import json

    faulthandler.enable()
    with open(os.path.join(folder, "run.json")) as source:
        run = json.load(source)
    if run["schema"] != 1:
        sys.stderr.write("run.json has schema %r; this worker reads 1\n" % run["schema"])
        return 2
    prepare_process(run, rank)
    from crosstrain_worker import session

    return session.work(run, rank)


if __name__ == "__main__":
    code = main(sys.argv)
    sys.stdout.flush()
    sys.stderr.flush()
    # Some frameworks hang or abort in their own exit handlers; everything of ours is written by now.
    os._exit(code)
