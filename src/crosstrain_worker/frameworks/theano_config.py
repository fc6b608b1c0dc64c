"""How Theano is configured: before its import, by environment variables. And where it keeps what it has compiled."""

import contextlib
import ctypes
import fcntl
import glob
import hashlib
import importlib.util
import os
import shutil
import sys

import numpy


def configure(threads):
    """Environment variables that Theano, g++ and OpenMP read. framework.env may add THEANO_FLAGS of its own."""
    home = compiled_folder()
    flags = [
        ("device", "cpu"),
        ("floatX", "float32"),
        ("mode", "FAST_RUN"),
        ("base_compiledir", home),
        # Keep the memory of intermediate results from step to step: up to a fifth faster, but twice the memory.
        # framework.env may give it back.
        ("allow_gc", "False"),
        ("scan.allow_gc", "False"),
        ("openmp", str(threads > 1)),
    ]
    if numpy_openblas():
        folder = os.path.join(home, "blas")
        link(numpy_openblas()._name, os.path.join(folder, "libopenblas.so"))
        # found by the linker; at run time the library is already loaded (by numpy), under the name it knows itself by
        os.environ["LIBRARY_PATH"] = os.pathsep.join([folder] + [p for p in [os.environ.get("LIBRARY_PATH")] if p])
        # The name tells Theano that it can set the library's threads: to 1 inside its own OpenMP loops.
        flags.append(("blas.ldflags", "-lopenblas"))
    own = ["%s=%s" % flag for flag in flags]
    os.environ["THEANO_FLAGS"] = ",".join(own + [f for f in [os.environ.get("THEANO_FLAGS")] if f])
    # a ~/.theanorc would make runs differ from user to user
    os.environ.setdefault("THEANORC", os.devnull)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # Between its loops GCC's OpenMP would go on spinning on the CPUs that OpenBLAS's threads need (LeNet: 5 times slower).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def compiled_folder():
    """Where Theano keeps what it has compiled: in the environment that crosstrain made, else in the user cache.

    Each Theano has its own folder, which is kept on purpose: compiling again takes minutes.
    """
    if os.path.exists(os.path.join(sys.prefix, "complete.json")) and os.access(sys.prefix, os.W_OK):
        return os.path.join(sys.prefix, "compiled")
    where = importlib.util.find_spec("theano").origin
    key = hashlib.sha256(("%s %s" % (where, os.path.getmtime(where))).encode()).hexdigest()[:12]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "crosstrain", "theano", key)


@contextlib.contextmanager
def compiling():
    """Alone with the compiled code of this Theano; waits for another process that is.

    Theano's cache does not stand two: one deletes as broken what the other is just writing. Its own lock would do, but outlives a
    killed process; the kernel frees this one with its owner.
    """
    folder = compiled_folder()
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "in_use"), "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.stderr.write("waiting for another process that compiles in %s\n" % folder)
            sys.stderr.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
        for left in glob.glob(os.path.join(glob.escape(folder), "*", "lock_dir")):
            shutil.rmtree(left, ignore_errors=True)
        yield


def link(target, path):
    """Make `path` a symbolic link to `target`, whatever it was before; several processes may do it at once."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.realpath(path) != os.path.realpath(target):
        temporary = "%s.%d" % (path, os.getpid())
        os.symlink(target, temporary)
        os.rename(temporary, path)


def numpy_openblas():
    """The OpenBLAS in numpy's wheel, or None: another BLAS, or one with 64-bit indices, which Theano can not call."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(numpy.__file__)))
    for path in glob.glob(os.path.join(folder, "numpy.libs", "libopenblas*.so*")):
        library = ctypes.CDLL(path)
        if hasattr(library, "sgemm_"):
            return library
    return None


def openmp():
    """GCC's OpenMP library, which the compiled functions use."""
    return ctypes.CDLL("libgomp.so.1")
