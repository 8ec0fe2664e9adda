"""The journal: one line an event, readable by anybody, there before anything is done."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.drivers.journal import Journal
from orchestrator.plane import commands as command_types
from orchestrator.plane import events as event_types
from orchestrator.plane.commands import Command
from orchestrator.plane.events import Event
from protocol.ids import Slot
from tests.helpers.plane_world import World

_KINDS: dict[str, Any] = {**vars(event_types), **vars(command_types)}


def _restored(tagged: dict[str, Any]) -> Any:
    kind = _KINDS[tagged.pop("type")]
    return msgspec.convert(tagged, kind)


def test_a_run_can_be_read_back(tmp_path: Path) -> None:
    world = World([0, 0, 1], has_launcher=True, train_s=1.0)
    world.publish(0)
    world.run_for(5.0)
    world.kill(Slot(1, 0))
    world.run_for(20.0)
    path = tmp_path / "deep" / "journal.jsonl"
    journal = Journal(path, wall_clock=lambda: 1234.5)
    for now, event, commands in world.log:
        journal.append(now, event, commands)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(world.log)
    for line, (now, event, commands) in zip(lines, world.log, strict=True):
        assert (line["t"], line["time"]) == (round(now, 6), 1234.5)
        restored: tuple[Event, list[Command]] = (
            _restored(line["event"]),
            [_restored(command) for command in line["commands"]],
        )
        assert restored == (event, commands)
    journal.close()


def test_every_kind_has_a_name_of_its_own() -> None:
    kinds = [kind for kind in _KINDS.values() if dataclasses.is_dataclass(kind)]
    names = {kind.__name__ for kind in kinds if isinstance(kind, type)}
    assert {"EngineAnswered", "OpUnknown", "Commit", "Route", "Fail"} <= names


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for _ in range(2):
        journal = Journal(path, wall_clock=lambda: 0.0)
        journal.append(1.0, event_types.Deadline(), [])
        journal.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"t": 1.0, "time": 0.0, "event": {"type": "Deadline"}, "commands": []}
    ] * 2
