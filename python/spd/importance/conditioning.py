"""Logits that see the activations of their own components, `h = x V`: `z + s_p clamp(a_p h + b_p) + s_n clamp(b_n - a_n h) + bias`."""

from torch import Tensor

from .gates import clamp
from .seen import SeenSite, Weights


def add(weights: Weights, site: SeenSite, z: Tensor) -> Tensor:
    def vector(name: str) -> Tensor:
        return weights[f"readouts.{site.dashed}.{name}"]

    acts = site.activations
    for side, sign in (("positive", 1.0), ("negative", -1.0)):
        limited = acts * (sign * vector(f"{side}.input_scale")) + vector(f"{side}.input_bias")
        z = z + clamp(limited) * vector(f"{side}.output_scale")
    return z + vector("bias")
