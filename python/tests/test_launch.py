"""Runs that are started from Python."""

from pathlib import Path

import pytest
from conftest import TOY

import spd
from spd.launch import _toml
from spd.run import read_rows

THREAD = ["--threads", "1"]


def test_rows_are_streamed_to_the_end_and_a_run_that_goes_on_gives_new_ones(tmp_path: Path) -> None:
    out = tmp_path / "toy"
    started = spd.launch("tms_5-2", set={**TOY, "log.every": 5}, out=out, flags=THREAD)
    assert started.path == out
    rows = list(started)
    assert rows == read_rows(out / "metrics.jsonl")
    assert {row["step"] for row in rows if row["kind"] == "train"} >= {0, 5, 10}
    assert not started.is_running
    assert started.wait().summary is not None
    # A finished run has no more of them.
    assert list(spd.launch("tms_5-2", set={**TOY, "log.every": 5}, out=out, flags=THREAD)) == []


def test_bad_input_is_raised_with_the_line_of_the_program(tmp_path: Path) -> None:
    for config, set, line in (
        ("tms_5-2", {"train.stepz": 1}, "--set train.stepz: unknown key `stepz` in [train]; did you mean `steps`?"),
        ("tms_5-3", {}, "tms_5-3: "),
    ):
        with pytest.raises(spd.LaunchError) as caught:
            spd.launch(config, set=set, out=tmp_path / "x")
        assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
        assert caught.value.code == 2
    assert not (tmp_path / "x").exists()
    with pytest.raises(spd.LaunchError) as caught:
        spd.launch("tms_5-2", flags=["--seeds", "0..2"])
    assert str(caught.value) == "flags: expected those of one run that starts, found --seeds; use spd-launch itself"


def test_a_block_that_ends_early_stops_its_run(tmp_path: Path) -> None:
    with spd.launch("tms_5-2", set={**TOY, "train.steps": 10**6, "log.every": 1}, out=tmp_path / "long", flags=THREAD) as started:
        for row in started:
            if row["kind"] == "train" and row["step"] > 3:
                break
        assert started.is_running
    assert not started.is_running
    with pytest.raises(spd.LaunchError) as caught:
        started.wait()
    assert caught.value.code == 3
    assert spd.open(tmp_path / "long").step > 3


def test_a_program_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPD_LAUNCH", str(tmp_path / "none"))
    with pytest.raises(spd.LaunchError) as caught:
        spd.launch("tms_5-2")
    assert str(caught.value) == f"SPD_LAUNCH: expected the program spd-launch, found {tmp_path}/none, which cannot be run"
    monkeypatch.delenv("SPD_LAUNCH")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(spd.LaunchError, match="pip install spd-launch"):
        spd.launch("tms_5-2")


def test_values_are_those_of_a_run_file() -> None:
    assert _toml(True) == "true" and _toml(1e-3) == "0.001" and _toml(20) == "20"
    assert _toml('a "b"') == '"a \\"b\\""'
    assert _toml([1, 2.5, "x"]) == '[1, 2.5, "x"]'
    assert _toml({"start": 1e-3, "shape": "cosine"}) == '{ "start" = 0.001, "shape" = "cosine" }'
    assert _toml(Path("a/b")) == '"a/b"'
