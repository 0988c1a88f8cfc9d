"""Importances and masked passes in models of transformers, beside what the program measured of the same rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROWS, SEQ_LEN, TOY
from safetensors.numpy import load_file

import spd
from spd.run import read_rows

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
"""Sums of some dozens of products in f32 in another order, through two blocks and as many of an importance function: 4e-6 at most here."""

SMALL = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 1}
BLOCKS = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    **SMALL,
}
MODELS = {
    "gpt2": ("GPT2Config", {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4, **SMALL}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5, **BLOCKS}),
    "llama": ("LlamaConfig", {"num_key_value_heads": 2, "attention_bias": True, **BLOCKS}),
}
EMBEDDING = {"gpt2": "*.wte", "gpt_neox": "*.embed_in", "llama": "*.embed_tokens"}
HEAD = {"gpt2": "lm_head", "gpt_neox": "embed_out", "llama": "lm_head"}
MATRICES = {"gpt2": "*.h.*.*.c_*", "gpt_neox": "*.layers.*.*.*", "llama": "*.layers.*.*_proj"}

SHAPE = "d_model = 8, n_layer = 2, n_head = 2"
FUNCTIONS = {
    "mlp": "kind = 'mlp', hidden = [4]",
    "mlp, deep": "kind = 'mlp', hidden = [4, 3], sigmoid = 'normal'",
    "vector_mlp": "kind = 'vector_mlp', hidden = [4], sigmoid = 'hard'",
    "vector_mlp, deep": "kind = 'vector_mlp', hidden = [4, 3]",
    "shared_mlp": "kind = 'shared_mlp', hidden = [8], sigmoid = 'upper_leaky_hard'",
    "shared_mlp, conditioned": "kind = 'shared_mlp', hidden = [8], conditioning = { output_scale = 1, min_tokens = 64 }",
    "global_shared_mlp": "kind = 'global_shared_mlp', hidden = [8], sigmoid = 'swish_hard'",
    "global_shared_transformer": f"kind = 'global_shared_transformer', {SHAPE}, hidden = [12]",
    "global_reverse_residual": "kind = 'global_reverse_residual', d_model = 8, groups = GROUPS",
    "global_reverse_residual, whole": "kind = 'global_reverse_residual', d_model = 8, n_head = 2, reader_hidden = [6], "
    "transition_hidden = 10, groups = GROUPS",
    "global_transformer": f"kind = 'global_transformer', {SHAPE}",
    "chunkwise_transformer": f"kind = 'chunkwise_transformer', blocks_per_chunk = 1, {SHAPE}",
    "chunkwise_transformer, whole": f"kind = 'chunkwise_transformer', blocks_per_chunk = 1, input_tap = 'all_block_taps', {SHAPE}, "
    "n_kv_head = 1, causal = true, rope_base = 100, hidden = 10, ffn = 'swiglu', learned_norm_scale = true, document_end = 10, "
    "conditioning = { output_scale = 1, input_scale = 0.5 }",
    "chunkwise_transformer, boundaries": "kind = 'chunkwise_transformer', blocks_per_chunk = 1, "
    "input_tap = { kind = 'residual_boundaries', offsets = [0, 1] }, d_model = 8, n_layer = 0",
    "chunkwise_transformer, by name": "kind = 'chunkwise_transformer', "
    "chunks = [{ sites = ['*.1.*'], taps = ['resid_mid.0', 'resid_post.0'] }, "
    "{ sites = ['*.0.*'], taps = ['resid_pre.0', 'mlp_in.1'] }], d_model = 8, n_layer = 0",
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A model with random weights, and where they are saved."""
    kind, sizes = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        # Larger than a model starts with, so that a wrong number shows.
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if parameter.ndim == 1 and "weight" in name else 0.0))
    out = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(out)
    return request.param, made, out


