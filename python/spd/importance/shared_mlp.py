"""`shared_mlp`: one network for each site, from its input `x` to the logits of all its components."""

from typing import Any

from .layers import mlp
from .seen import Logits, Seen, Weights


def logits(said: dict[str, Any], weights: Weights, seen: Seen) -> Logits:
    return {site.name: mlp(weights, f"{site.dashed}.layers", site.x) for site in seen.sites}
