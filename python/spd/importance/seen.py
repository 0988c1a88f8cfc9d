"""The view that an importance function has of a clean pass."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from .chunks import Chunk

Weights = Mapping[str, Tensor]
"""The tensors of an importance function by their names behind `_ci_fns.`."""


@dataclass
class SeenSite:
    """The view that it has of a site."""

    name: str
    """Module path."""
    x: Tensor
    """Its input in f32, [.., d_in], or the tokens of an embedding."""
    v_ic: Tensor
    """`V`, [d_in, C]."""
    is_embedding: bool = False

    @property
    def dashed(self) -> str:
        """Its name as it stands in the names of tensors."""
        return self.name.replace(".", "-")

    @property
    def components(self) -> int:
        """C."""
        return int(self.v_ic.shape[1])

    @property
    def activations(self) -> Tensor:
        """`x V` of its components, [.., C]."""
        return self.v_ic[self.x] if self.is_embedding else self.x @ self.v_ic

    @property
    def shown(self) -> Tensor:
        """What a function over all sites sees: its input, or the activations of an embedding."""
        return self.activations if self.is_embedding else self.x


@dataclass
class Seen:
    """The view that it has of all sites, and of the values between them."""

    sites: list[SeenSite]
    """In the order of the run."""
    taps: dict[str, Tensor] = field(default_factory=dict)
    """By their names, in f32."""
    chunks: list[Chunk] = field(default_factory=list)
    """The sites of each transformer that reads taps."""
    tokens: Tensor | None = None
    """Input of the model, where it is tokens."""


Logits = dict[str, Tensor]
"""Logits of each site, [.., C], by its name."""


class ImportanceFunction(Protocol):
    """A module of this folder: from what all sites saw to the logits of all sites. `said` is the table `[importance]` of the run."""

    def logits(self, said: dict[str, Any], weights: Weights, seen: Seen) -> Logits: ...
