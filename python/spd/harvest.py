"""What `spd-launch harvest` found of each component: tables that are read when they are asked for, and only the rows that are."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import harvest_db
from ._packages import frame, maybe
from ._tensors import Array, Tensors
from .components import checked, unknown_site
from .errors import HarvestError, MissingPackageError

if TYPE_CHECKING:
    from .run import Run

Filters = list[list[tuple[str, str, Any]]]
"""Rows for which all of any of the lists hold."""


class Harvest:
    """A harvest of a run. Tables are DataFrames, or without pandas lists of dictionaries."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / "harvest.json"
        try:
            self.info: dict[str, Any] = json.loads(file.read_bytes())
            if self.info.get("format", 1) != 1:
                raise HarvestError(f"{file}: expected format 1, found {self.info['format']}; install a newer spd-launch")
            self.counts = {str(site["name"]): int(site["components"]) for site in self.info["setup"]["sites"]}
            self._subject = str(self.info["name"]), int(self.info["step"]), str(self.info["checkpoint"])
            counted, all_parts = self.info["parts"]
            self._is_whole = bool(counted == all_parts)
            self._data: list[str | None] = [dataset["data"] for dataset in self.info["datasets"]]
        except FileNotFoundError:
            raise HarvestError(f"{path}: expected a harvest, found no harvest.json; spd-launch harvest RUN makes one") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HarvestError(f"{file}: is no description of a harvest: {error!r}") from error

    def __repr__(self) -> str:
        return f"Harvest({str(self.path)!r})"

    @property
    def step(self) -> int:
        """The step of its checkpoint."""
        return self._subject[1]

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows that were to be read, and is no shard of a larger one."""
        return self._is_whole

    @property
    def sites(self) -> list[str]:
        """Its sites, in the order of the run."""
        return list(self.counts)

    def components(self, site: str | None = None, component: int | None = None) -> Any:
        """How often components are active, and how strongly: a row for each."""
        return self._table("components", self._of(site, component))

    def examples(self, site: str, component: int, kind: str | None = None) -> Any:
        """Texts in which a component is active, by lot (`kind="sample"`) and where it is strongest (`"strongest"`)."""
        return self._table("examples", self._of(site, component, ("kind", kind)))

    def tokens(self, site: str, component: int, side: str | None = None) -> Any:
        """Tokens at which a component is active (`side="input"`), those that follow there (`"next"`), and those that its removal moves
        (`"removal"`)."""
        return self._table("tokens", self._of(site, component, ("side", side)))

    def pairs(self, site: str, component: int) -> Any:
        """Components that are active where a component is."""
        self._check(site, component)
        sides = [[(f"site_{side}", "==", site), (f"component_{side}", "==", component)] for side in "ab"]
        return self._table("pairs", sides)

    def attributions(self, site: str | None = None, component: int | None = None, *, source: tuple[str, int] | None = None) -> Any:
        """Which components others come from, by `spd-launch attribute`: of one target (`site` may be "logits"), or of one source, whose
        number is -1 for the delta of its site."""
        if site is not None and site != "logits":
            self._check(site, component)
        if source is not None:
            self._check(source[0], None if source[1] == -1 else source[1])
        file = self.path / "attributions.parquet"
        if not file.is_file():
            raise HarvestError(f"{file}: expected attributions, found none; spd-launch attribute {self.info.get('run')} makes them")
        source_site, source_component = source or (None, None)
        columns = {"site": site, "component": component, "source_site": source_site, "source_component": source_component}
        wanted = [(column, "==", value) for column, value in columns.items() if value is not None]
        return self._table("attributions", [wanted] if wanted else [])

    def table(self, name: str) -> Any:
        """A whole table: `components`, `examples`, `tokens`, `pairs`, `attributions`, or another that the harvest has."""
        return self._table(name, [])

    @property
    def arrays(self) -> Mapping[str, Array]:
        """The counts that its tables are made of, by name; each is read when it is asked for."""
        return Tensors([self.path / "harvest.safetensors"])

    def write_db(self, path: str | os.PathLike[str]) -> None:
        """Writes the harvest as a new SQLite file that tools of the SPD reference read: see `spd.harvest_db`."""
        harvest_db.write(self, Path(path))

    def _check(self, site: str, component: int | None) -> None:
        if site not in self.counts:
            raise unknown_site(str(self.path), site, self.sites)
        if component is not None:
            checked(site, self.counts[site], component)

    def _of(self, site: str | None, component: int | None, other: tuple[str, str | None] | None = None) -> Filters:
        if site is None:
            return []
        self._check(site, component)
        wanted = [("site", site), ("component", component), *([other] if other else [])]
        return [[(column, "==", value) for column, value in wanted if value is not None]]

    def _table(self, name: str, filters: Filters) -> Any:
        return self._read(name, filters, _frame)

    def _rows(self, name: str, filters: Filters) -> list[dict[str, Any]]:
        """Rows of a table as dictionaries, whatever is installed."""
        rows: list[dict[str, Any]] = self._read(name, filters, _rows)
        return rows

    def _read(self, name: str, filters: Filters, read: Callable[[Path, Filters], Any]) -> Any:
        file = self.path / f"{name}.parquet"
        if not file.is_file():
            raise HarvestError(f"{file}: expected a table of the harvest, found no such file")
        try:
            return read(file, filters)
        except MissingPackageError:
            raise
        except Exception as error:
            raise HarvestError(f"{file}: cannot be read: {error}".replace("\n", " ")) from error


def _frame(file: Path, filters: Filters) -> Any:
    arrow = maybe("pyarrow.parquet")
    if arrow is not None and maybe("pandas") is not None:
        return arrow.read_table(file, filters=filters or None).to_pandas()
    return frame(_rows(file, filters))


def _rows(file: Path, filters: Filters) -> list[dict[str, Any]]:
    arrow = maybe("pyarrow.parquet")
    if arrow is not None:
        rows: list[dict[str, Any]] = arrow.read_table(file, filters=filters or None).to_pylist()
        return rows
    polars = maybe("polars")
    if polars is None:
        raise MissingPackageError("Harvest needs pyarrow or polars to read parquet, and neither is installed; pip install pyarrow")
    lazy = polars.scan_parquet(file)
    if filters:
        lazy = lazy.filter(
            polars.any_horizontal(*[polars.all_horizontal(*[polars.col(c) == value for c, _, value in each]) for each in filters])
        )
    dicts: list[dict[str, Any]] = lazy.collect().to_dicts()
    return dicts


def find(run: "Run", path: Path | None, dataset: str | os.PathLike[str] | None) -> Harvest:
    """The harvest of a run's checkpoint in a directory, or its newest one there is."""
    root = run.path / "harvests"
    if path is not None:
        harvests = [Harvest(path)]
    else:
        harvests = sorted((Harvest(file.parent) for file in root.glob("*/harvest.json")), key=_age)
        if not harvests:
            raise HarvestError(f"{root}: expected a harvest, found none; spd-launch harvest {run.path} makes one")
    refusals = [_refusal(run, harvest, dataset) for harvest in harvests]
    fitting = [harvest for harvest, refusal in zip(harvests, refusals, strict=True) if refusal is None]
    if not fitting:
        raise HarvestError(refusals[-1])
    return fitting[-1]


