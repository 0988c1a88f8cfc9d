"""The transformer of an importance function that reads taps of the target, values between its sites."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import attend, linear, mlp, norm, on_positions
from .seen import Logits, Seen, SeenSite, Weights


def logits(said: dict[str, Any], weights: Weights, seen: Seen, of: str, taps: list[str], members: list[SeenSite]) -> Logits:
    """Logits of `members` by the transformer whose tensors begin with `of`."""
    inputs = torch.cat([norm(seen.taps[name]) for name in taps], -1)
    first = linear(weights, f"{of}.in_proj", inputs)
    x = on_positions(first)
    for block in range(said["n_layer"]):
        x = _block(said, weights, f"{of}.blocks.{block}", x, _documents(said, seen))
    x = x.reshape(first.shape)
    return {site.name: linear(weights, f"{of}.heads.{site.dashed}", x) for site in members}


def _block(said: dict[str, Any], weights: Weights, of: str, x: Tensor, documents: Tensor | None) -> Tensor:
    def normed(name: str) -> Tensor:
        return norm(x, weights[f"{of}.{name}.weight"] if said["learned_norm_scale"] else None)

    how = {key: said[key] for key in ("n_head", "n_kv_head", "causal", "rope_base")}
    x = x + attend(weights, f"{of}.attn", normed("norm_1"), documents=documents, **how)
    h = normed("norm_2")
    if said["ffn"] == "swiglu":
        hidden = F.silu(linear(weights, f"{of}.ffn.gate", h)) * linear(weights, f"{of}.ffn.0", h)
        return x + linear(weights, f"{of}.ffn.2", hidden)
    return x + mlp(weights, f"{of}.ffn", h)


def _documents(said: dict[str, Any], seen: Seen) -> Tensor | None:
    """The number of documents that ended before each position: a token that ends one belongs to it."""
    if "document_end" not in said:
        return None
    assert seen.tokens is not None
    ends = (seen.tokens == said["document_end"]).long()
    before: Tensor = ends.cumsum(-1) - ends
    return before
