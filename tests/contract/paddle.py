"""Paddle, as the contract suite expects it (see contracts.py)."""

MODES = ("off", "on")
REFUSED = {
    "device": ({"device": "gpu"}, "CUDA"),
    "precision": ({"precision": "bf16"}, "precision=bf16"),
    "compile": ({"framework": {"compile": "max"}}, "CINN"),
    "memory format": ({"framework": {"memory_format": "channels_last"}}, "framework.memory_format=channels_last"),
    "replicas": ({"replicas": 2}, "ranks"),
}
SETTINGS = {
    "plain": ({}, {"threads": 1, "deterministic": False, "memory_format": "contiguous", "compile": "off", "autotune": False}),
    "to_static": ({"framework": {"compile": "on"}}, {"compile": "on"}),
    "autotune on a CPU": ({"framework": {"autotune": True}}, {"autotune": False}),
}
DEVIATIONS = {"lstm": "second bias", "batch_norm unbiased": "running variance is biased,"}
UNSUPPORTED: dict[str, str] = {}
UNSUPPORTED_NETWORKS: dict[str, str] = {}
DEVICES = {1: "cpu", 2: "cpu"}
COUNTS_FLOPS = False
