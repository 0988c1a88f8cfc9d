"""`vector_mlp`: a network for each component, from the site's input `x` to its logit."""

from typing import Any

import torch

from .layers import per_component
from .seen import Logits, Seen, SeenSite, Weights


def logits(said: dict[str, Any], weights: Weights, seen: Seen) -> Logits:
    return {site.name: _of_site(weights, site) for site in seen.sites}


def _of_site(weights: Weights, site: SeenSite) -> torch.Tensor:
    of = f"{site.dashed}.layers"
    # All components see the same input.
    hidden = torch.einsum("...i,cio->...co", site.x, weights[f"{of}.0.W"]) + weights[f"{of}.0.b"]
    return per_component(weights, of, hidden, first=2)
