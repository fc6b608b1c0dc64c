"""CNTK, as the contract suite expects it (see contracts.py)."""

MODES = ("off",)
REFUSED = {
    "device": ({"device": "gpu"}, "CUDA"),
    "precision": ({"precision": "fp16"}, "precision=fp16"),
    "compile": ({"framework": {"compile": "on"}}, "framework.compile=on"),
    "memory format": ({"framework": {"memory_format": "channels_last"}}, "framework.memory_format=channels_last"),
    "replicas": ({"replicas": 2, "world_size": 2}, "mpirun"),
}
SETTINGS = {
    "plain": ({}, {"threads": 1, "deterministic": False, "memory_format": "contiguous", "compile": "off", "autotune": False}),
    "deterministic": ({"framework": {"deterministic": True}}, {"deterministic": True}),
    "autotune": ({"framework": {"autotune": True}}, {"autotune": False}),
}
DEVIATIONS = {"batch_norm biased": "running variance is unbiased"}
UNSUPPORTED = {
    "conv2d, dilated groups": "dilation",
    "avg_pool, one-sided, input only": "count_include_pad",
    "gelu": "no error function",
}
UNSUPPORTED_NETWORKS = {"language": "no error function", "vit_b16": "no error function"}
DEVICES = {1: "CPU", 2: "CPU"}
