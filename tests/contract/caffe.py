"""Caffe, as the contract suite expects it (see contracts.py)."""

MODES = ("off",)

REFUSED = {
    "device": ({"device": "gpu"}, "CUDA"),
    "precision": ({"precision": "bf16"}, "precision=bf16"),
    "compile": ({"framework": {"compile": "on"}}, "framework.compile=on"),
    "memory format": ({"framework": {"memory_format": "channels_last"}}, "framework.memory_format=channels_last"),
    "replicas": ({"replicas": 2, "world_size": 2}, "replica"),
}

SETTINGS = {
    "plain": ({}, {"threads": 1, "deterministic": True, "memory_format": "contiguous", "compile": "off", "device": "cpu"}),
    "threads": ({"threads": 2}, {"threads": 2}),
    "deterministic": ({"framework": {"deterministic": True}}, {"deterministic": True}),
}

DEVIATIONS: dict[str, str] = {}

UNSUPPORTED = {
    "gelu": "error function",
    "attention": "two activations",
    "causal attention": "two activations",
}

UNSUPPORTED_NETWORKS = {"language": "attention", "gpt2_small": "attention", "vit_b16": "attention"}
DEVICES = {1: "cpu"}