def _age(harvest: Harvest) -> tuple[bool, int, int, Path]:
    """Orders harvests as spd-launch does, the newest last. A shard has some of the rows alone."""
    return harvest.is_whole, harvest.step, (harvest.path / "harvest.json").stat().st_mtime_ns, harvest.path


def _refusal(run: "Run", harvest: Harvest, dataset: str | os.PathLike[str] | None) -> str | None:
    """Why a harvest is not the one that was asked for, if so."""
    name, step, checkpoint = harvest._subject
    # A harvest leaves out sites whose rows are no positions.
    if name != run.name or not harvest.counts.items() <= run.components.counts.items():
        return f"{harvest.path}: expected a harvest of the run {run.name}, found one of {name}, with other sites or of another run"
    if step != run.step:
        return f"{harvest.path}: expected a harvest of step {run.step}, found one of step {step}; open the run with step={step}"
    if checkpoint != run.checkpoint_identity:
        return f"{harvest.path}: expected a harvest of {run.path}, found one of another run of that name"
    # The run's own training data have no path there.
    data = [run.config["data"].get("train") if each is None else each for each in harvest._data]
    if dataset is not None and os.fspath(dataset) not in data:
        return f"{harvest.path}: expected a harvest of the dataset {os.fspath(dataset)}, found one of {', '.join(map(str, data))}"
    return None
