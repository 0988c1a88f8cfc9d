"""A harvest as the SQLite file of the SPD reference, beside its tables."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from test_earlier_versions import RUNS

import spd
from spd import _packages

pytest.importorskip("pyarrow")
pytest.importorskip("pandas")


def test_each_active_component_is_a_row_as_the_reference_reads_it(tmp_path: Path) -> None:
    harvest = spd.open(RUNS / "0.1.0/words").harvest()
    file = tmp_path / "harvest.db"
    harvest.write_db(file)
    assert list(tmp_path.iterdir()) == [file]
    with closing(sqlite3.connect(file)) as database:
        database.row_factory = sqlite3.Row
        rows = {row["component_key"]: row for row in database.execute("SELECT * FROM components")}
        config = {key: json.loads(value) for key, value in database.execute("SELECT key, value FROM config")}
        # Rows that those tools add.
        database.execute("INSERT INTO scores VALUES ('a:0', 'intruder', 0.5, '{}')")
        database.execute("INSERT INTO intruder_prompts VALUES ('a:0', 'which?')")
    assert (config["activation_threshold"], config["pmi_token_top_k"], config["activation_context_tokens_per_side"]) == (0.0, 40, 20)
    table = harvest.components()
    assert len(rows) == (table.active > 0).sum() == 12
    site = "transformer.h.0.mlp.c_fc"
    # By hand: the lists of a component are those of its tables.
    for component in range(6):
        row, (of,) = rows[f"{site}:{component}"], harvest.components(site, component).itertuples()
        assert (row["layer"], row["component_idx"], row["firing_density"]) == (site, component, of.density)
        means = {"causal_importance": of.mean_importance, "component_activation": of.mean_activation}
        assert json.loads(row["mean_activations"]) == means
        samples = list(harvest.examples(site, component, kind="sample").itertuples())
        examples = json.loads(row["activation_examples"])
        assert len(examples) == row["n_activation_examples"] == len(samples) > 0
        for example, sample in zip(examples, samples, strict=True):
            assert example["token_ids"] == list(sample.tokens)
            importances, peak = example["activations"]["causal_importance"], sample.position - sample.first
            assert importances[peak] == pytest.approx(sample.importance, abs=1e-7)  # one f32
            assert importances == pytest.approx(list(sample.importances), abs=0.5 / 255 + 1e-4)  # half a 255th, four digits
            assert example["firings"] == [g > 0 or at == peak for at, g in enumerate(importances)]
            assert example["activations"]["component_activation"] == [0.0] * len(importances)
        for column, side in (("input_token_pmi", "input"), ("output_token_pmi", "next")):
            tokens = harvest.tokens(site, component, side=side)
            lists = json.loads(row[column])
            assert list(lists) == ["top", "bottom"]
            for end, found in lists.items():
                of_end = tokens[tokens.end == end]
                assert found == [[token, pmi] for token, pmi in zip(of_end.token, of_end.pmi, strict=True)]


def test_polars_gives_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("polars")
    harvest = spd.open(RUNS / "0.1.0/words").harvest()
    harvest.write_db(tmp_path / "arrow.db")
    monkeypatch.setattr("spd.harvest.maybe", lambda name: None if name.startswith("pyarrow") else _packages.maybe(name))
    harvest.write_db(tmp_path / "polars.db")
    rows = []
    for name in ("arrow", "polars"):
        with closing(sqlite3.connect(tmp_path / f"{name}.db")) as database:
            rows.append(database.execute("SELECT * FROM components").fetchall())
    assert rows[0] == rows[1]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    harvest = spd.open(RUNS / "0.1.0/words").harvest()
    there, nowhere = tmp_path / "there.db", tmp_path / "none/harvest.db"
    there.write_text("x")
    with pytest.raises(spd.HarvestError) as caught:
        harvest.write_db(there)
    assert str(caught.value) == f"{there}: expected a new file, found one that is there; remove it, or give another name"
    with pytest.raises(spd.HarvestError, match=f"^{nowhere}: cannot be written: unable to open database file$"):
        harvest.write_db(nowhere)
    harvest.path = tmp_path
    with pytest.raises(spd.HarvestError, match=r"examples\.parquet: expected a table of the harvest, found no such file$"):
        harvest.write_db(tmp_path / "new.db")
    assert [path.name for path in tmp_path.iterdir()] == ["there.db"]