def sites(of: str, function: str) -> str:
    """Rows of sites: every matrix, and where the function sees them the embedding and the head."""
    rows = [f"{{ pattern = '{MATRICES[of]}', C = 5 }}"]
    if not function.startswith(("vector_mlp", "shared_mlp", "chunkwise")):
        rows.append(f"{{ pattern = '{EMBEDDING[of]}', C = 4 }}")
    if not function.startswith("chunkwise"):
        rows.append(f"{{ pattern = '{HEAD[of]}', C = 3 }}")
    return ", ".join(rows)


def groups(of: str) -> str:
    last = f"{{ name = 'end', patterns = ['{HEAD[of]}', '*.1.*'] }}"
    return f"[{last}, {{ name = 'block.0', patterns = ['*.0.*'] }}, {{ name = 'first', patterns = ['{EMBEDDING[of]}'] }}]"


def held_out(text: Path) -> tuple[Any, Any]:
    """All held-out rows, and their labels."""
    tokens = load_file(text / "val/tokens-00000.safetensors")["tokens"].astype(np.int64)
    assert len(tokens) == ROWS * SEQ_LEN + 1
    windows = torch.tensor(tokens)
    return windows[:-1].view(ROWS, SEQ_LEN), windows[1:].view(ROWS, SEQ_LEN)


def kl(original: Any, masked: Any) -> float:
    p, q = original.log_softmax(-1), masked.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def near(number: float) -> Any:
    return pytest.approx(number, abs=TOLERANCE, rel=TOLERANCE)


@pytest.mark.parametrize("function", FUNCTIONS)
@torch.no_grad()
def test_importances_and_masked_outputs_are_those_of_the_program(
    model: tuple[str, Any, Path], text: Path, decompose: Callable[..., spd.Run], function: str
) -> None:
    of, hf_model, weights = model
    run = decompose(weights, sites(of, function), FUNCTIONS[function].replace("GROUPS", groups(of)))
    row = read_rows(run.path / "metrics.jsonl")[-1]
    ids, labels = held_out(text)
    with run.attach(hf_model) as parts:
        clean = hf_model(ids).logits
        g, z = parts.importances, parts.logits
        ce = float(torch.nn.functional.cross_entropy(clean.flatten(0, 1), labels.flatten()))
        assert ce == near(row["eval/ce/target"])
        for site in run.components:
            assert g[site].shape == (ROWS, SEQ_LEN, len(run.components[site]))
            # A mean of whole numbers: equal unless an importance lies at the border itself.
            assert float((g[site] > 0).sum(-1).double().mean()) == near(row[f"eval/l0/{site}"])
        masks = {
            "unmasked": dict.fromkeys(g, 1.0),
            "ci_masked": g,
            "rounded": {site: (each > 0).float() for site, each in g.items()},
            "zero": dict.fromkeys(g, 0.0),
        }
        for name, each in masks.items():
            parts.mask(each)
            assert kl(clean, hf_model(ids).logits) == near(row[f"eval/kl/{name}"]), name
        parts.mask(dict.fromkeys(g, 1.0), delta=1.0)
        assert float((hf_model(ids).logits - clean).abs().max()) < TOLERANCE
    assert torch.equal(hf_model(ids).logits, clean)
    seen = 0
    for site in run.figures["components"].numbers["sites"]:
        for component in site["components"]:
            for context in component["contexts"]:
                first = context["sample_position"] - context["position"]
                at = context["sample"], slice(first, first + len(context["tokens"]))
                of_program = torch.tensor(context["importances"])
                assert float((g[site["name"]][*at, component["index"]] - of_program).abs().max()) < TOLERANCE
                peak = z[site["name"]][context["sample"], context["sample_position"], component["index"]]
                assert float(peak) == near(context["logit"])
                seen += len(of_program)
    # Some components of each site are important somewhere.
    assert seen > 50 * len(run.components)


MLP = "kind = 'shared_mlp', hidden = [8]"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory, decompose: Callable[..., spd.Run]) -> tuple[spd.Run, Any]:
    """A run of a GPT-2 with its matrices, an identity matrix and its embedding, and the model."""
    torch.manual_seed(0)
    kind, sizes = MODELS["gpt2"]
    hf_model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes)).eval()
    out = tmp_path_factory.mktemp("gpt2")
    hf_model.save_pretrained(out)
    rows = f"{sites('gpt2', 'mlp')}], identity = [{{ pattern = '*.1.mlp.c_fc', C = 6 }}"
    return decompose(out, rows, "kind = 'mlp', hidden = [4]"), hf_model


