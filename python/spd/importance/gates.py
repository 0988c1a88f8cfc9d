"""From logits to importances, by the key `sigmoid`; gradients are the program's."""

from typing import Any

import torch
from torch import Tensor

LEAK = 0.01
"""The part of a gradient that passes beyond a border, where it leads back."""


class _Clamp(torch.autograd.Function):
    """`x` between 0 and 1. It leaks below 0, and above 1 too if `both`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, both: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.both = both
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,), (g,) = ctx.saved_tensors, gradients
        below, above = LEAK * g.clamp(max=0), LEAK * g.clamp(min=0) if ctx.both else torch.zeros_like(g)
        return torch.where(x <= 0, below, torch.where(x > 1, above, g)), None


def clamp(x: Tensor) -> Tensor:
    """`x` between 0 and 1, leaking on both sides."""
    result: Tensor = _Clamp.apply(x, True)
    return result


def importance(sigmoid: str, z: Tensor) -> Tensor:
    """The importance that masks are made of."""
    match sigmoid:
        case "leaky_hard":
            result: Tensor = _Clamp.apply(z, False)
            return result
        case "hard":
            return z.clamp(0, 1)
        case "upper_leaky_hard":
            return torch.where(z > 1, 1 + LEAK * (z - 1), z.clamp(0, 1))
        case "normal":
            return z.sigmoid()
        case "swish_hard":
            return 1 - z + z * (10 * z).sigmoid() + (z - 1) * (10 * (1 - z)).sigmoid()
    raise ValueError(f"expected a sigmoid that this version knows, found {sigmoid}")
