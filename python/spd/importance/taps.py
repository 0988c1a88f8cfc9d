"""Which values of the target's blocks an importance function reads, and in which module of a model each of them is.

```text
resid_pre   enters the block          attn_in   read by q, k and v   attn_out     read by o
resid_mid   behind the attention      mlp_in    read by the MLP      mlp_hidden   its neurons
resid_post  leaves the block
```
"""

import re
from dataclasses import dataclass
from typing import Any

OF_BLOCKS = {
    "all_block_resids": ["resid_pre"],
    "all_resids": ["resid_pre", "resid_mid"],
    "all_block_taps": ["attn_in", "attn_out", "mlp_in", "mlp_hidden"],
}


@dataclass(frozen=True)
class Blocks:
    """The blocks of a network: the path of one without its number, and paths inside of it."""

    path: str
    attn_in: str
    """The layer that reads what goes into queries, keys and values, or one of these."""
    attn_out: str
    """The layer that the result of the attention goes through."""
    mlp_in: str
    mlp_hidden: str

    def number(self, site: str) -> int | None:
        """The block of a site, if it is in one."""
        found = re.match(rf"{re.escape(self.path)}\.(\d+)\.", site)
        return None if found is None else int(found[1])


_GPT2_SIMPLE = Blocks("h", "attn.q_proj", "attn.o_proj", "mlp.c_fc", "mlp.down_proj")

BLOCKS = {
    "gpt2": Blocks("transformer.h", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "gpt2_simple": _GPT2_SIMPLE,
    "gpt_neo": Blocks("transformer.h", "attn.attention.q_proj", "attn.attention.out_proj", "mlp.c_fc", "mlp.c_proj"),
    "gpt_neox": Blocks("gpt_neox.layers", "attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    "llama": Blocks("model.layers", "self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"),
    "llama_simple": Blocks("h", "attn.q_proj", "attn.o_proj", "mlp.gate_proj", "mlp.down_proj"),
    "llama_simple_mlp": _GPT2_SIMPLE,
}
"""By `kind` of `[target]`."""


def names(input_tap: Any, blocks: list[int], n_layer: int) -> list[str]:
    """The names of the taps of some blocks of a network."""
    if input_tap == "first_block_resid":
        return [_boundary(blocks[0], n_layer)]
    if isinstance(input_tap, dict):
        return [_boundary(blocks[0] + offset, n_layer) for offset in input_tap["offsets"]]
    return [f"{kind}.{block}" for block in blocks for kind in OF_BLOCKS[input_tap]]


def _boundary(block: int, n_layer: int) -> str:
    """The residual stream before a block; behind the last one, what leaves it."""
    return f"resid_post.{block - 1}" if block == n_layer > 0 else f"resid_pre.{block}"
