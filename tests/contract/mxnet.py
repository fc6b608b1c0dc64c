"""MXNet, as the contract suite expects it (see contracts.py)."""

MODES = ("off", "on")
REFUSED = {
    "device": ({"device": "gpu"}, "CUDA"),
    "precision": ({"precision": "bf16"}, "precision=bf16"),
    "compile": ({"framework": {"compile": "max"}}, "framework.compile=max"),
    "memory format": ({"framework": {"memory_format": "channels_last"}}, "framework.memory_format=channels_last"),
    "replicas": ({"replicas": 2, "world_size": 2}, "replica"),
}
SETTINGS = {
    "plain": ({}, {"threads": 1, "deterministic": False, "memory_format": "contiguous", "compile": "on"}),
    "not hybridized": ({"framework": {"compile": "off"}}, {"compile": "off"}),
    "deterministic": ({"framework": {"deterministic": True}}, {"deterministic": True}),
}
DEVIATIONS = {"lstm": "second bias", "batch_norm unbiased": "running variance is biased,"}
UNSUPPORTED = {"avg_pool, one-sided, input only": "count_include_pad"}
DEVICES = {1: "cpu(0)", 2: "cpu(0), cpu(1)"}
