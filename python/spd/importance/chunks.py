"""Which sites the transformers of an importance function predict, and the taps that each reads."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from . import taps


@dataclass(frozen=True)
class Chunk:
    of: str
    """Begins the names of its tensors."""
    sites: list[str]
    taps: list[str]


def chunks(said: dict[str, Any], sites: list[str], target: dict[str, Any]) -> list[Chunk]:
    """The chunks of a run's sites: none of a function that reads no taps. `target` is the table `[target]`."""
    if said["kind"] not in ("global_transformer", "chunkwise_transformer"):
        return []
    numbers = {site: taps.BLOCKS[target["kind"]].number(site) for site in sites}
    blocks = sorted({number for number in numbers.values() if number is not None})
    if said["kind"] == "global_transformer":
        read = said["taps"] if "taps" in said else taps.names(said["input_tap"], blocks, target["n_layer"])
        return [Chunk("_global_ci_fn", sites, read)]
    if "chunks" in said:
        rows = enumerate(said["chunks"])
        return [
            Chunk(f"_chunks.{number}", [site for site in sites if any(fnmatchcase(site, p) for p in row["sites"])], row["taps"])
            for number, row in rows
        ]
    size = said["blocks_per_chunk"]
    groups = [blocks[first : first + size] for first in range(0, len(blocks), size)]
    return [
        Chunk(
            f"_chunks.{number}",
            [site for site in sites if numbers[site] in group],
            taps.names(said["input_tap"], group, target["n_layer"]),
        )
        for number, group in enumerate(groups)
    ]
