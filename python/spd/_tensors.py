"""Tensors of safetensors files as numpy arrays, each read, and compared with its hash, when it is asked for."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from .errors import RunError

Array = np.ndarray


class Tensors(Mapping[str, Array]):
    """The tensors of some files by name. bf16, which numpy does not have, is widened to f32."""

    def __init__(self, files: list[Path], hashes: Mapping[str, str] | None = None) -> None:
        """`hashes` are XXH3-128 of the bytes of tensors, where they are known."""
        # Files stay open: a run that goes on deletes its older checkpoints.
        self._of: dict[str, tuple[Path, safe_open]] = {}
        self._hashes = hashes or {}
        for file in files:
            try:
                opened = safe_open(file, framework="numpy")
            except (OSError, SafetensorError) as error:
                raise RunError(f"{file}: expected a safetensors file, found: {error}".replace("\n", " ")) from error
            self._of |= dict.fromkeys(opened.keys(), (file, opened))

    def __getitem__(self, name: str) -> Array:
        file, opened = self._of[name]
        is_bf16 = opened.get_slice(name).get_dtype() == "BF16"
        array = np.ascontiguousarray(_halves(file, name) if is_bf16 else opened.get_tensor(name))
        expected = self._hashes.get(name)
        if expected is not None and xxhash.xxh3_128_hexdigest(array.data) != expected:
            raise RunError(f"{file}: tensor {name} is damaged: its bytes have another hash than the manifest says; open another step")
        # bf16 is the upper half of an f32.
        return (array.astype("<u4") << 16).view("<f4") if is_bf16 else array

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor, which is not read."""
        return list(self._of[name][1].get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)


class Renamed(Mapping[str, Array]):
    """Some tensors under names of their own, each read when it is asked for."""

    def __init__(self, tensors: Tensors, full: Mapping[str, str]) -> None:
        """`full` are their names in the file by those here."""
        self._tensors, self._full = tensors, full

    def __getitem__(self, name: str) -> Array:
        return self._tensors[self._full[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._full)

    def __len__(self) -> int:
        return len(self._full)


def _halves(file: Path, name: str) -> Array:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        entry = json.loads(opened.read(size))[name]
        first, end = entry["data_offsets"]
        opened.seek(8 + size + first)
        return np.frombuffer(opened.read(end - first), "<u2").reshape(entry["shape"])
