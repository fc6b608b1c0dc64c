"""PyTorch, as the contract suite expects it (see contracts.py)."""

#: torch.compile would take minutes
MODES = ("off",)
REFUSED = {
    "device": ({"device": "gpu"}, "CUDA"),
    "precision": ({"precision": "tf32"}, "precision=tf32"),
    "half precision": ({"precision": "fp16"}, "precision=fp16"),
    "replicas": ({"replicas": 2}, "replica"),
    "space to depth": ({"framework": {"space_to_depth": True}}, "a first convolution of stride 2"),
}
SETTINGS = {
    "plain": ({}, {"threads": 1, "deterministic": False, "memory_format": "contiguous", "compile": "off", "autotune": False}),
    "channels_last": ({"framework": {"memory_format": "channels_last"}}, {"memory_format": "channels_last"}),
    "deterministic": ({"framework": {"deterministic": True}}, {"deterministic": True}),
    "autotune on a CPU": ({"framework": {"autotune": True}}, {"autotune": False}),
    "compile": ({"framework": {"compile": "on"}}, {"compile": "on"}),
    "bf16": ({"precision": "bf16"}, {"precision": "bf16"}),
}
DEVIATIONS = {"lstm": "second bias", "batch_norm biased": "running variance is unbiased,"}
UNSUPPORTED = {"avg_pool, one-sided, input only": "count_include_pad"}
DEVICES = {1: "cpu", 2: "cpu"}
COUNTS_FLOPS = True
