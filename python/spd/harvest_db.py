"""A harvest as the SQLite file that tools of the SPD reference read: `harvest.db` of a run of `param-decomp`, earlier `spd`.

`docs/python.md` has its columns, and what differs from a harvest of the reference. `scores` and `intruder_prompts` are empty: those tools
fill them.
"""

import json
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import HarvestError

if TYPE_CHECKING:
    from .harvest import Harvest

TABLES = {
    "components": {
        "component_key": "TEXT PRIMARY KEY",
        "layer": "TEXT NOT NULL",
        "component_idx": "INTEGER NOT NULL",
        "firing_density": "REAL NOT NULL",
        "n_activation_examples": "INTEGER NOT NULL",
        "mean_activations": "TEXT NOT NULL",
        "activation_examples": "TEXT NOT NULL",
        "input_token_pmi": "TEXT NOT NULL",
        "output_token_pmi": "TEXT NOT NULL",
    },
    "config": {"key": "TEXT PRIMARY KEY", "value": "TEXT NOT NULL"},
    "scores": {
        "component_key": "TEXT NOT NULL",
        "score_type": "TEXT NOT NULL",
        "score": "REAL NOT NULL",
        "details": "TEXT NOT NULL",
        "PRIMARY KEY": "(component_key, score_type)",
    },
    "intruder_prompts": {"trial_key": "TEXT PRIMARY KEY", "prompt": "TEXT NOT NULL"},
}

TOKENS = 40
"""Tokens of the highest and of the lowest mutual information in a harvest."""

CONTEXT = 20
"""Tokens on each side of the one that was drawn."""


def write(harvest: "Harvest", path: Path) -> None:
    """Writes the file, whole or not at all."""
    if path.exists():
        raise HarvestError(f"{path}: expected a new file, found one that is there; remove it, or give another name")
    part = path.with_name(f".tmp-{path.name}")
    part.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(part)) as database:
            for name, columns in TABLES.items():
                database.execute(f"CREATE TABLE {name} ({', '.join(f'{column} {kind}' for column, kind in columns.items())})")
            database.executemany("INSERT INTO config VALUES (?, ?)", ((key, json.dumps(value)) for key, value in _config(harvest)))
            for site in harvest.sites:
                database.executemany(f"INSERT INTO components VALUES ({', '.join('?' * len(TABLES['components']))})", _rows(harvest, site))
            database.commit()
        os.replace(part, path)
    except (OSError, sqlite3.Error) as error:
        raise HarvestError(f"{path}: cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def _config(harvest: "Harvest") -> Iterator[tuple[str, Any]]:
    setup = harvest.info["setup"]
    yield "activation_threshold", setup["alive"]
    yield "activation_examples_per_component", setup["examples"]
    yield "activation_context_tokens_per_side", CONTEXT
    yield "pmi_token_top_k", TOKENS
    yield "method_config", {"type": "spd-launch harvest", **harvest.info}


def _rows(harvest: "Harvest", site: str) -> Iterator[tuple[Any, ...]]:
    alive = harvest.info["setup"]["alive"]
    of_site = ("site", "==", site)
    examples: dict[int, list[Any]] = defaultdict(list)
    for row in harvest._rows("examples", [[of_site, ("kind", "==", "sample")]]):
        peak = row["position"] - row["first"]
        importances = [round(g, 4) for g in row["importances"]]
        importances[peak] = row["importance"]
        firings = [g > alive or at == peak for at, g in enumerate(importances)]
        activations = {"causal_importance": importances, "component_activation": [0.0] * len(importances)}
        examples[row["component"]].append({"token_ids": row["tokens"], "firings": firings, "activations": activations})
    tokens: dict[tuple[int, str, str], list[Any]] = defaultdict(list)
    for row in harvest._rows("tokens", [[of_site, ("side", "==", side)] for side in ("input", "next")]):
        tokens[row["component"], row["side"], row["end"]].append([row["token"], row["pmi"]])
    for row in harvest._rows("components", [[of_site]]):
        if row["active"] == 0:
            continue
        component = row["component"]
        means = {"causal_importance": row["mean_importance"], "component_activation": row["mean_activation"]}
        yield (
            f"{site}:{component}",
            site,
            component,
            row["density"],
            len(examples[component]),
            json.dumps({name: mean for name, mean in means.items() if mean is not None}),
            json.dumps(examples[component]),
            *(json.dumps({end: tokens[component, side, end] for end in ("top", "bottom")}) for side in ("input", "next")),
        )
