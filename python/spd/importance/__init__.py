"""The causal-importance functions: from what all sites saw to the logits of all sites, one a component.

Each is a file here, named as in `[importance] kind`. They are those of the program in `trainer/src/component_model/importance/`.
"""

from typing import Any

from . import (
    chunkwise_transformer,
    conditioning,
    global_reverse_residual,
    global_shared_mlp,
    global_shared_transformer,
    global_transformer,
    mlp,
    shared_mlp,
    vector_mlp,
)
from .chunks import Chunk, chunks
from .gates import importance
from .seen import ImportanceFunction, Logits, Seen, SeenSite, Weights
from .taps import BLOCKS, Blocks

__all__ = ["BLOCKS", "FUNCTIONS", "Blocks", "Chunk", "Logits", "Seen", "SeenSite", "Weights", "chunks", "importance", "logits"]

FUNCTIONS: dict[str, ImportanceFunction] = {
    "mlp": mlp,
    "vector_mlp": vector_mlp,
    "shared_mlp": shared_mlp,
    "global_shared_mlp": global_shared_mlp,
    "global_shared_transformer": global_shared_transformer,
    "global_reverse_residual": global_reverse_residual,
    "global_transformer": global_transformer,
    "chunkwise_transformer": chunkwise_transformer,
}


def logits(said: dict[str, Any], weights: Weights, seen: Seen) -> Logits:
    """Logits of all sites by the table `[importance]` of a run."""
    found = FUNCTIONS[said["kind"]].logits(said, weights, seen)
    if "conditioning" in said:
        found = {site.name: conditioning.add(weights, site, found[site.name]) for site in seen.sites}
    return found
