"""`mlp`: a network for each component, from its own activation `x V` to its logit."""

from typing import Any

from .layers import per_component
from .seen import Logits, Seen, Weights


def logits(said: dict[str, Any], weights: Weights, seen: Seen) -> Logits:
    return {site.name: per_component(weights, f"{site.dashed}.layers", site.activations[..., None]) for site in seen.sites}
