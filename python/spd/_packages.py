"""Packages that are used where they are installed, and never forced on anyone."""

import importlib
from collections.abc import Iterable
from typing import Any

from .errors import MissingPackageError


def maybe(name: str) -> Any | None:
    """A module, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def need(name: str, what: str) -> Any:
    """A module that `what` needs."""
    module = maybe(name)
    if module is None:
        package = name.partition(".")[0]
        raise MissingPackageError(f"{what} needs {package}, which is not installed; pip install {package}")
    return module


def frame(rows: Iterable[dict[str, Any]]) -> Any:
    """Rows as a DataFrame where pandas is installed, else as a list of dictionaries."""
    rows = list(rows)
    pandas = maybe("pandas")
    return rows if pandas is None else pandas.DataFrame(rows)
