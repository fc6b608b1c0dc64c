"""Networks, written once: the spec and its builder, one file per family, initial weights, and the float64 reference."""

from crosstrain.networks.spec import Network, Spec, build, ladder_variant

__all__ = ["Network", "Spec", "build", "ladder_variant"]
