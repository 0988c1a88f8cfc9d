"""Runs of Stochastic Parameter Decomposition in Python: `docs/python.md` of the repository has examples."""

from .components import Component, Components, SiteComponents
from .errors import (
    AttachError,
    ComponentError,
    HarvestError,
    LaunchError,
    MissingPackageError,
    RunError,
    SiteError,
    SpdError,
)
from .harvest import Harvest
from .launch import Launch, launch
from .run import Figure, Run, open

__all__ = [
    "AttachError",
    "Component",
    "ComponentError",
    "Components",
    "Figure",
    "Harvest",
    "HarvestError",
    "Launch",
    "LaunchError",
    "MissingPackageError",
    "Run",
    "RunError",
    "SiteComponents",
    "SiteError",
    "SpdError",
    "launch",
    "open",
]
