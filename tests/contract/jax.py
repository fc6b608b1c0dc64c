"""JAX, as the contract suite expects it (see contracts.py)."""

MODES = ("on",)
REFUSED = {
    "device": ({"device": "gpu"}, "CUDA"),
    "precision": ({"precision": "tf32"}, "precision=tf32"),
    "half precision": ({"precision": "fp16"}, "precision=fp16"),
    "lstm": ({"framework": {"lstm": "cudnn"}}, "cuDNN's LSTM needs a GPU"),
    "space to depth": ({"framework": {"space_to_depth": True}}, "a first convolution of stride 2"),
    "compile": ({"framework": {"compile": "max"}}, "framework.compile=max"),
    "memory format": ({"framework": {"memory_format": "contiguous"}}, "framework.memory_format=contiguous"),
    "replicas": ({"replicas": 2, "world_size": 2}, "replica"),
}
SETTINGS = {
    "plain": ({}, {"threads": 1, "memory_format": "channels_last", "compile": "on", "autotune": False, "precision": "fp32"}),
    "not compiled": ({"framework": {"compile": "off"}}, {"compile": "off"}),
    "deterministic": ({"framework": {"deterministic": True}}, {"deterministic": True}),
    "bf16": ({"precision": "bf16"}, {"precision": "bf16"}),
}
DEVIATIONS = {"batch_norm unbiased": "running variance is biased,"}
UNSUPPORTED: dict[str, str] = {}
UNSUPPORTED_NETWORKS: dict[str, str] = {}
DEVICES = {1: "cpu:0", 2: "cpu:0, cpu:1"}
