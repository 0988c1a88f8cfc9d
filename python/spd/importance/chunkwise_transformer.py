"""`chunkwise_transformer`: a transformer for each chunk of the target's blocks, from taps to the logits of the sites in the chunk."""

from typing import Any

from . import transformer
from .seen import Logits, Seen, Weights


def logits(said: dict[str, Any], weights: Weights, seen: Seen) -> Logits:
    found: Logits = {}
    for chunk in seen.chunks:
        members = [site for site in seen.sites if site.name in chunk.sites]
        found |= transformer.logits(said, weights, seen, chunk.of, chunk.taps, members)
    return found
