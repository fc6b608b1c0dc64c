"""Record NVML's answers on a machine with NVIDIA GPUs, for tests that replay them on one without.

    PYTHONPATH=src python3 tests/record_nvml.py FOLDER

writes nvml_discovery.json (every form of CUDA_VISIBLE_DEVICES, with what the CUDA driver itself shows for it, and the machine's
description) and nvml_sampling.json (one GPU of the machine while a process of ours, then a stranger's, too, works on it).
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from crosstrain.devices import describe_machine, visible_gpus
from crosstrain.errors import OutcomeError
from crosstrain.system_samples import SystemSampler

CUDA_SHOWS = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
code, count, uuids = cuda.cuInit(0), ctypes.c_int(0), []
cuda.cuDeviceGetCount(ctypes.byref(count))
for i in range(count.value):
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGet(ctypes.byref(device), i)
    cuda.cuDeviceGetUuid_v2(ctypes.byref(uuid), device)
    h = bytes(uuid).hex()
    uuids.append("GPU-" + "-".join([h[:8], h[8:12], h[12:16], h[16:20], h[20:]]))
print(json.dumps({"init": code, "uuids": uuids}))
"""

BUSY = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0 and cuda.cuCtxSetCurrent(context) == 0
size = ctypes.c_size_t(1 << 30)
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), size) == 0
end = time.time() + float(sys.argv[1])
while time.time() < end:
    for _ in range(100):
        cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(1), size)
    cuda.cuCtxSynchronize()
"""


class Recorder:
    """Stands for the pynvml module and keeps (function, arguments) -> answers in order. A handle is kept as a number."""

    def __init__(self, nvml):
        self._nvml = nvml
        self._handles = []
        self.answers = {}
        self.constants = {}

    def __getattr__(self, name):
        value = getattr(self._nvml, name)
        if isinstance(value, type):
            return value
        if not callable(value):
            self.constants[name] = value
            return value

        def call(*arguments):
            key = json.dumps([name, *map(self._encode, arguments)])
            try:
                result = value(*arguments)
            except self._nvml.NVMLError as error:
                self.answers.setdefault(key, []).append({"error": error.value, "text": str(error)})
                raise
            self.answers.setdefault(key, []).append(self._encode(result))
            return result

        return call

    def _encode(self, value):
        if isinstance(value, (int, float, str, type(None))):
            return value
        if isinstance(value, (list, tuple)):
            return [self._encode(item) for item in value]
        if isinstance(value, (ctypes.c_void_p, ctypes._Pointer)):
            address = ctypes.cast(value, ctypes.c_void_p).value
            if address not in self._handles:
                self._handles.append(address)
            return {"handle": self._handles.index(address)}
        names = [field[0] for field in value._fields_] if isinstance(value, ctypes.Structure) else list(vars(value))
        return {"struct": {name: self._encode(getattr(value, name)) for name in names}}


def compact(answers):
    """Answers that never change are kept once."""
    return {key: values[:1] if all(v == values[0] for v in values) else values for key, values in answers.items()}


def record_discovery(nvml):
    uuids = [gpu.uuid for gpu in visible_gpus({}, nvml)]
    first, last = uuids[0], uuids[-1]
    short = first[: next(n for n in range(5, 40) if sum(u.startswith(first[:n]) for u in uuids) == 1)]
    backwards = ",".join(map(str, reversed(range(len(uuids)))))
    nobody = "00000000-0000-0000-0000-000000000000"
    values = [None, "0", backwards, f" {backwards} ", first, ",".join(reversed(uuids)), short, "GPU-", first.lower(), first.upper()]
    values += [f"{short},1", f"0,{last}", "", "-1", "NoDevFiles", "0,-1,1", "-1,0", "0,", "0,,1", "0,NoDevFiles"]
    values += ["0,0", f"{first},0", f"{first},{short}", "0,99", "99", "99,0"]
    values += [f"GPU-{nobody}", f"MIG-{nobody}", f"{first},GPU-{nobody}"]
    values += ["gpu0", "0,all", "00", "+0", "0x0", "1.0", "0;1"]
    plain = {name: text for name, text in os.environ.items() if not name.startswith("CUDA_")}
    environs = [plain if value is None else plain | {"CUDA_VISIBLE_DEVICES": value} for value in values]
    command = [sys.executable, "-c", CUDA_SHOWS]
    shown = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for environ in environs]
    recorder = Recorder(nvml)
    forms = []
    for value, environ, process in zip(values, environs, shown, strict=True):
        try:
            ours = [gpu.uuid for gpu in visible_gpus(environ, recorder)]
        except OutcomeError as error:
            ours = f"{error} | {error.hint}"
        forms.append({"value": value, "cuda": json.loads(process.communicate()[0] or "null")})
        print(forms[-1], ours)
    machine = describe_machine(recorder)
    return {"constants": recorder.constants, "answers": compact(recorder.answers), "forms": forms, "machine": machine}


def record_sampling(nvml):
    gpu = visible_gpus({}, nvml)[-1]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": gpu.uuid}
    recorder = Recorder(nvml)
    sampler = SystemSampler([], None, [gpu], recorder)
    ours = subprocess.Popen([sys.executable, "-c", BUSY, "14"], env=environ)
    sampler.watch([ours.pid])
    stranger, costs, times = None, [], []
    for number in range(32):
        if number == 22:
            stranger = subprocess.Popen([sys.executable, "-c", BUSY, "3"], env=environ)
        time.sleep(0.5)
        before = time.process_time()
        sampler.sample()
        costs.append(time.process_time() - before)
        times.append(time.time())
    ours.wait()
    stranger.wait()
    start = times[0]
    result = {
        "alone": sampler.contamination(start, times[21]),
        "together": sampler.contamination(start, times[-1]),
        "energy_j": sampler.energy_j(start, times[20]),
        "energy_short": sampler.energy_j(start, times[8]),
        "throttled_pct": sampler.throttled_pct(),
        "reasons": sampler.throttle_reasons(),
        "device_memory_delta_mb": sampler.device_memory_delta_mb,
        "cost_s": costs,
        "series": {key: values for key, (_, values) in sampler.series().items()},
    }
    return {"constants": recorder.constants, "answers": compact(recorder.answers), "gpu": [gpu.index, gpu.uuid, gpu.name],
            "pid_namespace": os.readlink("/proc/self/ns/pid"), "our_pid": ours.pid,
            "stranger_pid": stranger.pid, "live": result}  # fmt: skip


def main():
    import pynvml

    folder = Path(sys.argv[1])
    pynvml.nvmlInit()
    for name, record in (("sampling", record_sampling), ("discovery", record_discovery)):
        (folder / f"nvml_{name}.json").write_text(json.dumps(record(pynvml), indent=1))


if __name__ == "__main__":
    main()
