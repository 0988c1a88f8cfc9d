"""`global_reverse_residual`: a residual stream that visits groups of sites, and reads the logits of each group as it passes."""

from fnmatch import fnmatchcase
from typing import Any

import torch

from .layers import attend, linear, mlp, norm, on_positions, share_out
from .seen import Logits, Seen, Weights

OF = "_global_ci_fn"


def logits(said: dict[str, Any], weights: Weights, seen: Seen) -> Logits:
    found: Logits = {}
    stream: torch.Tensor | None = None
    groups = said["groups"]
    for number, group in enumerate(groups):
        name = group["name"].replace(".", "-")
        members = [site for pattern in group["patterns"] for site in seen.sites if fnmatchcase(site.name, pattern)]
        inputs = torch.cat([site.shown for site in members], -1)
        r = linear(weights, f"{OF}._inp_projectors.{name}", inputs)
        r = r if stream is None else stream + r
        if number + 1 < len(groups):
            if "n_head" in said:
                normed = on_positions(norm(r, weights[f"{OF}._attn_norms.{name}.weight"]))
                how = {"n_head": said["n_head"], "rope_base": said["rope_base"]}
                r = r + attend(weights, f"{OF}._attn_transitions.{name}", normed, **how).reshape(r.shape)
            of = f"{OF}._transitions.{name}"
            transition = linear if f"{of}.W" in weights else mlp
            r = r + transition(weights, of, norm(r, weights[f"{OF}._transition_norms.{name}.weight"]))
        z = mlp(weights, f"{OF}._readers.{name}", norm(r, weights[f"{OF}._reader_norms.{name}.weight"]))
        found |= share_out(z, members)
        stream = r
    return found
