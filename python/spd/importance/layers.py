"""Layers that importance functions are made of, and the way they share their view among sites."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .seen import Logits, SeenSite, Weights

NORM_EPS = torch.finfo(torch.float32).eps
"""Added to a mean square."""


def linear(weights: Weights, of: str, x: Tensor) -> Tensor:
    """A linear layer, whose weight is [d_in, d_out]."""
    return x @ weights[f"{of}.W"] + weights[f"{of}.b"]


def mlp(weights: Weights, of: str, x: Tensor) -> Tensor:
    """Linear layers `OF.0`, `OF.2`, ... with exact GELUs between them."""
    layer = 0
    while f"{of}.{layer}.W" in weights:
        x = linear(weights, f"{of}.{layer}", F.gelu(x) if layer else x)
        layer += 2
    return x


def per_component(weights: Weights, of: str, x: Tensor, first: int = 0) -> Tensor:
    """The same, a network for each component: from [.., C, d] to logits [.., C]."""
    layer = first
    while f"{of}.{layer}.W" in weights:
        x = F.gelu(x) if layer else x
        x = torch.einsum("...ci,cio->...co", x, weights[f"{of}.{layer}.W"]) + weights[f"{of}.{layer}.b"]
        layer += 2
    return x.squeeze(-1)


def norm(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Each row brought to a mean square of 1, times a scale if there is one."""
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)
    return x if scale is None else x * scale


def attend(
    weights: Weights,
    of: str,
    x: Tensor,
    *,
    n_head: int,
    n_kv_head: int | None = None,
    rope_base: float = 1e4,
    causal: bool = False,
    documents: Tensor | None = None,
) -> Tensor:
    """Attention by rotary queries and keys from [b, t, d] to [b, t, d].

    `documents` has the number of each position's document, [b, t], if positions see no other one.
    """
    rows, positions, columns = x.shape
    size = columns // n_head
    q, k, v = ((x @ weights[f"{of}.{name}_proj.weight"].T).view(rows, positions, -1, size).transpose(1, 2) for name in ("q", "k", "v"))
    # Angles are computed in f64: those of late positions are large.
    frequency = rope_base ** (-torch.arange(0, size, 2, dtype=torch.float64, device=x.device) / size)
    angle = torch.arange(positions, dtype=torch.float64, device=x.device)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    q, k = _turn(q, cos, sin), _turn(k, cos, sin)
    shared = n_head // (n_kv_head or n_head)
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(size)
    seen = torch.ones(positions, positions, dtype=torch.bool, device=x.device)
    seen = (seen.tril() if causal else seen)[None, None]
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None, :])[:, None]
    mixed = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
    return mixed.transpose(1, 2).reshape(rows, positions, columns) @ weights[f"{of}.out_proj.weight"].T


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Columns `i` and `i + size / 2` are a point of a plane, which is rotated."""
    i, j = x.chunk(2, -1)
    return torch.cat([i * cos - j * sin, j * cos + i * sin], -1)


def on_positions(x: Tensor) -> Tensor:
    """What sees features alone sees rows of one position."""
    return x[:, None] if x.ndim == 2 else x


def share_out(x: Tensor, sites: list[SeenSite]) -> Logits:
    """The columns of `x` shared out among sites, a column for each component."""
    return {site.name: z for site, z in zip(sites, x.split([site.components for site in sites], -1), strict=True)}


def by_name(sites: list[SeenSite]) -> list[SeenSite]:
    """The sites in the order of their names."""
    return sorted(sites, key=lambda site: site.name.encode())
