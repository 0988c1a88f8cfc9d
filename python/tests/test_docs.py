"""The code of docs/python.md runs as it stands there."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from test_harvest import write

import spd

PAGE = Path(__file__).parents[2] / "docs/python.md"


def test_the_code_of_the_page_runs(tmp_path: Path, decompose: Callable[..., spd.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torch", "transformers", "pandas", "pyarrow"):
        pytest.importorskip(package)
    import torch
    import transformers

    monkeypatch.chdir(tmp_path)
    # The run that the page starts takes a hundred steps of a target that is trained in a moment.
    config = transformers.GPT2Config(vocab_size=256, n_positions=16, n_embd=16, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("weights/gpt2")
    run = decompose(tmp_path / "weights/gpt2", "{ pattern = '*.h.*.*.c_*', C = 5 }", "kind = 'shared_mlp', hidden = [4]")
    os.makedirs("runs")
    run.path.rename("runs/gpt2")
    run = spd.open("runs/gpt2")
    sites = [{"name": name, "components": count} for name, count in run.components.counts.items()]
    write(run.path / "harvests/step-00000002", run, sites=sites)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 6
    names: dict[str, object] = {}
    for block in blocks:
        code = block.replace('"train.steps": 100', '"train.steps": 100, "target.train.steps": 20, "train.batch_size": 64')
        exec(compile(code, str(PAGE), "exec"), names)
    last = names["run"]
    assert isinstance(last, spd.Run) and last.step == 100
