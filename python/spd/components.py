"""The components of a run: `V`, `U` and the importance network of each site."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Generic, TypeVar

from ._packages import need
from ._tensors import Array, Renamed, Tensors
from .errors import ComponentError, SiteError

IMPORTANCE = "_ci_fns."
"""Begins the names of the tensors of importance functions."""

OVER_ALL_SITES = ("_global_ci_fn.", "_chunks.")
"""Begin, behind that, those of functions over several sites."""

READOUTS = "readouts."
"""Begins, behind that, those of logits that see their own component."""

T = TypeVar("T")


@dataclass(frozen=True)
class Component(Generic[T]):
    """A rank-one part of a weight matrix: `v` times `u` of its transpose."""

    name: str
    v: T
    """Read from the input: [d_in]."""
    u: T
    """Written to the output: [d_out]."""


@dataclass(frozen=True)
class SiteComponents(Generic[T]):
    """The components of a site, as numpy arrays or tensors."""

    name: str
    """Module path of the weight matrix."""
    V: T
    """[d_in, C]; of an embedding, d_in is the size of the vocabulary."""
    U: T
    """[C, d_out]. `V @ U` approximates the transposed weight, [d_in, d_out]."""
    importance: Mapping[str, T]
    """The tensors of its importance network, by the names of `configs/README.md#importances` without the site. A function over several
    sites gives all that it shares among them."""

    def __len__(self) -> int:
        """C, the number of components."""
        return int(self.U.shape[0])  # type: ignore[attr-defined]

    @property
    def names(self) -> list[str]:
        """`SITE:0`, `SITE:1`, ..."""
        return [f"{self.name}:{index}" for index in range(len(self))]

    def __getitem__(self, index: int) -> Component[T]:
        checked(self.name, len(self), index)
        return Component(f"{self.name}:{index}", self.V[:, index], self.U[index])  # type: ignore[index]

    def torch(self) -> "SiteComponents[Any]":
        """The same as tensors of torch."""
        torch = need("torch", "SiteComponents.torch")

        def tensor(array: T) -> Any:
            # A tensor may be written to, and memory that others see is not.
            return torch.tensor(array)

        importance = {name: tensor(array) for name, array in self.importance.items()}
        return SiteComponents(self.name, tensor(self.V), tensor(self.U), importance)


def checked(site: str, components: int, index: int) -> int:
    """The number of a component, if the site has it."""
    if not 0 <= index < components:
        raise ComponentError(f"site {site} has components 0 to {components - 1}, found {index}")
    return index


def unknown_site(what: str, name: str, sites: list[str]) -> SiteError:
    """The error of a site that is not there."""
    near = get_close_matches(name, sites, 1)
    hint = f"did you mean {near[0]}?" if near else f"its sites are {', '.join(sites[:6])}{', ...' if len(sites) > 6 else ''}"
    return SiteError(f"{what} has no site {name}; {hint}")


class Components(Mapping[str, SiteComponents[Array]]):
    """The sites of a run in its order, each read when it is asked for."""

    def __init__(self, what: str, config: dict[str, Any], tensors: Tensors, order: list[str]) -> None:
        self._what, self._tensors = what, tensors
        # The name of a site has dashes for dots in the names of tensors.
        self._dashed = {}
        for name in order:
            if name.startswith("_components.") and name.endswith(".V"):
                dashed = name.removeprefix("_components.").removesuffix(".V")
                self._dashed[dashed.replace("-", ".")] = dashed
        self._tied: dict[str, str] = {}
        decomposition = config["decomposition"]
        if decomposition.get("tied") and "linear1" in self._dashed and "linear2" not in self._dashed:
            # A toy model of superposition, whose second matrix has the transposes of the first one's.
            self._tied["linear2"] = "linear1"
            rows = [*decomposition.get("sites", []), *decomposition.get("identity", [])]

            def row(site: str) -> int:
                layer = site.removesuffix(".pre_identity")
                matches = (number for number, row in enumerate(rows) if fnmatchcase(layer, row["pattern"]))
                return next(matches, len(rows))

            names = sorted([*self._dashed, "linear2"], key=row)
            self._dashed = {name: name.replace(".", "-") for name in names}

    def __getitem__(self, site: str) -> SiteComponents[Array]:
        if site not in self._dashed:
            raise unknown_site(self._what, site, list(self))
        other = self._tied.get(site)
        part = f"_components.{self._dashed[other or site]}"
        v, u = self._tensors[f"{part}.V"], self._tensors[f"{part}.U"]
        if other is not None:
            v, u = u.T, v.T
        return SiteComponents(site, v, u, self._importance(site))

    def _importance(self, site: str) -> Mapping[str, Array]:
        dashed = self._dashed[site]
        found: dict[str, str] = {}
        for full in self._tensors:
            if not full.startswith(IMPORTANCE):
                continue
            name = full.removeprefix(IMPORTANCE)
            if name.startswith(f"{dashed}."):
                found[name.removeprefix(f"{dashed}.")] = full
            elif name.startswith(READOUTS):
                if name.startswith(f"{READOUTS}{dashed}."):
                    found[READOUTS + name.removeprefix(f"{READOUTS}{dashed}.")] = full
            elif name.startswith(OVER_ALL_SITES):
                found[name] = full
        return Renamed(self._tensors, found)

    def component(self, name: str) -> tuple[str, int]:
        """The site and the number of a component's name, `SITE:NUMBER`."""
        site, colon, number = name.rpartition(":")
        if not colon or not number.isdecimal():
            raise ComponentError(f"expected a component such as {next(iter(self))}:0, found {name}")
        if site not in self._dashed:
            raise unknown_site(self._what, site, list(self))
        return site, checked(site, self.counts[site], int(number))

    @property
    def counts(self) -> dict[str, int]:
        """C of each site."""
        # Of a tied site the other's, which has as many.
        names = {site: f"_components.{self._dashed[self._tied.get(site, site)]}.V" for site in self}
        return {site: self._tensors.shape(name)[1] for site, name in names.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._dashed)

    def __len__(self) -> int:
        return len(self._dashed)
