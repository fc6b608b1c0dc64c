"""What only Theano's adapter does: gradients of equal maxima, a cache of compiled code behind a lock, compiling in `build`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import test_adapters
from crosstrain import parity
from crosstrain.networks.reference import Reference
from crosstrain_worker.frameworks import theano_config
from test_adapters import IMAGE, VECTOR, arrays_of, batch_of, close, net_of, run_of, small_net

SOURCE = Path(__file__).parents[1] / "src"
ask = test_adapters.ask

#: compiles; told to hold, it says so in the middle of it and waits for the end of its input
COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
from crosstrain_worker.frameworks import theano_config
theano_config.compiled_folder = lambda: sys.argv[2]
theano_config.configure(1)
with theano_config.compiling():
    import theano
    from theano.gof import compilelock
    if sys.argv[3] == "hold":
        compilelock.get_lock()
        print("held", flush=True)
        sys.stdin.read()
        compilelock.release_lock()
    x = theano.tensor.fvector()
    print(theano.function([x], theano.tensor.exp(x))([0.0])[0], theano.config.base_compiledir)
"""

BUILD = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
import numpy
from crosstrain_worker.frameworks.on_theano import Framework
adapter = Framework(json.load(open(sys.argv[2])))
adapter.load_library()
adapter.check()
adapter.setup()
adapter.build()
compiled = sorted(adapter.functions)
address_space = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
batch = adapter.to_device(numpy.zeros((200000, 2, 6, 5), "float32"), numpy.zeros(200000, "int64"))
resource.setrlimit(resource.RLIMIT_AS, (address_space + 100 * 2**20, resource.RLIM_INFINITY))
try:
    adapter.step(batch)
    error = None
except Exception as caught:
    error = caught
print(json.dumps({"compiled": compiled, "error": str(error), "oom": adapter.is_oom(error), "other": adapter.is_oom(ValueError("shapes"))}))
"""


def test_where_maxima_are_equal_the_gradient_is_as_declared(ask: Any) -> None:
    """The second group of the convolution sees the zero channels alone: what it gives is its bias, everywhere."""
    shortcut = ("channel_pad_shortcut", {"out_channels": 6})
    ops = [shortcut, ("conv2d", {"out_channels": 4, "kernel": 1, "groups": 2}), ("max_pool", {"kernel": 2, "stride": 2})]
    spec = net_of(IMAGE, ops)
    (answer,) = ask("theano", [(spec, {})])
    weights, (inputs, targets) = arrays_of(spec), batch_of(spec)
    plain = Reference(spec, weights).gradients(inputs, targets)[1]
    declared = Reference(parity._as_declared(spec, answer.facts["deviations"]), weights).gradients(inputs, targets)[1]
    for name, gradient in declared.items():
        close(answer.arrays["g." + name], gradient)
    close(answer.arrays["g.op1.bias"][:2], plain["op1.bias"][:2])
    close(answer.arrays["g.op1.bias"][2:], 4 * plain["op1.bias"][2:])


def start(python: Path, folder: Path, what: str) -> subprocess.Popen[str]:
    command = [str(python), "-B", "-c", COMPILE, str(SOURCE), str(folder), what]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_one_process_compiles_at_a_time_and_a_killed_one_holds_up_nobody(framework_python: Callable[[str], Path], tmp_path: Path) -> None:
    python = framework_python("theano")
    with start(python, tmp_path, "hold") as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with start(python, tmp_path, "compile") as other:
                try:
                    assert other.stderr is not None and other.stderr.readline().startswith("waiting for another process")
                    assert list(tmp_path.glob("*/lock_dir/lock")) and other.poll() is None
                    holder.kill()
                    out, err = other.communicate(timeout=150)
                    assert out.split() == ["1.0", str(tmp_path)] and "lock" not in err, err
                finally:
                    other.kill()
        finally:
            holder.kill()
    assert not list(tmp_path.glob("*/lock_dir"))


def test_compiled_code_is_kept_beside_its_own_theano(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = set()
    for name in ("one", "two"):
        home = tmp_path / name
        (home / "theano").mkdir(parents=True)
        (home / "theano" / "__init__.py").touch()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(home), *sys.path])
            patch.setattr(sys, "prefix", str(home))
            folder = Path(theano_config.compiled_folder())
            assert folder.parent == tmp_path / "cache" / "crosstrain" / "theano"
            folders.add(folder)
            (home / "complete.json").touch()
            assert theano_config.compiled_folder() == str(home / "compiled")
    assert len(folders) == 2


def test_a_run_compiles_what_it_will_call_and_knows_when_memory_is_out(framework_python: Callable[[str], Path], tmp_path: Path) -> None:
    run = run_of("theano", small_net(), mode="train", epochs=1, data={"test": {"inputs": "", "targets": ""}})
    (tmp_path / "run.json").write_text(json.dumps(run))
    command = [str(framework_python("theano")), "-B", "-c", BUILD, str(SOURCE), str(tmp_path / "run.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["compiled"] == ["counted step", "evaluation", "step"]
    assert found["oom"] and not found["other"], found


def test_no_factor_is_drawn_into_a_product(framework_python: Callable[[str], Path], tmp_path: Path) -> None:
    """Clipping needs each gradient twice; computing it twice would make the step up to a third longer."""
    spec = net_of(VECTOR, [("tanh", {})])
    (tmp_path / "run.json").write_text(json.dumps(run_of("theano", spec)))
    count = "print(sum('Dot' in str(n.op) or 'Gemm' in str(n.op) for n in adapter.compiled('step').maker.fgraph.toposort()))"
    script = BUILD.split("compiled = ")[0] + count
    command = [str(framework_python("theano")), "-B", "-c", script, str(SOURCE), str(tmp_path / "run.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    # two layers: forward twice, the gradients of both weights, and of the second one's input
    assert done.stdout.split() == ["5"], done.stderr[-2000:]
