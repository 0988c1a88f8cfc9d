"""Small runs that the program makes for the tests: `spd-launch` of this environment, or that of `$SPD_LAUNCH`."""

import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spd
from spd.launch import program

TOY = {
    "train.steps": 12,
    "train.batch_size": 64,
    "train.faithfulness_warmup.steps": 2,
    "target.train.steps": 20,
    "eval.batches": 2,
    "eval.batch_size": 64,
}
"""Settings of a toy that takes a moment."""

SEQ_LEN = 12
ROWS = 16
"""Held-out rows of the text, all of which an evaluation reads: its means are over the same rows in whatever order."""


@pytest.fixture(scope="session", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trained targets of the tests stay among them, and no test looks at the network or takes more than a thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPD_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        try:
            import torch

            torch.set_num_threads(1)
        except ImportError:
            pass
        yield


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> spd.Run:
    """A finished run of a toy model with a matrix inside."""
    out = tmp_path_factory.mktemp("runs") / "toy"
    return spd.launch("tms_5-2-id", set=TOY, out=out, flags=["--threads", "1"]).wait()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of bytes, whose held-out part is `ROWS` rows."""
    house = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    words = ["the", "cat", "saw", "a", "dog", "and", "ran", "to", "it", "\n"]
    size = ROWS * SEQ_LEN + 1
    written = " ".join(draw.choice(words) for _ in range(4 * size))[: 5 * size]
    (house / "text.txt").write_text(written)
    command = [program(), "tokenize", "text.txt", "--tokenizer", "bytes", "--out", "data", "--val-fraction", "0.2"]
    subprocess.run([*command, "--threads", "1"], cwd=house, check=True, capture_output=True)
    return house / "data"


@pytest.fixture(scope="session")
def decompose(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Callable[..., spd.Run]:
    """Makes a finished run of two steps by a table `[importance]` and rows of sites, of a directory of weights."""

    def run(weights: Path, sites: str, importance: str, dtype: str = "f32") -> spd.Run:
        house = tmp_path_factory.mktemp("run")
        file = house / "run.toml"
        file.write_text(f"""
name = "small"
target = {{ weights = "{weights}", dtype = "{dtype}" }}
data = {{ kind = "tokens", train = "{text}/train", eval = "{text}/val", seq_len = {SEQ_LEN} }}
decomposition = {{ sites = [{sites}] }}
importance = {{ {importance} }}
train = {{ steps = 2, batch_size = 4, lr = 0.02, faithfulness_warmup = {{ steps = 20, lr = 0.02 }} }}
eval = {{ batches = 1, batch_size = {ROWS}, components = 4 }}
[[loss]]
kind = "importance_minimality"
coeff = 1e-3
p = 1.0
[[loss]]
kind = "stochastic_recon"
coeff = 1.0
""")
        return spd.launch(file, out=house / "runs/small", flags=["--threads", "1"]).wait()

    return run