C_FC = "transformer.h.1.mlp.c_fc"
IDS = [[5, 9, 100, 32, 0], [7, 7, 250, 31, 2]]


@torch.no_grad()
def test_identity_matrices_are_sites_too(gpt2: tuple[spd.Run, Any], text: Path) -> None:
    run, hf_model = gpt2
    row = read_rows(run.path / "metrics.jsonl")[-1]
    ids, _ = held_out(text)
    site = f"{C_FC}.pre_identity"
    with run.attach(hf_model) as parts:
        clean = hf_model(ids).logits
        g = parts.importances
        assert g[site].shape == (ROWS, SEQ_LEN, 6)
        assert float((g[site] > 0).sum(-1).double().mean()) == near(row[f"eval/l0/{site}"])
        parts.mask(g)
        assert kl(clean, hf_model(ids).logits) == near(row["eval/kl/ci_masked"])


@torch.no_grad()
def test_an_ablated_component_is_gone_from_the_weight(gpt2: tuple[spd.Run, Any]) -> None:
    run, hf_model = gpt2
    ids = torch.tensor(IDS)
    embedding = "transformer.wte"
    with run.attach(hf_model) as parts:
        for site, of in ((C_FC, parts.components[C_FC]), (embedding, parts.components[embedding])):
            parts.ablate(f"{site}:2", f"{site}:0")
            ablated = hf_model(ids).logits
            parts.clear()
            module = hf_model.get_submodule(site)
            before = module.weight.clone()
            head = hf_model.lm_head.weight.clone()
            hf_model.lm_head.weight = torch.nn.Parameter(head)
            module.weight -= of.V[:, [0, 2]] @ of.U[[0, 2]]
            assert torch.allclose(hf_model(ids).logits, ablated, atol=TOLERANCE)
            assert not torch.allclose(before, module.weight)
            module.weight.copy_(before)
            hf_model.tie_weights()


@torch.no_grad()
def test_kept_components_are_all_that_is_left(gpt2: tuple[spd.Run, Any]) -> None:
    run, hf_model = gpt2
    ids = torch.tensor(IDS)
    with run.attach(hf_model) as parts:
        clean = hf_model(ids).logits
        parts.keep()
        nothing = hf_model(ids).logits
        parts.mask(dict.fromkeys(run.components, 0.0))
        assert torch.equal(hf_model(ids).logits, nothing)
        parts.keep(*run.components)
        everything = hf_model(ids).logits
        parts.mask(dict.fromkeys(run.components, 1.0))
        assert torch.equal(hf_model(ids).logits, everything)
        parts.keep(*run.components, delta=1.0)
        assert torch.allclose(hf_model(ids).logits, clean, atol=TOLERANCE)
        parts.keep(f"{C_FC}:4", *(site for site in run.components if site != C_FC))
        of = parts.components[C_FC]
        hidden = {}
        hook = hf_model.get_submodule(C_FC).register_forward_hook(lambda _, args, y: hidden.update(x=args[0], y=y))
        hf_model(ids)
        hook.remove()
        bias = hf_model.get_submodule(C_FC).bias
        assert torch.allclose(hidden["y"], hidden["x"] @ of.V[:, 4:5] @ of.U[4:5] + bias, atol=TOLERANCE)


def test_gradients_reach_masks_components_and_importances(gpt2: tuple[spd.Run, Any]) -> None:
    run, hf_model = gpt2
    ids = torch.tensor(IDS)
    with run.attach(hf_model) as parts:
        site = "transformer.h.0.attn.c_proj"
        leaves = [parts.components[site].V, parts.importance[f"{site.replace('.', '-')}.layers.2.b"]]
        for leaf in leaves:
            leaf.requires_grad_()
        clean = hf_model(ids).logits.detach()
        mask = torch.full((*ids.shape, 5), 0.5, requires_grad=True)
        masks = {site: parts.importances[site], "transformer.h.0.mlp.c_fc": mask}
        parts.mask(masks, delta={site: torch.rand(ids.shape)})
        (hf_model(ids).logits - clean).square().sum().backward()
    for leaf in [*leaves, mask]:
        assert leaf.grad is not None and leaf.grad.isfinite().all() and leaf.grad.abs().sum() > 0
    hf_model.zero_grad()


