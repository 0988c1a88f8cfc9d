"""`global_transformer`: one transformer for all sites, from taps of the target."""

from .chunkwise_transformer import logits

__all__ = ["logits"]
