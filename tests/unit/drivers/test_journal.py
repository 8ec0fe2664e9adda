"""The journal: one line an event, readable by anybody, there before anything is done."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.drivers import journal as journal_module
from orchestrator.drivers.journal import (
    COMMANDS,
    EVENTS,
    BadLine,
    Header,
    Journal,
    JournalInUse,
    Line,
    read_segment,
    segments,
)
from orchestrator.plane.commands import Open, Pause
from orchestrator.plane.events import Deadline
from protocol.ids import Slot
from tests.helpers.plane_world import World

_LINE = b'{"t":1.5,"time":2.5,"event":{"type":"Deadline"},"commands":[]}\n'


def world_with_a_past() -> World:
    """An eviction, a relaunch and a few updates."""
    world = World([0, 0, 1], has_launcher=True, train_s=1.0)
    world.publish(0)
    world.run_for(5.0)
    world.kill(Slot(1, 0))
    world.run_for(20.0)
    return world


def opened(path: Path, world: World | None = None, **limits: int) -> Journal:
    journal = Journal(path, wall_clock=lambda: 1234.5, **limits)
    journal.begin((world or World([0])).header)
    return journal


def lines_of(path: Path) -> list[Line]:
    return list(read_segment(path)[1])


def test_a_run_can_be_read_back(tmp_path: Path) -> None:
    world = world_with_a_past()
    path = tmp_path / "deep" / "journal.jsonl"
    journal = opened(path, world)
    for now, event, commands in world.log:
        journal.append(now, event, commands)
    header, lines = read_segment(path)
    assert header == dataclasses.replace(world.header, time=1234.5)
    assert [(line.t, line.event, list(line.commands)) for line in lines] == world.log
    assert [json.loads(line)["time"] for line in path.read_text().splitlines()[1:]] == [
        1234.5
    ] * len(world.log)
    journal.close()


def test_every_kind_can_be_read() -> None:
    assert {"EngineAnswered", "OpUnknown", "Restarted"} <= set(EVENTS)
    assert {"Commit", "Route", "Fail"} <= set(COMMANDS)
    assert not set(EVENTS) & set(COMMANDS)


def test_a_start_keeps_what_there_was(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for t in (1.0, 2.0, 3.0):
        journal = opened(path)
        journal.append(t, Deadline(), [])
        journal.close()
    assert [p.name for p in segments(tmp_path)] == [
        "journal.000001.jsonl", "journal.000002.jsonl", "journal.jsonl",
    ]  # fmt: skip
    assert [lines_of(p)[0].t for p in segments(tmp_path)] == [1.0, 2.0, 3.0]


def test_segments_are_bounded_in_size_and_number(tmp_path: Path) -> None:
    world = world_with_a_past()
    memory = world.core.memory()
    journal = opened(tmp_path / "journal.jsonl", segment_bytes=10_000, max_segments=3)
    for number in range(1000):
        journal.append(float(number), Deadline(), [])
        if journal.is_full:
            journal.rotate(memory)
    journal.close()
    files = segments(tmp_path)
    assert [path.name for path in files] == [
        *(f"journal.{number:06d}.jsonl" for number in (6, 7, 8)), "journal.jsonl",
    ]  # fmt: skip
    assert all(path.stat().st_size <= 10_100 for path in files)
    header, lines = read_segment(files[-1])
    assert header.memory == memory
    assert header.t == memory.now
    assert [line.t for path in files[:-1] for line in lines_of(path)][-1] + 1 == next(lines).t


@pytest.mark.parametrize("end", [b"", b"{", _LINE[:-1], _LINE[:20], b"\0\0\0\0"])
def test_a_line_without_its_end_is_ignored(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    journal = opened(path)
    journal.append(1.0, Deadline(), [])
    journal.close()
    path.write_bytes(path.read_bytes() + end)
    assert [line.t for line in lines_of(path)] == [1.0]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"{\n", r"journal.jsonl:3: .*truncated"),
        (b'{"t":1,"time":2,"event":{"type":"Deadlin"},"commands":[]}\n', ":3: type 'Deadlin'"),
        (b'{"t":1,"time":2,"event":{"type":"Restarted","urls":1},"commands":[]}\n', ":3: Expected"),
        (b'{"t":1,"time":2,"event":{"type":"Deadline"}}\n', ":3: .*missing required .*commands"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, text: str) -> None:
    path = tmp_path / "journal.jsonl"
    opened(path).close()
    path.write_bytes(path.read_bytes() + _LINE + line)
    with pytest.raises(BadLine, match=text):
        lines_of(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", ":1: no header"),
        (b'{"schema":', ":1: no header"),
        (_LINE, ":1: no header: schema None, expected 1"),
        (b'{"schema":2}\n', ":1: no header: schema 2, expected 1"),
        (b'{"schema":1}\n', ":1: no header: .*missing required"),
        (b"[]\n", ":1: no header: Expected"),
    ],
)
def test_a_bad_header_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadLine, match=text):
        read_segment(path)


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = opened(path)
    with pytest.raises(JournalInUse, match="belongs to an orchestrator, pid"):
        Journal(path, lambda: 0.0)
    first.close()
    opened(path).close()


@pytest.mark.parametrize("step", ["open", "fsync", "rename old", "rename new"])
def test_a_crash_while_a_segment_begins_loses_nothing(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    journal = opened(path)
    journal.append(7.0, Deadline(), [])

    class Crash(Exception):
        pass

    def crash_after(num: int, call: Callable[..., object]) -> Callable[..., object]:
        left = [num]

        def wrapped(*args: object, **kwargs: object) -> object:
            if not left[0]:
                raise Crash
            left[0] -= 1
            return call(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        if step == "open":
            patch.setattr(Path, "open", crash_after(0, Path.open))
        elif step == "fsync":
            patch.setattr(journal_module.os, "fdatasync", crash_after(0, print))
        else:
            patch.setattr(Path, "rename", crash_after(int(step == "rename new"), Path.rename))
        with pytest.raises(Crash):
            journal.rotate(world_with_a_past().core.memory())
    journal.close()
    assert [line.t for line in lines_of(segments(tmp_path)[-1])] == [7.0]
    opened(path).close()
    assert [line.t for line in lines_of(segments(tmp_path)[-2])] == [7.0]


def test_a_generation_is_on_the_disk_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path / "journal.jsonl")
    synced: list[int] = []
    monkeypatch.setattr(journal_module.os, "fdatasync", synced.append)
    journal.append(1.0, Deadline(), [Pause(1, 2.0, "r", Slot(0, 0))])
    assert synced == []
    journal.append(1.0, Deadline(), [Open(2, 2.0, "r", 1, 2, 3.0)])
    assert len(synced) == 1
    journal.close()


def test_times_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = opened(path)
    times = [0.1 + 0.2, 1e9 / 3, 12345.678901234567]
    for t in times:
        journal.append(t, Deadline(), [])
    journal.close()
    assert [line.t for line in lines_of(path)] == times


def test_the_header_says_of_what_run_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    opened(path).close()
    header, _ = read_segment(path)
    assert isinstance(header, Header)
    assert (header.run_id, header.start, header.groups) == ("run", 0, (0,))