def test_a_dead_component_may_only_be_pushed_up() -> None:
    from spd.importance import gates

    z = torch.tensor([-1.0, -1.0, 0.5, 0.5, 2.0, 2.0], requires_grad=True)
    upstream = torch.tensor([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
    gates.importance("leaky_hard", z).backward(upstream)
    assert z.grad is not None and z.grad.tolist() == pytest.approx([-0.01, 0.0, -1.0, 1.0, 0.0, 0.0])
    z.grad = None
    gates.clamp(z).backward(upstream)
    assert z.grad.tolist() == pytest.approx([-0.01, 0.0, -1.0, 1.0, 0.0, 0.01])


@torch.no_grad()
def test_taps_of_other_blocks_are_read(tmp_path: Path, decompose: Callable[..., spd.Run], text: Path) -> None:
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "window_size": 3, "max_position_embeddings": 16, **SMALL}
    config = transformers.GPTNeoConfig(attention_types=[[["global", "local"], 1]], **sizes)
    sequential = transformers.GPTNeoXConfig(rotary_pct=0.5, use_parallel_residual=False, tie_word_embeddings=True, **BLOCKS)
    for name, each, rows in (("neo", config, "*.h.*.*.c_*"), ("neox", sequential, "*.layers.*.*.*")):
        torch.manual_seed(0)
        hf_model = transformers.AutoModelForCausalLM.from_config(each).eval()
        hf_model.save_pretrained(tmp_path / name)
        function = f"kind = 'global_transformer', input_tap = 'all_resids', {SHAPE}"
        run = decompose(tmp_path / name, f"{{ pattern = '{rows}', C = 5 }}", function)
        row = read_rows(run.path / "metrics.jsonl")[-1]
        ids, _ = held_out(text)
        with run.attach(hf_model) as parts:
            clean = hf_model(ids).logits
            parts.mask(parts.importances)
            assert kl(clean, hf_model(ids).logits) == near(row["eval/kl/ci_masked"])


@torch.no_grad()
def test_a_target_of_rounded_weights_is_attached_to_with_its_own(tmp_path: Path, decompose: Callable[..., spd.Run], text: Path) -> None:
    kind, sizes = MODELS["gpt2"]
    torch.manual_seed(0)
    hf_model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes)).eval()
    hf_model.save_pretrained(tmp_path / "gpt2")
    run = decompose(tmp_path / "gpt2", sites("gpt2", "shared_mlp"), MLP, dtype="bf16")
    weight = hf_model.get_submodule(C_FC).weight
    assert np.array_equal(run.target[f"{C_FC}.weight"], weight.bfloat16().float().numpy())
    with run.attach(hf_model):
        pass
    hf_model.load_state_dict({name: torch.tensor(array) for name, array in run.target.items()}, strict=False)
    row = read_rows(run.path / "metrics.jsonl")[-1]
    ids, _ = held_out(text)
    with run.attach(hf_model) as parts:
        clean = hf_model(ids).logits
        parts.mask(parts.importances)
        assert kl(clean, hf_model(ids).logits) == near(row["eval/kl/ci_masked"])


