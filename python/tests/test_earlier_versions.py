"""Runs that earlier versions wrote: `launcher/tests/runs-of/make` makes those of a version."""

from pathlib import Path

import numpy as np
import pytest

import spd
from spd.run import read_rows

RUNS = Path(__file__).parents[2] / "launcher/tests/runs-of"
VERSIONS = sorted(path.name for path in RUNS.iterdir() if path.is_dir())


@pytest.mark.parametrize("version", VERSIONS)
def test_all_of_a_run_is_read(version: str) -> None:
    toy, words = spd.open(RUNS / version / "toy"), spd.open(RUNS / version / "words")
    assert (toy.step, toy.summary, list(toy.components)) == (6, None, ["linear1", "linear2", "hidden_layers.0"])
    assert words.step == 4 and words.summary is not None and "eval/ce/ci_masked" in words.summary["values"]
    assert words.components.counts == {"transformer.h.0.attn.c_attn": 6, "transformer.h.0.mlp.c_fc": 6}
    site = words.components["transformer.h.0.mlp.c_fc"]
    assert (site.V.shape, site.U.shape, words.target["transformer.wte.weight"].shape) == ((16, 6), (6, 32), (256, 16))
    assert np.isfinite(site.V).all()
    assert read_rows(words.path / "metrics.jsonl")[-1]["step"] == 4 and len(words.system) > 0
    assert [one["name"] for one in words.figures["components"].numbers["sites"]] == list(words.components)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_harvest_is_read(version: str) -> None:
    pytest.importorskip("pyarrow")
    harvest = spd.open(RUNS / version / "words").harvest()
    assert harvest.is_whole and harvest.info["positions"] == 320
    for name in ("components", "examples", "tokens", "pairs"):
        assert len(harvest.table(name)) > 0
    assert harvest.arrays["importance_histogram/transformer.h.0.mlp.c_fc"].sum() == 6 * 320
