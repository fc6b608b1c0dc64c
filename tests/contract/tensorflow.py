"""TensorFlow, as the contract suite expects it (see contracts.py)."""

#: XLA (max) and every op eagerly would take minutes; one network goes through each, in SETTINGS
MODES = ("on",)
REFUSED = {
    "device": ({"device": "gpu"}, "CUDA"),
    "precision": ({"precision": "tf32"}, "precision=tf32"),
    "half precision": ({"precision": "fp16"}, "precision=fp16"),
    "replicas": ({"replicas": 2, "world_size": 2}, "replica"),
    "XLA over replicas": ({"replicas": 2, "framework": {"compile": "max"}}, "XLA"),
    "NCHW without graphs": ({"framework": {"memory_format": "contiguous", "compile": "off"}}, "max_pool op4"),
}
SETTINGS = {
    "plain": ({}, {"threads": 1, "deterministic": False, "memory_format": "channels_last", "compile": "on", "autotune": False}),
    "eager": ({"framework": {"compile": "off"}}, {"compile": "off"}),
    "XLA": ({"framework": {"compile": "max"}}, {"compile": "max"}),
    "NCHW": ({"framework": {"memory_format": "contiguous"}}, {"memory_format": "contiguous"}),
    "deterministic": ({"framework": {"deterministic": True}}, {"deterministic": True}),
    "autotune on a CPU": ({"framework": {"autotune": True}}, {"autotune": False}),
    "bf16": ({"precision": "bf16"}, {"precision": "bf16"}),
}
DEVICES = {1: "CPU:0", 2: "CPU:0, CPU:1"}
