"""What comes back of a journal, whatever its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.drivers.journal import Header, Journal, Line, read_segment, segments
from orchestrator.errors import RunFailed
from orchestrator.plane.commands import Open, Relaunch, Report, Route
from orchestrator.plane.core import PlaneCore
from orchestrator.plane.events import Deadline, Restarted
from orchestrator.plane.state import PlaneMemory, PlaneSettings
from orchestrator.recovery import Past, begin, fold, recover
from tests.helpers.plane_journal import some_run, write_journal
from tests.helpers.plane_world import World
from tests.unit.plane.test_invariants import run_seed

_URLS = ["http://a", "http://b", "http://c"]


def lines_of(world: World) -> list[Line]:
    return [
        Line(number, t, 1000.0 + t, event, tuple(commands))
        for number, (t, event, commands) in enumerate(world.log, 2)
    ]


def durable(memory: PlaneMemory) -> dict[str, Any]:
    """What a restart must bring back."""
    return {
        "policy_version": memory.policy_version,
        "generation": memory.generation.number,
        "last_op_id": memory.last_op_id,
        "groups": [
            (
                g.number, g.state, g.reason, g.detail, g.since, g.life, g.min_life, g.not_before,
                g.evictions, g.num_evictions, g.num_quarantines, g.version,
                [(m.slot, m.url, m.boot_id, m.world_size) for m in g.members],
            )
            for g in memory.groups.values()
        ],
    }  # fmt: skip


def told(lines: Sequence[Line]) -> dict[str, Any]:
    """The same, read off the recorded commands alone."""
    commands = [command for line in lines for command in line.commands]
    states: dict[int, str] = {}
    for command in commands:
        if isinstance(command, Report):
            states[command.group] = command.new
    routes = [command for command in commands if isinstance(command, Route)]
    versions = [entry.version for route in routes for entry in route.entries]
    return {
        "states": states,
        "generation": max((c.generation for c in commands if isinstance(c, Open)), default=0),
        "policy_version": max(versions, default=None),
        "routed": {entry.slot for entry in routes[-1].entries} if routes else set(),
    }


@pytest.mark.parametrize("seed", [3, 11, 19, 27, 42])
def test_any_prefix_gives_back_what_was_known(seed: int) -> None:
    world = run_seed(seed)
    lines = lines_of(world)
    for length in range(1, len(lines), 7):
        prefix = lines[:length]
        past = fold(world.header, prefix)
        recorded = told(prefix)
        assert past.problem == ""
        assert past.memory.policy_version == recorded["policy_version"]
        assert past.memory.generation.number == recorded["generation"]
        groups = past.memory.groups
        assert {n: groups[n].state for n in recorded["states"]} == recorded["states"]
        routed = {m.slot for g in groups.values() if g.is_routed for m in g.members}
        assert routed == recorded["routed"]

        raw = durable(past.memory)
        core = PlaneCore.from_memory(world.settings, past.memory)
        assert durable(core.memory()) == raw
        commands = core.handle(past.t + 1.0, Restarted())
        after = core.memory()
        assert after.generation.number == raw["generation"]
        assert after.policy_version == (raw["policy_version"])
        for was, group in zip(raw["groups"], after.groups.values(), strict=True):
            assert [group.life, group.min_life, group.evictions, group.num_evictions] == [
                was[5], was[6], was[8], was[9]
            ]  # fmt: skip
            assert group.version is None
            if was[1] in ("evicted", "quarantined") and group.state == was[1]:
                assert (group.since, group.not_before) == (was[4], was[7])
        wished = {command.group for command in commands if isinstance(command, Relaunch)}
        assert wished == {
            g.number
            for g in after.groups.values()
            if world.settings.has_launcher and g.life < g.min_life
        }


@pytest.mark.parametrize("length", [0, 1, 40, 400])
def test_a_core_made_of_its_memory_goes_on_alike(length: int) -> None:
    world = some_run()
    core = PlaneCore(world.settings, world.header.urls, world.header.groups, world.header.t)
    core.handle(world.header.t, Deadline())
    for number, (t, event, commands) in enumerate(world.log[1:]):
        if number % 13 == length % 13:
            core = PlaneCore.from_memory(world.settings, core.memory())
        assert core.handle(t, event) == commands


def test_the_memory_has_all_that_the_core_has() -> None:
    """Guards `PlaneMemory` against attributes that somebody adds to the core."""
    core = PlaneCore(PlaneSettings(), ["http://a"], [0], 0.0)
    kept = {field.name for field in dataclasses.fields(PlaneMemory)}
    parts = {*vars(core), *vars(core._fleet), *vars(core._updates)}
    own = {name.removeprefix("_") for name in parts}
    assert own - kept == {"settings", "fleet", "updates", "out", "phase"}  # the update's phase


def test_a_journal_of_several_segments_is_read_at_its_end_only(tmp_path: Path) -> None:
    world = some_run()
    whole = fold(world.header, lines_of(world))
    write_journal(tmp_path / "journal.jsonl", world, segment_bytes=40_000)
    files = segments(tmp_path)
    assert len(files) > 3
    for path in files[:-1]:
        path.write_text("not read\n")
    past = recover(tmp_path, "run")
    assert past is not None
    assert past.memory == whole.memory
    assert past.t == world.log[-1][0]


def test_without_a_journal_or_with_that_of_another_run_it_begins(tmp_path: Path) -> None:
    assert recover(tmp_path / "nowhere", "run") is None
    assert recover(tmp_path, "run") is None
    write_journal(tmp_path / "journal.jsonl", some_run())
    assert recover(tmp_path, "another") is None


def test_the_clock_goes_on_and_never_back() -> None:
    header = Header("run", 0, PlaneSettings(), ("http://a",), (0,), 5.0, time=1000.0)
    past = fold(header, [])
    assert isinstance(past, Past)
    assert [past.now(1000.0), past.now(1030.0), past.now(900.0)] == [5.0, 35.0, 5.0]


def test_what_the_core_does_not_repeat_is_loaded_anew() -> None:
    world = World([0, 0, 1])
    world.serve(3)
    lines = lines_of(world)
    opened = Open(900, 0.0, "", 8, 2, 1.0)
    late = Line(len(lines) + 2, world.now, 2000.0, Deadline(), (opened,))
    past = fold(world.header, [*lines, late])
    assert "is not repeated by this version of Muster" in past.problem
    memory = past.memory
    assert (memory.policy_version, memory.generation.number, memory.last_op_id) == (3, 8, 900)
    assert {group.state for group in memory.groups.values()} == {"candidate"}
    core = PlaneCore.from_memory(world.settings, memory)
    core.handle(world.now, Restarted())
    assert all(group.kept is None for group in core.memory().groups.values())


def start(directory: Path, groups: Sequence[int] = (0, 1, 0), **settings: Any) -> Any:
    journal = Journal(directory / "journal.jsonl", lambda: 50.0)
    try:
        return begin(
            journal,
            directory,
            run_id="run",
            settings=PlaneSettings(**settings),
            urls=_URLS[: len(groups)],
            groups=groups,
            monotonic=lambda: 7.0,
            wall_clock=lambda: 80.0,
        )
    finally:
        journal.close()


def test_a_run_begins_and_goes_on(tmp_path: Path) -> None:
    first = start(tmp_path)
    assert (first.first, first.start, first.offset) == (Deadline(), 0, 0.0)
    second = start(tmp_path)
    assert second.first == Restarted(("http://a", "http://c", "http://b"))
    assert (second.start, second.offset) == (1, 30.0)  # 7 at 50, so 37 at 80
    assert start(tmp_path, has_launcher=True).first == Restarted()
    assert [read_segment(path)[0].start for path in segments(tmp_path)] == [0, 1, 2]


def test_a_journal_that_is_not_repeated_is_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path)
    with (tmp_path / "journal.jsonl").open("a") as file:
        line = '{"type":"Fail","reason":"another Muster"}'
        file.write(f'{{"t":8,"time":51,"event":{{"type":"Deadline"}},"commands":[{line}]}}\n')
    assert start(tmp_path).start == 1
    assert "line 2 is not repeated by this version of Muster: every group is loaded" in caplog.text


def test_other_groups_are_not_this_run(tmp_path: Path) -> None:
    start(tmp_path)
    with pytest.raises(RunFailed, match=r"admin_engine_groups = \[0, 1\], but the journal in .* is "
                       r"of groups \[0, 0, 1\]"):  # fmt: skip
        start(tmp_path, groups=(0, 1))


def test_a_journal_that_cannot_be_read_stops_it(tmp_path: Path) -> None:
    start(tmp_path)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes() + b"x\n")
    with pytest.raises(RunFailed, match=r"journal.jsonl:2: "):
        start(tmp_path)
    assert path.read_bytes().endswith(b"x\n")
