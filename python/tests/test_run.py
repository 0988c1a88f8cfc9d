"""A run directory as Python sees it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import spd
from spd import _packages
from spd.run import read_rows


def test_settings_rows_results_and_figures_are_those_of_the_directory(toy: spd.Run) -> None:
    assert (toy.name, toy.config["train"]["steps"], toy.step) == ("tms_5-2-id", 12, 12)
    assert toy.summary is not None and toy.summary["title"] == "tms_5-2-id: 12 steps, seed 0"
    lines = (toy.path / "metrics.jsonl").read_text().splitlines()
    rows = read_rows(toy.path / "metrics.jsonl")
    assert rows == [json.loads(line) for line in lines] and len(rows) > 3
    assert len(toy.rows) == len(rows) and len(toy.system) > 0
    figure = toy.figures["uv_matrices"]
    assert figure.svg is not None and figure.svg.read_text().startswith("<svg")
    assert figure.numbers is not None


def test_rows_are_a_frame_where_pandas_is_and_else_dictionaries(toy: spd.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    assert isinstance(toy.rows, pandas.DataFrame)
    train = toy.rows[toy.rows.kind == "train"]
    assert (train["loss/total"] > 0).all()
    monkeypatch.setattr(_packages, "maybe", lambda name: None)
    assert toy.rows == read_rows(toy.path / "metrics.jsonl")


def test_an_unfinished_row_is_left_out_and_numbers_that_json_lacks_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_rows(file) == []
    file.write_text('{"step":1,"kind":"train","a":"Infinity","b":"-Infinity","c":"NaN","note":"x"}\n{"step":2,"ki')
    (row,) = read_rows(file)
    assert (row["a"], row["b"], row["note"]) == (float("inf"), float("-inf"), "x") and np.isnan(row["c"])


def test_components_are_the_tensors_of_the_newest_checkpoint(toy: spd.Run) -> None:
    tensors = load_file(toy.path / "checkpoints/step-00000012/tensors.safetensors")
    assert list(toy.components) == ["linear1", "linear2", "hidden_layers.0"]
    site = toy.components["hidden_layers.0"]
    assert np.array_equal(site.V, tensors["_components.hidden_layers-0.V"]) and np.array_equal(
        site.U, tensors["_components.hidden_layers-0.U"]
    )
    assert np.array_equal(site.importance["layers.2.W"], tensors["_ci_fns.hidden_layers-0.layers.2.W"])
    assert (len(site), site.names[17], site[17].name) == (20, "hidden_layers.0:17", "hidden_layers.0:17")
    assert np.array_equal(site[17].v, site.V[:, 17]) and np.array_equal(site[17].u, site.U[17])
    # The second matrix of a toy of superposition has the first one's components, transposed.
    first, second = toy.components["linear1"], toy.components["linear2"]
    assert np.array_equal(second.V, first.U.T) and np.array_equal(second.U, first.V.T)
    assert toy.components.counts == {"linear1": 20, "linear2": 20, "hidden_layers.0": 20}
    assert toy.target["linear1.weight"].shape == (2, 5) and len(toy.target) == 4


def test_tensors_of_torch_are_the_same_numbers(toy: spd.Run) -> None:
    torch = pytest.importorskip("torch")
    site = toy.components["linear1"]
    made = site.torch()
    assert isinstance(made.V, torch.Tensor) and np.array_equal(made.V.numpy(), site.V)
    assert made.importance.keys() == site.importance.keys()


def test_a_site_or_component_that_is_not_there_is_named_with_what_there_is(toy: spd.Run) -> None:
    with pytest.raises(spd.SiteError) as caught:
        toy.components["linear3"]
    assert str(caught.value) == f"{toy.path} has no site linear3; did you mean linear2?"
    assert "linear3" not in toy.components
    for index in (20, -1):
        with pytest.raises(spd.ComponentError) as of_component:
            toy.components["linear1"][index]
        assert str(of_component.value) == f"site linear1 has components 0 to 19, found {index}"
    # Those of the standard library hold too.
    assert issubclass(spd.SiteError, KeyError) and issubclass(spd.ComponentError, IndexError)


def line_of(path: Path, step: int | None = None) -> str:
    with pytest.raises(spd.RunError) as caught:
        list(spd.open(path, step=step).components)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_directories_that_are_no_runs_are_refused(toy: spd.Run, tmp_path: Path) -> None:
    assert line_of(tmp_path) == f"{tmp_path}: expected a run directory, found no config.toml"
    (tmp_path / "sweep.json").write_text("{}")
    assert line_of(tmp_path) == f"{tmp_path}: expected a run directory, found a sweep: open one of the runs in it"
    copy = tmp_path / "copy"
    shutil.copytree(toy.path, copy)
    assert line_of(copy, 5) == f"{copy}/checkpoints: has no checkpoint of step 5; there are those of 12"
    manifest = copy / "checkpoints/step-00000012/manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"format":2', '"format":3'))
    assert line_of(copy) == f"{manifest}: expected format 1 or 2, found 3; install a newer spd-launch"
    manifest.write_text(whole[:99])
    assert line_of(copy).startswith(f"{manifest}: is no manifest of a checkpoint: ")
    manifest.write_text(whole.replace('"step":12', '"step":13'))
    assert line_of(copy) == f"{manifest}: is damaged: it has another hash than it says; open another step"
    manifest.write_text(whole)
    tensors = copy / "checkpoints/step-00000012/tensors.safetensors"
    bytes_of = tensors.read_bytes()
    # The last of all is a number of some tensor.
    tensors.write_bytes(bytes_of[:-1] + bytes([bytes_of[-1] ^ 1]))
    with pytest.raises(spd.RunError, match="is damaged: its bytes have another hash than the manifest says"):
        dict(spd.open(copy).tensors)
    tensors.write_bytes(bytes_of[:50])
    assert line_of(copy).startswith(f"{tensors}: expected a safetensors file, found: ")
    shutil.rmtree(copy / "checkpoints")
    assert line_of(copy) == f"{copy}/checkpoints: expected a checkpoint, found none; run it first"
    (copy / "config.toml").write_text("name = ")
    assert line_of(copy).startswith(f"{copy}/config.toml: cannot be read: ")
