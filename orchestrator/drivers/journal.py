"""Append-only record of every event and the commands that followed, one JSON object a line.

Written before the commands are carried out, and flushed to the operating system: a killed
orchestrator loses no line. Fields: `t` (the plane's clock, s), `time` (unix, s), `event` and
`commands`; each of the latter is an object with its `type`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.plane.commands import Command
from orchestrator.plane.events import Event


class Journal:
    """One writer. Appends to `path`, which may exist."""

    def __init__(self, path: Path, wall_clock: Callable[[], float]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._wall_clock = wall_clock
        self._encode = msgspec.json.Encoder().encode

    def append(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """One line, in the hands of the operating system when this returns."""
        line = {
            "t": round(now, 6),
            "time": round(self._wall_clock(), 6),
            "event": _tagged(event),
            "commands": [_tagged(command) for command in commands],
        }
        self._file.write(self._encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def _tagged(value: Event | Command) -> dict[str, Any]:
    fields = msgspec.to_builtins(value)
    assert isinstance(fields, dict)
    return {"type": type(value).__name__, **fields}
