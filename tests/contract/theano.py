"""Theano, as the contract suite expects it (see contracts.py)."""

MODES = ("on",)
REFUSED = {
    "device": ({"device": "gpu"}, "libgpuarray"),
    "precision": ({"precision": "fp16"}, "precision=fp16"),
    "not compiled": ({"framework": {"compile": "off"}}, "framework.compile=off"),
    "memory format": ({"framework": {"memory_format": "channels_last"}}, "framework.memory_format=channels_last"),
    "replicas": ({"replicas": 2, "world_size": 2}, "replica"),
}
SETTINGS = {
    "plain": ({}, {"threads": 1, "deterministic": False, "memory_format": "contiguous", "compile": "on", "autotune": False}),
    "two threads": ({"threads": 2}, {"threads": 2, "openmp_threads": 2}),
    "deterministic": ({"framework": {"deterministic": True}}, {"deterministic": True}),
    "autotune": ({"framework": {"autotune": True}}, {"autotune": False}),
}
DEVIATIONS = {"max_pool": "every maximum of a window"}
UNSUPPORTED: dict[str, str] = {}
UNSUPPORTED_NETWORKS: dict[str, str] = {}
DEVICES = {1: "cpu"}
COUNTS_FLOPS = False
#: minutes of g++ from a clean cache
LONG = ("googlenet", "resnet50", "resnet56", "vgg_19", "vgg_a", "overfeat", "alexnet_owt", "alexnet_s", "gpt2_small", "vit_b16")
