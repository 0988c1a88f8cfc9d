"""Harvests, as `spd-launch harvest` lays them out."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import spd
from spd import _packages

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SITES = [{"name": name, "components": 20} for name in ("linear1", "linear2", "hidden_layers.0")]


def write(to: Path, of: spd.Run, data: str | None = None, sites: Any = SITES, **other: Any) -> None:
    """Writes a harvest, with other entries of `harvest.json` if asked for."""
    to.mkdir(parents=True)
    each = [(site["name"], index) for site in sites for index in range(site["components"])]
    names = {"site": [site for site, _ in each], "component": arrow.array([index for _, index in each], arrow.int32())}
    counts = {"positions": [100] * len(each), "active": [index for _, index in each]}
    means = {"density": [index / 100 for _, index in each], "mean_importance": [0.5] * len(each), "mean_activation": [None] * len(each)}
    components = arrow.table({**names, **counts, **means})
    parquet.write_table(components, to / "components.parquet")
    several = [(site, index, rank, kind) for site, index in each for kind in ("sample", "strongest") for rank in range(3)]
    columns: dict[str, Any] = {
        "site": [row[0] for row in several],
        "component": arrow.array([row[1] for row in several], arrow.int32()),
        "rank": [row[2] for row in several],
        "kind": [row[3] for row in several],
        "position": [5] * len(several),
        "first": [4] * len(several),
        "importance": [0.75] * len(several),
        "tokens": [[row[2], 7] for row in several],
        "importances": [[0.0, 0.75]] * len(several),
    }
    parquet.write_table(arrow.table(columns), to / "examples.parquet")
    tokens = {**names, "side": ["input", "next"] * (len(each) // 2), "end": ["top"] * len(each), "text": ["x"] * len(each)}
    tokens = {**tokens, "token": [120] * len(each), "pmi": [0.5] * len(each)}
    parquet.write_table(arrow.table(tokens), to / "tokens.parquet")
    pairs = {
        "site_a": ["linear1", "linear1"],
        "component_a": [0, 1],
        "site_b": ["linear2", "linear1"],
        "component_b": [5, 0],
        "both": [3, 4],
    }
    parquet.write_table(arrow.table(pairs), to / "pairs.parquet")
    attributions = {
        "site": ["linear2", "linear2", "linear2", "logits"],
        "component": [5, 5, 6, 0],
        "source_site": ["linear1", "linear1", "linear1", "linear2"],
        "source_component": [3, -1, 3, 5],
        "mean": [0.5, -0.25, 0.125, 1.0],
    }
    parquet.write_table(arrow.table(attributions), to / "attributions.parquet")
    save_file({"counts": np.arange(4, dtype=np.float32)}, to / "harvest.safetensors")
    info = {
        "name": of.name,
        "run": "runs/x",
        "step": of.step,
        "checkpoint": of.checkpoint_identity,
        "datasets": [{"data": data, "fingerprint": "1234", "rows": 10, "part_rows": 10}],
        "parts": [3, 3],
        "setup": {"sites": sites, "alive": 0.0, "examples": 3},
    }
    (to / "harvest.json").write_text(json.dumps({**info, **other}))


@pytest.fixture
def run(toy: spd.Run, tmp_path: Path) -> spd.Run:
    """A run with two harvests."""
    copy = tmp_path / "run"
    shutil.copytree(toy.path, copy)
    write(copy / "harvests/step-00000012", toy)
    write(copy / "harvests/step-00000012-1234", toy, "data/val")
    return spd.open(copy)


def test_the_newest_harvest_gives_the_rows_of_a_component(run: spd.Run) -> None:
    pandas = pytest.importorskip("pandas")
    harvest = run.harvest()
    assert (harvest.path.name, harvest.step, harvest.sites) == ("step-00000012-1234", 12, ["linear1", "linear2", "hidden_layers.0"])
    assert len(harvest.components()) == 60 and len(harvest.components("linear2")) == 20
    assert harvest.components("linear2", 7)["active"].tolist() == [7]
    examples = harvest.examples("hidden_layers.0", 3)
    assert isinstance(examples, pandas.DataFrame)
    assert len(examples) == 6 and set(examples.component) == {3} and set(examples.site) == {"hidden_layers.0"}
    assert [list(tokens) for tokens in harvest.examples("linear1", 0, kind="sample").tokens] == [[0, 7], [1, 7], [2, 7]]
    assert len(harvest.tokens("linear1", 0)) == 1 and len(harvest.tokens("linear1", 0, side="next")) == 0
    # On either side of a pair.
    assert harvest.pairs("linear1", 0)["both"].tolist() == [3, 4] and harvest.pairs("linear2", 5)["both"].tolist() == [3]
    assert len(harvest.table("pairs")) == 2
    assert harvest.attributions("linear2", 5)["mean"].tolist() == [0.5, -0.25]
    assert harvest.attributions("logits")["source_component"].tolist() == [5] and len(harvest.attributions()) == 4
    assert harvest.attributions(source=("linear1", 3))["component"].tolist() == [5, 6]
    assert harvest.attributions("linear2", source=("linear1", -1))["mean"].tolist() == [-0.25]
    assert harvest.arrays["counts"].tolist() == [0, 1, 2, 3]


def test_without_pandas_rows_are_dictionaries(run: spd.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _packages.maybe
    monkeypatch.setattr("spd.harvest.maybe", lambda name: None if name == "pandas" else real(name))
    monkeypatch.setattr(_packages, "maybe", lambda name: None if name == "pandas" else real(name))
    assert run.harvest().components("linear1", 2) == [
        {
            "site": "linear1",
            "component": 2,
            "positions": 100,
            "active": 2,
            "density": 0.02,
            "mean_importance": 0.5,
            "mean_activation": None,
        }
    ]
    monkeypatch.setattr("spd.harvest.maybe", lambda name: None)
    with pytest.raises(spd.MissingPackageError, match="pip install pyarrow"):
        run.harvest().components()


def test_polars_reads_the_same_rows(run: spd.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("polars")
    real = _packages.maybe
    by_arrow = run.harvest().pairs("linear1", 0), run.harvest().examples("linear1", 1), run.harvest().components()
    monkeypatch.setattr("spd.harvest.maybe", lambda name: None if name == "pyarrow.parquet" else real(name))
    by_polars = run.harvest().pairs("linear1", 0), run.harvest().examples("linear1", 1), run.harvest().components()
    for one, other in zip(by_arrow, by_polars, strict=True):
        as_lists = [[list(cell) if hasattr(cell, "__len__") else cell for cell in row] for row in one.values]
        assert as_lists == [[list(cell) if hasattr(cell, "__len__") else cell for cell in row] for row in other.values]


def test_the_newest_is_that_of_spd_launch(run: spd.Run, toy: spd.Run) -> None:
    root = run.path / "harvests"
    written = (root / "step-00000012/harvest.json").stat().st_mtime_ns
    os.utime(root / "step-00000012-1234/harvest.json", ns=(written, written))
    assert run.harvest().path.name == "step-00000012-1234"
    # Of two shards the last one that was written, though others are whole, of another checkpoint.
    for name in ("step-00000012", "step-00000012-1234"):
        shutil.rmtree(root / name)
    write(root / "step-00000016", toy, step=16)
    for number in (1, 0):
        write(root / f"step-00000012-shard-{number}-of-2", toy, parts=[1, 2])
    assert run.harvest().path.name == "step-00000012-shard-0-of-2"


def line_of(run: spd.Run, *path: Path, dataset: str | None = None) -> str:
    with pytest.raises(spd.HarvestError) as caught:
        run.harvest(*path, dataset=dataset).table("none")
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_harvests_that_do_not_fit_are_refused(run: spd.Run, toy: spd.Run, tmp_path: Path) -> None:
    root = run.path / "harvests"
    newest = root / "step-00000012-1234"
    assert run.harvest(dataset="data/val").path == newest
    # A harvest leaves out sites whose rows are no positions; and a shard is not taken for all of it.
    write(root / "step-00000012-part", toy, sites=SITES[:1])
    assert run.harvest().sites == ["linear1"]
    shutil.rmtree(root / "step-00000012-part")
    write(root / "step-00000012-shard-0-of-2", toy, parts=[1, 3])
    assert run.harvest().path == newest
    assert not run.harvest(root / "step-00000012-shard-0-of-2").is_whole
    assert line_of(run, dataset="data/test") == f"{newest}: expected a harvest of the dataset data/test, found one of data/val"
    for number, (entries, expected) in enumerate(
        (
            ({"name": "gpt2"}, "a harvest of the run tms_5-2-id, found one of gpt2, with other sites or of another run"),
            (
                {"setup": {"sites": [{"name": "linear1", "components": 4}]}},
                "a harvest of the run tms_5-2-id, found one of tms_5-2-id, with other sites or of another run",
            ),
            ({"step": 4}, "a harvest of step 12, found one of step 4; open the run with step=4"),
            ({"checkpoint": "0" * 16}, f"a harvest of {run.path}, found one of another run of that name"),
        )
    ):
        other = tmp_path / f"other-{number}"
        write(other, toy, **entries)
        assert line_of(run, other) == f"{other}: expected {expected}"
    assert line_of(run, tmp_path) == f"{tmp_path}: expected a harvest, found no harvest.json; spd-launch harvest RUN makes one"
    assert line_of(toy) == f"{toy.path}/harvests: expected a harvest, found none; spd-launch harvest {toy.path} makes one"
    assert line_of(run) == f"{newest}/none.parquet: expected a table of the harvest, found no such file"
    (newest / "attributions.parquet").unlink()
    with pytest.raises(spd.HarvestError) as caught:
        run.harvest().attributions("logits")
    line = f"{newest}/attributions.parquet: expected attributions, found none; spd-launch attribute runs/x makes them"
    assert str(caught.value) == line
    (newest / "none.parquet").write_text("no parquet")
    assert line_of(run).startswith(f"{newest}/none.parquet: cannot be read: ")
    (other / "harvest.json").write_text("{}")
    assert line_of(run, other).startswith(f"{other}/harvest.json: is no description of a harvest: ")
    (other / "harvest.json").write_text('{"format": 2}')
    assert line_of(run, other) == f"{other}/harvest.json: expected format 1, found 2; install a newer spd-launch"


def test_components_that_are_not_there_are_named_with_their_range(run: spd.Run) -> None:
    harvest = run.harvest()
    with pytest.raises(spd.ComponentError) as caught:
        harvest.examples("linear1", 20)
    assert str(caught.value) == "site linear1 has components 0 to 19, found 20"
    with pytest.raises(spd.SiteError) as of_site:
        harvest.tokens("linear3", 0)
    assert str(of_site.value) == f"{harvest.path} has no site linear3; did you mean linear2?"
