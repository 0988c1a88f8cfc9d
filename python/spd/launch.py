"""Starts runs by the program `spd-launch`, which the wheel brings along."""

import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .errors import LaunchError
from .run import Run, parse_row

PROGRAM = "spd-launch"

OTHER_FLAGS = ("--seeds", "--sweep", "--dry-run", "--slurm", "--quiet", "-q")
"""Flags with which there is no run to follow, or no word of it."""

PLACE = re.compile(r"^ *directory +(.+) \([^()]*\)$|^results are in (.+)$", re.MULTILINE)
"""The run directory in a plan, or, of a run that is finished already, in its result."""

LOOK_EVERY_S = 0.1
"""How often the file of rows is looked at."""


def program() -> Path:
    """The program: `$SPD_LAUNCH`, or the one of this environment, or the one on the `PATH`."""
    named = os.environ.get("SPD_LAUNCH")
    if named:
        if not os.access(named, os.X_OK):
            raise LaunchError(f"SPD_LAUNCH: expected the program {PROGRAM}, found {named}, which cannot be run")
        return Path(named)
    for folder in (sysconfig.get_path("scripts"), None):
        found = shutil.which(PROGRAM, path=folder)
        if found:
            return Path(found)
    raise LaunchError(f"{PROGRAM} is neither in this environment nor on the PATH; pip install spd-launch")


def launch(
    config: str | os.PathLike[str],
    *,
    set: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    flags: Sequence[str] = (),
) -> "Launch":
    """Starts a run, or continues it, and returns once its plan is made: bad input is raised from here.

    `set` replaces values of the run file, `out` names the run directory, and `flags` are further ones of `spd-launch`, such as
    `["--gpus", "1"]`. The rows of the run come from iterating the result.
    """
    for flag in flags:
        if flag.partition("=")[0] in OTHER_FLAGS:
            raise LaunchError(f"flags: expected those of one run that starts, found {flag}; use spd-launch itself")
    command = [str(program()), os.fspath(config), "--json"]
    for key, value in (set or {}).items():
        command += ["--set", f"{key}={_toml(value)}"]
    if out is not None:
        command += ["--out", os.fspath(out)]
    return Launch([*command, *flags])


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | os.PathLike():
            # A string of JSON is one of TOML too.
            return json.dumps(os.fspath(value), ensure_ascii=False)
        case Mapping():
            return "{ " + ", ".join(f"{_toml(key)} = {_toml(inner)}" for key, inner in value.items()) + " }"
        case Sequence():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case _ if hasattr(value, "item"):
            return _toml(value.item())
    raise TypeError(f"expected a value of a run file, found {value!r}")


class Launch:
    """A run that `spd-launch` is at work on.

    Iterating yields its new rows as they come, until it ends; `wait` waits for the end and returns the run. Both raise `LaunchError`
    with the program's one line if it fails. In a `with` statement the run is asked to save and stop where the block ends early.
    """

    path: Path
    """The run directory."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._errors: list[str] = []
        self._said: list[dict[str, Any]] = []
        self._planned = threading.Event()
        # A pipe that nobody reads would hold the program up.
        self._readers = [
            threading.Thread(target=self._read_results, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._planned.wait()
        texts = [said["text"] for said in self._said if said["kind"] in ("plan", "result")]
        place = PLACE.search(texts[0]) if texts else None
        if place is None:
            self._end()
            raise LaunchError("spd-launch said of no run directory; is it of another version than this package?")
        self.path = Path(place[1] or place[2])
        self._given = len(self._lines())

    def _read_results(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                self._hear(line)
        self._planned.set()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as pipe:
            for line in pipe:
                self._hear(line)

    def _hear(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            said = {"kind": "error", "text": line.decode(errors="replace").rstrip()}
        if said["kind"] == "error":
            self._errors.append(said["text"])
        self._said.append(said)
        if said["kind"] in ("plan", "result"):
            self._planned.set()

    def _lines(self) -> list[bytes]:
        try:
            return (self.path / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        is_over = False
        while True:
            # A run that goes back to a checkpoint makes the same rows again: they are counted, and given once.
            lines = self._lines()
            for line in lines[self._given :]:
                self._given += 1
                yield parse_row(line)
            if is_over:
                break
            is_over = self._process.poll() is not None
            if not is_over:
                time.sleep(LOOK_EVERY_S)
        self.wait()

    def wait(self) -> Run:
        """Waits until the run is done."""
        self._end()
        return Run(self.path)

    def _end(self) -> None:
        code = self._process.wait()
        for reader in self._readers:
            reader.join()
        if code != 0:
            usual = {3: "stopped on request; the same command continues"}.get(code, f"spd-launch ended with code {code}")
            line = self._errors[0] if self._errors else usual
            raise LaunchError(line.splitlines()[0].removeprefix("error: "), code)

    def stop(self) -> None:
        """Asks the run to save and exit, as Ctrl-C does."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    @property
    def is_running(self) -> bool:
        """Whether the program is at work."""
        return self._process.poll() is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        self._process.wait()
