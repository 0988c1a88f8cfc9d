"""`global_shared_mlp`: one network for all sites, from their inputs side by side, in the order of their names, to all logits."""

from typing import Any

import torch

from .layers import by_name, mlp, share_out
from .seen import Logits, Seen, Weights


def logits(said: dict[str, Any], weights: Weights, seen: Seen) -> Logits:
    order = by_name(seen.sites)
    x = torch.cat([site.shown for site in order], -1)
    return share_out(mlp(weights, "_global_ci_fn.layers", x), order)
