"""A run directory: its settings, rows, results, figures and components."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ._packages import frame, need
from ._tensors import Array, Renamed, Tensors
from .components import Components
from .errors import RunError
from .harvest import Harvest, find

if TYPE_CHECKING:
    from .attach import Parts

TARGET = "target_model."
"""Begins the names of the target's tensors."""

STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Figure:
    """A figure of a run: its picture, and the numbers in it."""

    name: str
    svg: Path | None
    json: Path | None

    @property
    def numbers(self) -> Any:
        """What its JSON says, as far as it has one."""
        return None if self.json is None else json.loads(self.json.read_bytes())


class Run:
    """A run, which may go on meanwhile: rows, results and figures are those of the moment they are asked for."""

    def __init__(self, path: str | PathLike[str], step: int | None = None) -> None:
        self.path = Path(path)
        config = self.path / "config.toml"
        try:
            text = config.read_bytes().decode()
            self.config: dict[str, Any] = tomllib.loads(text)
        except FileNotFoundError:
            found = "a sweep: open one of the runs in it" if (self.path / "sweep.json").is_file() else "no config.toml"
            raise RunError(f"{self.path}: expected a run directory, found {found}") from None
        except (OSError, ValueError) as error:
            raise RunError(f"{config}: cannot be read: {error}") from error
        self._step = step

    def __repr__(self) -> str:
        return f"spd.open({str(self.path)!r})"

    @property
    def name(self) -> str:
        """The name in its run file."""
        return str(self.config["name"])

    @property
    def rows(self) -> Any:
        """Rows of training and evaluation, `kind` says which: a DataFrame, or without pandas a list of dictionaries."""
        return frame(read_rows(self.path / "metrics.jsonl"))

    @property
    def system(self) -> Any:
        """Rows about phases, speed and events, likewise."""
        return frame(read_rows(self.path / "system.jsonl"))

    @property
    def summary(self) -> dict[str, Any] | None:
        """The results; None while the run is not finished."""
        file = self.path / "summary.json"
        try:
            summary: dict[str, Any] = json.loads(file.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunError(f"{file}: expected JSON: {error}") from error
        return summary

    @property
    def figures(self) -> dict[str, Figure]:
        """Figures of the newest step that has some, by name; of a language model also `components`."""
        newest = dict(list(_steps(self.path / "figures"))[-1:])
        files = sorted(file for directory in newest.values() for file in directory.iterdir())
        names = dict.fromkeys(file.stem for file in files)

        def one(name: str, suffix: str) -> Path | None:
            return next((file for file in files if file.name == name + suffix), None)

        return {name: Figure(name, one(name, ".svg"), one(name, ".json")) for name in names}

    @cached_property
    def step(self) -> int:
        """The step of the checkpoint that components and weights are of: the newest one, unless another was asked for."""
        return self._checkpoint[0]

    @cached_property
    def _checkpoint(self) -> tuple[int, Path]:
        root = self.path / "checkpoints"
        steps = {step: directory for step, directory in _steps(root) if (directory / "manifest.json").is_file()}
        if not steps:
            raise RunError(f"{root}: expected a checkpoint, found none; run it first")
        step = max(steps) if self._step is None else self._step
        if step not in steps:
            raise RunError(f"{root}: has no checkpoint of step {step}; there are those of {', '.join(map(str, steps))}")
        return step, steps[step]

    @cached_property
    def _manifest(self) -> dict[str, Any]:
        file = self._checkpoint[1] / "manifest.json"
        begin, middle, end = b'{"manifest":', b',"xxh3_128":"', b'"}\n'
        try:
            written = file.read_bytes()
            body, _, digest = written.removeprefix(begin).rpartition(middle)
            manifest: dict[str, Any] = json.loads(body)
            if manifest["format"] not in (1, 2):
                raise RunError(f"{file}: expected format 1 or 2, found {manifest['format']}; install a newer spd-launch")
            if xxhash.xxh3_128_hexdigest(body).encode() + end != digest:
                raise RunError(f"{file}: is damaged: it has another hash than it says; open another step")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{file}: is no manifest of a checkpoint: {error!r}") from error
        return manifest

    @property
    def checkpoint_identity(self) -> str:
        """What a harvest knows its checkpoint by: XXH3-64 of the manifest."""
        return xxhash.xxh3_64_hexdigest((self._checkpoint[1] / "manifest.json").read_bytes())

    @cached_property
    def tensors(self) -> Tensors:
        """All tensors of the checkpoint by their names, the target's too."""
        directory = self._checkpoint[1]
        frozen = self._manifest["files"].get("frozen")
        files = [directory / "tensors.safetensors"]
        if frozen is not None:
            files.append(directory.parent / f"frozen-{frozen['xxh3_128']}.safetensors")
        return Tensors(files, {tensor["name"]: tensor["xxh3_128"] for tensor in self._manifest["tensors"]})

    @cached_property
    def components(self) -> Components:
        """The components by site."""
        order = [tensor["name"] for tensor in self._manifest["tensors"]]
        return Components(str(self.path), self.config, self.tensors, order)

    @cached_property
    def target(self) -> Mapping[str, Array]:
        """The weights of the target by their names, as `load_state_dict` takes them."""
        full = (name for name in self.tensors if name.startswith(TARGET))
        return Renamed(self.tensors, {name.removeprefix(TARGET): name for name in full})

    def attach(self, model: Any, *, check_weights: bool = True) -> "Parts":
        """The model with the components of the run inside: see `spd.attach`. It needs torch."""
        need("torch", "Run.attach")
        from .attach import Parts

        return Parts(self, model, check_weights=check_weights)

    def harvest(self, path: str | PathLike[str] | None = None, *, dataset: str | PathLike[str] | None = None) -> Harvest:
        """A harvest of this run's checkpoint by `spd-launch harvest`: the newest one, or that in a directory.

        With `dataset`, harvests of other ones are passed over.
        """
        return find(self, None if path is None else Path(path), dataset)


def open(path: str | PathLike[str], *, step: int | None = None) -> Run:
    """Opens a run directory; `step` is that of a checkpoint other than the newest."""
    return Run(path, step)


def _steps(root: Path) -> Iterator[tuple[int, Path]]:
    """Directories `step-N` in the order of their steps."""
    if root.is_dir():
        found = ((STEP.fullmatch(entry.name), entry) for entry in root.iterdir())
        yield from sorted((int(match[1]), entry) for match, entry in found if match)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, as far as they are finished; see tracker/FORMAT.md."""
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return []
    return [parse_row(line) for line in text.split(b"\n")[:-1] if line]


_NO_JSON = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def parse_row(line: bytes) -> dict[str, Any]:
    """A row; a number that JSON lacks is a string in its line."""
    row = json.loads(line)
    return {key: _NO_JSON.get(value, value) if isinstance(value, str) else value for key, value in row.items()}