class Tms(torch.nn.Module):
    """The toy of `tms_5-2-id`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = torch.nn.Linear(5, 2, bias=False)
        self.hidden_layers = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False)])
        self.linear2 = torch.nn.Linear(2, 5)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.linear2(self.hidden_layers[0](self.linear1(x))))


OF_TOYS = {
    "mlp": {"kind": "mlp", "hidden": [16]},
    "vector_mlp": {"kind": "vector_mlp", "hidden": [4]},
    "shared_mlp": {"kind": "shared_mlp", "hidden": [8], "conditioning": {"output_scale": 1, "input_scale": 0.5}},
    "global_shared_mlp": {"kind": "global_shared_mlp", "hidden": [8]},
    "global_shared_transformer": {"kind": "global_shared_transformer", "d_model": 8, "n_layer": 1, "n_head": 2},
    "global_reverse_residual": {
        "kind": "global_reverse_residual",
        "d_model": 8,
        "n_head": 2,
        "groups": [{"name": "end", "patterns": ["linear2", "hidden*"]}, {"name": "start", "patterns": ["linear1"]}],
    },
}


@pytest.mark.parametrize("function", OF_TOYS)
@torch.no_grad()
def test_a_plain_model_has_the_importances_of_the_figure(tmp_path: Path, function: str) -> None:
    said = {**TOY, "importance": OF_TOYS[function]}
    toy = spd.launch("tms_5-2-id", set=said, out=tmp_path / "toy", flags=["--threads", "1"]).wait()
    model = Tms()
    model.load_state_dict({name: torch.tensor(array) for name, array in toy.target.items()})
    with toy.attach(model) as parts:
        # Rows of the figure have one feature of 0.75 each.
        model(0.75 * torch.eye(5))
        for panel in toy.figures["causal_importances"].numbers:
            g = parts.importances[panel["site"]][:, panel["order"]]
            assert float((g - torch.tensor(panel["rows"])).abs().max()) < TOLERANCE


def refusal(work: Callable[[], Any], kind: type[Exception] = spd.AttachError) -> str:
    with pytest.raises(kind) as caught:
        work()
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_models_that_do_not_fit_are_refused(gpt2: tuple[spd.Run, Any]) -> None:
    run, _ = gpt2
    kind, sizes = MODELS["gpt2"]

    def made(**other: Any) -> Any:
        return transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**sizes, **other}))

    line = refusal(lambda: run.attach(made(n_embd=32)))
    assert line == "layer transformer.h.0.attn.c_attn: expected 16 inputs and 48 outputs, found 32 and 96"
    line = refusal(lambda: run.attach(made(n_layer=1)))
    assert line.startswith(f"GPT2LMHeadModel has no layer transformer.h.1.attn.c_attn, a site of {run.path}; did you mean")
    line = refusal(lambda: run.attach(torch.nn.Sequential(torch.nn.Linear(2, 2))))
    assert line.startswith("Sequential has no layer transformer.h.0.attn.c_attn")
    line = refusal(lambda: run.attach(made()))
    assert line.startswith("weight transformer.") and ": expected the numbers of the run's target, found others" in line
    assert isinstance(run.attach(made(), check_weights=False).model, torch.nn.Module)


def test_masks_that_do_not_fit_are_refused(gpt2: tuple[spd.Run, Any]) -> None:
    run, hf_model = gpt2
    with run.attach(hf_model) as parts:
        assert refusal(lambda: parts.importances) == (
            "importances are of a pass without masks, and there was none yet; call the model first"
        )
        assert refusal(lambda: parts.ablate(f"{C_FC}:5"), spd.ComponentError) == f"site {C_FC} has components 0 to 4, found 5"
        assert refusal(lambda: parts.ablate("c_fc:0"), spd.SiteError).startswith(
            f"{run.path} has no site c_fc; its sites are transformer.h.0."
        )
        assert refusal(lambda: parts.keep(f"{C_FC}:x"), spd.ComponentError).endswith(f"found {C_FC}:x")
        assert refusal(lambda: parts.mask({C_FC: torch.ones(2, 4)})) == (
            f"mask of {C_FC}: expected [.., 5], a column for each component, found [2, 4]"
        )
        assert refusal(lambda: parts.mask({C_FC: 1.0}, delta={"lm_head": 1.0})).startswith("delta of lm_head: expected a mask")
        parts.mask({C_FC: torch.ones(3, 5, 5)})
        assert refusal(lambda: hf_model(torch.tensor(IDS))).startswith(f"mask of {C_FC}: expected what broadcasts to [2, 5, 5]")
