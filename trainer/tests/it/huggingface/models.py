"""Makes a model of transformers with random weights, saves it in every format, and writes down what it computes.

    python models.py CASE OUT

writes OUT/<format>/config.json and weights, OUT/<format>.safetensors with `tokens` and `logits`, and, of small models, OUT/sites.safetensors:
one masked pass through components of every linear and embedding layer, its divergence from the clean pass, and the gradients of all components.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

SMALL = dict(vocab_size=29, bos_token_id=0, eos_token_id=1)
GPT = dict(n_positions=16, n_embd=16, n_layer=2, n_head=4, **SMALL)
NEO = dict(max_position_embeddings=16, hidden_size=16, num_layers=2, num_heads=4, window_size=3, **SMALL)
BLOCKS = dict(max_position_embeddings=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, **SMALL)
GROUPED = dict(num_key_value_heads=2, **BLOCKS)
LLAMA3 = dict(rope_type="llama3", rope_theta=100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=2.0, original_max_position_embeddings=8)

CASES = {
    "gpt2": ("GPT2Config", GPT),
    "gpt2_own_head": ("GPT2Config", dict(activation_function="relu", tie_word_embeddings=False, **GPT)),
    "gpt_neo_own_head": ("GPTNeoConfig", dict(attention_types=[[["global", "local"], 1]], activation_function="relu", tie_word_embeddings=False, **NEO)),
    "gpt_neo": ("GPTNeoConfig", dict(attention_types=[[["global", "local"], 1]], **NEO)),
    "gpt_neox": ("GPTNeoXConfig", dict(rotary_pct=0.5, **BLOCKS)),
    "gpt_neox_sequential": ("GPTNeoXConfig", dict(rotary_pct=0.5, use_parallel_residual=False, tie_word_embeddings=True, hidden_act="gelu_new", **BLOCKS)),
    "llama": ("LlamaConfig", dict(attention_bias=True, rms_norm_eps=1e-5, **GROUPED)),
    "llama3": ("LlamaConfig", dict(head_dim=6, tie_word_embeddings=True, rope_parameters=LLAMA3, **GROUPED)),
    "mistral": ("MistralConfig", dict(sliding_window=12, **GROUPED)),
    "qwen2": ("Qwen2Config", dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6), **GROUPED)),
    "qwen3": ("Qwen3Config", dict(head_dim=6, **GROUPED)),
    # Sizes of public models.
    "gpt2_124m": ("GPT2Config", {}),
    "tinystories_1m": (
        "GPTNeoConfig",
        dict(hidden_size=64, num_layers=8, num_heads=16, max_position_embeddings=2048, window_size=256,
             attention_types=[[["global", "local"], 4]], vocab_size=50257),
    ),
    "pythia_70m": (
        "GPTNeoXConfig",
        dict(hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048, vocab_size=50304, rotary_pct=0.25),
    ),
    "smollm2_135m": (
        "LlamaConfig",
        dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152,
             max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
             rope_parameters=dict(rope_type="default", rope_theta=1e5)),
    ),
    "qwen2_5_0_5b": (
        "Qwen2Config",
        dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, vocab_size=151936,
             max_position_embeddings=32768, rms_norm_eps=1e-6, tie_word_embeddings=True,
             rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    ),
}


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits.float().contiguous()


def save(model, tokens, out, name, dtype):
    """Saves the model in a dtype, and the logits that these weights give in f32."""
    folder = out / name
    # Parameters alone: a model's frequencies of rotary positions are not saved, and stay what they are.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if name == "bin":
        folder.mkdir()
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    elif name == "shards":
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        model.save_pretrained(folder, max_shard_size=max(size // 3, 1))
    else:
        model.save_pretrained(folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    save_file({"tokens": tokens.to(torch.int32), "logits": logits(model, tokens)}, out / f"{name}.safetensors")


def masked_pass(model, tokens, out):
    """Every linear and embedding layer through components: ((x V) * m) U + d x (W - V U), then the gradient of the divergence."""
    saved, parameters = {}, {}
    clean = torch.log_softmax(model(tokens).logits.detach(), -1)
    rows = tokens.shape
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind not in ("Linear", "Conv1D", "Embedding") or "wpe" in name:
            continue
        weight = module.weight.detach() if kind != "Linear" else module.weight.detach().T
        d_in, d_out = weight.shape
        c = 5
        v = torch.nn.Parameter(torch.randn(d_in, c) / d_in**0.5)
        u = torch.nn.Parameter(torch.randn(c, d_out) / c**0.5)
        m, d = torch.rand(*rows, c), torch.rand(*rows)
        path = "embed_out" if name == "lm_head" and "gpt_neox" in type(model).__module__ else name
        saved |= {f"{path}.V": v, f"{path}.U": u, f"{path}.mask": m, f"{path}.delta": d}
        parameters |= {f"{path}.V": v, f"{path}.U": u}
        bias = getattr(module, "bias", None)
        bias = None if bias is None else bias.detach()

        def forward(x, weight=weight, v=v, u=u, m=m, d=d, bias=bias, kind=kind):
            at = (lambda w: w[x]) if kind == "Embedding" else (lambda w: x @ w)
            y = (at(v) * m) @ u + d[..., None] * at(weight - v @ u)
            return y if bias is None else y + bias

        module.forward = forward
    masked = torch.log_softmax(model(tokens).logits, -1)
    divergence = (clean.exp() * (clean - masked)).sum(-1).mean()
    divergence.backward()
    saved |= {f"grad.{name}": parameter.grad for name, parameter in parameters.items()}
    saved["divergence"] = divergence.reshape(1)
    save_file({name: tensor.detach().contiguous() for name, tensor in saved.items()}, out / "sites.safetensors")


def main():
    case, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    kind, sizes = CASES[case]
    config = getattr(transformers, kind)(**sizes)
    small = config.vocab_size < 100
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if small:
        # Larger than a model starts with, so that a wrong number shows; norms and biases too.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if parameter.ndim == 1 and "weight" in name else 0.0))
    tokens = torch.randint(config.vocab_size, (2, 11) if small else (1, 300))
    save(model, tokens, out, "safetensors", torch.float32)
    if small:
        save(model, tokens, out, "bin", torch.float16)
        save(model, tokens, out, "shards", torch.bfloat16)
        masked_pass(model, tokens, out)
    else:
        save(model, tokens, out, "shards", torch.bfloat16)
        save(model, tokens, out, "bin", torch.bfloat16)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}))


main()
