"""Append-only record of a run's events and the commands that followed, one JSON object a line.

    output_dir/journal.jsonl            the segment that is written
    output_dir/journal.000001.jsonl     older segments, the newest `MAX_SEGMENTS` of them
    output_dir/journal.lock             held by the one orchestrator that writes

A segment begins with a `Header`: settings, and all that the core remembered; each other line has
`t` (the plane's clock, s, exact), `time` (unix, s), `event` and `commands`, objects with their
`type`. So one segment alone is enough to restart, or to repeat what the core decided in it. A new
one begins at each start, and when a segment has `SEGMENT_BYTES`.

Sync policy: a line is in the hands of the operating system before its commands are carried out, so
that a killed orchestrator loses nothing that it has acted on. A line with a new generation, and a
header, are on the disk before: a machine that loses its power never uses a number twice.
A last line without its end was never acted on, and is ignored.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, get_args

import msgspec

from orchestrator.plane.commands import Command, Open
from orchestrator.plane.events import Event
from orchestrator.plane.state import PlaneMemory, PlaneSettings

SCHEMA = 1
SEGMENT_BYTES = 8 << 20
MAX_SEGMENTS = 128
_OLD_SEGMENT = re.compile(r"journal\.(\d{6})\.jsonl")


class JournalInUse(RuntimeError):
    """Another orchestrator writes this journal."""


class BadLine(ValueError):
    """A line that cannot be read, with its file and number."""


@dataclass(frozen=True, slots=True)
class Header:
    """First line of a segment. `start` counts the orchestrators of the run; `urls` and `groups` are
    those of the config; `memory` None: the run begins here."""

    run_id: str
    start: int
    settings: PlaneSettings
    urls: tuple[str, ...]
    groups: tuple[int, ...]
    t: float
    memory: PlaneMemory | None = None
    time: float = 0.0
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class Line:
    """One event and what followed. `number` counts the lines of the file from 1."""

    number: int
    t: float
    time: float
    event: Event
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class _RawLine:
    t: float
    time: float
    event: dict[str, Any]
    commands: list[dict[str, Any]]


class Journal:
    """One writer. `path` is that of the newest segment, and may exist; `begin` before `append`."""

    def __init__(
        self,
        path: Path,
        wall_clock: Callable[[], float],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        max_segments: int = MAX_SEGMENTS,
    ) -> None:
        """Take the journal. Raises JournalInUse."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._wall_clock = wall_clock
        self._segment_bytes = segment_bytes
        self._max_segments = max_segments
        self._encode = msgspec.json.Encoder().encode
        self._header: Header | None = None
        self._file: BinaryIO | None = None
        self._num_bytes = 0
        self._lock = _lock(path.with_name("journal.lock"))

    def begin(self, header: Header) -> None:
        """Start a segment; what there is becomes an old one. A crash on the way loses neither."""
        self._header = header = replace(header, time=self._wall_clock())
        line = self._encode(header) + b"\n"
        draft = self._path.with_name(f".{self._path.name}.draft")
        if self._file is not None:
            self._file.close()
        self._file = draft.open("wb")
        self._file.write(line)
        self._sync()
        if self._path.exists():
            old = old_segments(self._path.parent)
            number = _number(old[-1]) + 1 if old else 1
            self._path.rename(self._path.with_name(f"journal.{number:06d}.jsonl"))
            for path in old[: max(len(old) + 1 - self._max_segments, 0)]:
                path.unlink()
        draft.rename(self._path)
        self._num_bytes = len(line)

    @property
    def is_full(self) -> bool:
        """Whether it is time for `rotate`."""
        return self._num_bytes >= self._segment_bytes

    def rotate(self, memory: PlaneMemory) -> None:
        """Go on in a new segment, from a core that remembers this."""
        assert self._header is not None
        self.begin(replace(self._header, t=memory.now, memory=memory))

    def append(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """One line, in the hands of the operating system when this returns."""
        assert self._file is not None, "begin comes first"
        line = {
            "t": now,
            "time": self._wall_clock(),
            "event": _tagged(event),
            "commands": [_tagged(command) for command in commands],
        }
        text = self._encode(line) + b"\n"
        self._file.write(text)
        self._num_bytes += len(text)
        if any(isinstance(command, Open) for command in commands):
            self._sync()
        else:
            self._file.flush()

    def close(self) -> None:
        """No more lines; the journal is free."""
        if self._file is not None:
            self._file.close()
        os.close(self._lock)

    def _sync(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fdatasync(self._file.fileno())


def segments(directory: Path) -> list[Path]:
    """All segments of a run's directory, oldest first."""
    newest = directory / "journal.jsonl"
    return [*old_segments(directory), *([newest] if newest.exists() else [])]


def old_segments(directory: Path) -> list[Path]:
    """Those that are not written any more, oldest first."""
    return sorted(path for path in directory.iterdir() if _OLD_SEGMENT.fullmatch(path.name))


def read_segment(path: Path) -> tuple[Header, Iterator[Line]]:
    """Header and lines of a file. Raises OSError, BadLine (the iterator too)."""
    raw = _whole_lines(path)
    first = next(raw, None)
    if first is None:
        raise BadLine(f"{path}:1: no header")
    number, text = first
    try:
        schema = msgspec.json.decode(text, type=dict[str, Any]).get("schema")
        if schema != SCHEMA:
            raise ValueError(f"schema {schema}, expected {SCHEMA}")
        header = msgspec.json.decode(text, type=Header)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadLine(f"{path}:{number}: no header: {error}") from None
    return header, _lines(path, raw)


def _lines(path: Path, raw: Iterator[tuple[int, bytes]]) -> Iterator[Line]:
    decode = msgspec.json.Decoder(_RawLine).decode
    for number, text in raw:
        try:
            line = decode(text)
            event: Event = _untagged(line.event, EVENTS)
            commands = tuple(_untagged(command, COMMANDS) for command in line.commands)
        except (msgspec.MsgspecError, ValueError) as error:
            raise BadLine(f"{path}:{number}: {error}") from None
        yield Line(number, line.t, line.time, event, commands)


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines. One without an end is what a crash has left of it."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.endswith(b"\n"):
                yield number, text


def _kinds(union: Any) -> dict[str, type[Any]]:
    return {kind.__name__: kind for kind in get_args(union)}


EVENTS = _kinds(Event)
COMMANDS = _kinds(Command)


def _tagged(value: Event | Command) -> dict[str, Any]:
    fields = msgspec.to_builtins(value)
    assert isinstance(fields, dict)
    return {"type": type(value).__name__, **fields}


def _untagged(fields: dict[str, Any], kinds: dict[str, type[Any]]) -> Any:
    """Inverse of `_tagged`. Raises ValueError."""
    kind = kinds.get(fields.get("type", ""))
    if kind is None:
        raise ValueError(f"type {fields.get('type')!r}, expected one of {', '.join(kinds)}")
    return msgspec.convert(fields, kind)


def _number(path: Path) -> int:
    found = _OLD_SEGMENT.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _lock(path: Path) -> int:
    """Held until its descriptor is closed, or the process ends in whatever way."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode().strip() or "unknown"
        os.close(fd)
        raise JournalInUse(f"{path.parent} belongs to an orchestrator, pid {owner}") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
