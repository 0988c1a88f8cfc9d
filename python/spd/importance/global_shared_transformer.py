"""`global_shared_transformer`: one transformer over the positions of a row, not causal, from the normed inputs of all sites."""

from typing import Any

import torch

from .layers import attend, by_name, linear, mlp, norm, on_positions, share_out
from .seen import Logits, Seen, Weights

OF = "_global_ci_fn"


def logits(said: dict[str, Any], weights: Weights, seen: Seen) -> Logits:
    order = by_name(seen.sites)
    inputs = torch.cat([norm(site.shown) for site in order], -1)
    first = linear(weights, f"{OF}._input_projector", inputs)
    x = on_positions(first)
    for block in range(said["n_layer"]):
        part = f"{OF}._blocks.{block}"
        x = x + attend(weights, f"{part}.attn", norm(x), n_head=said["n_head"], rope_base=said["rope_base"])
        x = x + mlp(weights, f"{part}.mlp", norm(x))
    return share_out(linear(weights, f"{OF}._output_head", x.reshape(first.shape)), order)
