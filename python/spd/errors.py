"""Errors of this package: each is one line that names the thing, what was expected and what was found."""


class SpdError(Exception):
    """All errors of this package."""

    def __str__(self) -> str:
        # `KeyError` would quote its line.
        return str(self.args[0]) if self.args else ""


class RunError(SpdError):
    """A directory that is no run, or a run without what was asked for."""


class SiteError(SpdError, KeyError):
    """A site that the run does not have."""


class ComponentError(SpdError, IndexError):
    """A component that its site does not have."""


class HarvestError(SpdError):
    """A harvest that is not there, cannot be read, or is of another run or dataset."""


class AttachError(SpdError):
    """A model or masks that do not fit the run."""


class LaunchError(SpdError):
    """A run that was refused, failed or was stopped.

    `code` is the exit code of `spd-launch`: 1 failed, 2 bad input, 3 stopped on request.
    """

    def __init__(self, line: str, code: int | None = None) -> None:
        super().__init__(line)
        self.code = code


class MissingPackageError(SpdError, ImportError):
    """A package that a function needs, which is not installed."""
