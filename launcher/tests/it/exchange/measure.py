"""Evaluates an export with PyTorch on the rows of a file: a GPT-2 of one block in the reference's layout, components and
importance functions by their equations. Prints means over all positions as JSON.

usage: measure.py MODEL.pth EVAL.bin SEQ_LEN HEADS
"""
import json
import math
import sys

import torch
from torch.nn.functional import gelu, layer_norm, log_softmax

path, rows, seq_len, heads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
state = torch.load(path, weights_only=True)
tokens = torch.frombuffer(bytearray(open(rows, "rb").read()), dtype=torch.uint16).long()
tokens = tokens[: len(tokens) // seq_len * seq_len].reshape(-1, seq_len)
target = {name.removeprefix("target_model."): value for name, value in state.items() if name.startswith("target_model.")}
assert torch.equal(target["lm_head.weight"], target["wte.weight"])
dashed = sorted({name.split(".")[1] for name in state if name.startswith("_components.")})
sites = [name.replace("-", ".") for name in dashed]


def part(site, name):
    return state[f"_components.{site.replace('.', '-')}.{name}"]


def forward(masks=None, seen=None):
    """Logits; with masks, all sites go through components."""

    def layer(site, x):
        if seen is not None:
            seen[site] = x
        if masks is None or site not in sites:
            weight, bias = target[f"{site}.weight"], target.get(f"{site}.bias")
            y = weight[x] if site == "wte" else x @ weight.T
        else:
            activations = part(site, "V")[x] if site == "wte" else x @ part(site, "V")
            y = activations * masks[site] @ part(site, "U")
            bias = state.get(f"_components.{site.replace('.', '-')}.bias")
            assert (bias is None) == (f"{site}.bias" not in target)
        return y if bias is None else y + bias

    def norm(name, x):
        return layer_norm(x, x.shape[-1:], target[f"{name}.weight"], target[f"{name}.bias"])

    x = layer("wte", tokens) + target["wpe.weight"][:seq_len]
    h = norm("h.0.ln_1", x)
    split = [layer(f"h.0.attn.{name}_proj", h).unflatten(-1, (heads, -1)).transpose(1, 2) for name in "qkv"]
    scores = split[0] @ split[1].transpose(-1, -2) / math.sqrt(split[0].shape[-1])
    scores = scores.masked_fill(torch.ones(seq_len, seq_len).triu(1).bool(), -math.inf)
    x = x + layer("h.0.attn.o_proj", (scores.softmax(-1) @ split[2]).transpose(1, 2).flatten(2))
    h = norm("h.0.ln_2", x)
    x = x + layer("h.0.mlp.down_proj", gelu(layer("h.0.mlp.c_fc", h), approximate="tanh"))
    return norm("ln_f", x) @ target["lm_head.weight"].T


def network(prefix, x):
    """The layers of an importance function, in any of its forms."""
    depths = sorted({int(name.split(".")[-2]) for name in state if name.startswith(prefix)})
    for depth in depths:
        weight, bias = state[f"{prefix}{depth}.W"], state[f"{prefix}{depth}.b"]
        x = x if depth == 0 else gelu(x)
        x = x @ weight + bias if weight.dim() == 2 else torch.einsum("...ci,cio->...co", x, weight) + bias
    return x


def importances(seen):
    activations = {site: part(site, "V")[x] if site == "wte" else x @ part(site, "V") for site, x in seen.items()}
    everything = "ci_fn._global_ci_fn.layers."
    if any(name.startswith(everything) for name in state):
        x = torch.cat([activations[site] if site == "wte" else seen[site] for site in sites], -1)
        widths = [part(site, "V").shape[1] for site in sites]
        logits = dict(zip(sites, network(everything, x).split(widths, -1)))
    else:
        logits = {}
        for site in sites:
            prefix = f"_ci_fns.{site.replace('.', '-')}.layers."
            weight = state[f"{prefix}0.W"]
            if weight.dim() == 2:
                logits[site] = network(prefix, seen[site])
            elif weight.shape[1] == 1:
                logits[site] = network(prefix, activations[site][..., None])[..., 0]
            else:
                logits[site] = network(prefix, seen[site][..., None, :])[..., 0]
    return {site: z.clamp(0, 1) for site, z in logits.items()}


seen = {}
clean = forward(seen=seen)
gates = importances({site: seen[site] for site in sites})
ones = {site: torch.ones_like(gate) for site, gate in gates.items()}
measured = {}
for name, masks in [("ci_masked", gates), ("unmasked", ones)]:
    masked = log_softmax(forward(masks), -1)
    clean_log = log_softmax(clean, -1)
    measured[f"eval/kl/{name}"] = (clean_log.exp() * (clean_log - masked)).sum(-1).mean().item()
for site, gate in gates.items():
    measured[f"eval/l0/{site}"] = (gate > 0).float().sum(-1).mean().item()
    measured[f"mean/{site}"] = sorted(gate.mean((0, 1)).tolist(), reverse=True)
print(json.dumps(measured))
