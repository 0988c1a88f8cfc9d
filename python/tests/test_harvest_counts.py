"""A harvest beside a plain count by torch: the same model, text and components."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROWS, SEQ_LEN
from safetensors.numpy import load_file
from test_attach import FUNCTIONS, model, sites  # noqa: F401

import spd
from spd.launch import program

torch = pytest.importorskip("torch")
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

BORDER = 1e-4
"""Importances nearer to a border than this may lie on its other side: they differ by 1e-5."""


@pytest.mark.parametrize("function", ["shared_mlp", "global_transformer"])
@torch.no_grad()
def test_a_harvest_is_a_plain_count(
    model: tuple[str, Any, Path],  # noqa: F811
    text: Path,
    decompose: Callable[..., spd.Run],
    function: str,
) -> None:
    of, hf_model, weights = model
    run = decompose(weights, sites(of, function), FUNCTIONS[function])
    subprocess.run([program(), "harvest", run.path, "--data", text / "val", "--threads", "1"], check=True, capture_output=True)
    harvest = run.harvest(dataset=text / "val")
    ids = torch.tensor(load_file(text / "val/tokens-00000.safetensors")["tokens"].astype(np.int64))[:-1].view(ROWS, SEQ_LEN)
    with run.attach(hf_model) as parts:
        probabilities = hf_model(ids).logits.double().softmax(-1).flatten(0, 1)
        importances = {site: g.flatten(0, 1).double() for site, g in parts.importances.items()}
        logits = {site: z.flatten(0, 1) for site, z in parts.logits.items()}
        sizes = {}
        for site, x in parts._inputs.items():
            c = parts.components[site]
            acts = c.V[x] if parts._kinds[site] == "Embedding" else x @ c.V
            sizes[site] = acts.flatten(0, -2).abs().double() * c.U.norm(dim=1).double()
    n, alive, tokens = ROWS * SEQ_LEN, harvest.info["setup"]["alive"], ids.flatten()
    assert harvest.info["positions"] == n
    active = {site: g > alive for site, g in importances.items()}
    near = {site: ((g - alive).abs() < BORDER) & (g != 0) for site, g in importances.items()}
    seen = 0
    for site, g in importances.items():
        table = harvest.components(site)
        assert np.allclose(table.mean_importance, g.mean(0), atol=1e-5, rtol=0)
        assert np.allclose(table.mean_activation, sizes[site].mean(0), atol=1e-5, rtol=1e-5)
        histogram = harvest.arrays[f"importance_histogram/{site}"]
        assert (histogram.sum(1) == n).all()
        for c in range(g.shape[1]):
            if near[site][:, c].any():
                continue
            on = active[site][:, c]
            assert table.active[c] == int(on.sum())
            by_token = torch.bincount(tokens[on], minlength=256)
            of_all = torch.bincount(tokens, minlength=256)
            found = harvest.tokens(site, c, side="input")
            assert len(found) == min(80, int(((by_token > 0) & (of_all >= 10)).sum()))
            for row in found.itertuples():
                assert row.count == int(by_token[row.token])
                assert row.pmi == pytest.approx(float(torch.log(by_token[row.token] / on.sum() * n / of_all[row.token])), abs=1e-5)
            likely = torch.where(probabilities >= 1e-3, probabilities, 0.0)
            for row in harvest.tokens(site, c, side="next").itertuples():
                assert row.count == pytest.approx(float(likely[on, row.token].sum()), abs=2e-3)
            examples = harvest.examples(site, c, kind="sample")
            assert sorted(examples.offset) == torch.nonzero(on).flatten().tolist()
            for row in examples.itertuples():
                row_of, t = divmod(row.offset, SEQ_LEN)
                assert t == row.position
                assert row.importance == pytest.approx(float(g[row.offset, c]), abs=1e-5)
                assert row.logit == pytest.approx(float(logits[site][row.offset, c]), abs=1e-4)
                assert row.tokens.tolist() == ids[row_of].tolist()
            strongest = harvest.examples(site, c, kind="strongest")
            peaks = torch.where(on, logits[site][:, c], -torch.inf).view(ROWS, SEQ_LEN).amax(1).sort(descending=True).values
            peaks = peaks[peaks > -torch.inf][:12]
            assert np.allclose(strongest.logit, peaks, atol=1e-4)
            for row in harvest.pairs(site, c).itertuples():
                a, b = active[row.site_a][:, row.component_a], active[row.site_b][:, row.component_b]
                if near[row.site_a][:, row.component_a].any() or near[row.site_b][:, row.component_b].any():
                    continue
                assert row.both == int((a & b).sum())
                seen += 1
    assert seen > 100
