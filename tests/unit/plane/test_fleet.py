"""Groups and their states: what is believed, what evicts, the way back."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.plane.commands import Admit, Fence, Probe, Relaunch, Report, Resume, Route
from orchestrator.plane.core import PlaneCore
from orchestrator.plane.events import (
    Deadline,
    EngineAnswered,
    EngineSilent,
    EngineStuck,
    GroupLaunched,
)
from orchestrator.plane.state import PlaneSettings
from protocol.ids import Slot
from tests.helpers.plane_world import World

G0E0, G0E1, G1E0, G1E1 = Slot(0, 0), Slot(0, 1), Slot(1, 0), Slot(1, 1)


def serving(**settings: Any) -> World:
    """Two groups of two that serve v0."""
    world = World([0, 0, 1, 1], **settings)
    world.serve(0)
    world.run_for(2.0)
    return world


def says(world: World, slot: Slot, **changes: Any) -> EngineAnswered:
    """What the engine at `slot` says, with lies."""
    engine = world.engines[slot]
    facts: dict[str, Any] = {
        "asked_at": world.now,
        "boot_id": engine.boot_id,
        "life": engine.life,
        "world_size": engine.world_size,
        "weight_version": engine.version,
        "paused": engine.paused,
    }
    return EngineAnswered(slot=slot, **(facts | changes))


def last_route(world: World) -> list[str]:
    return [entry.slot.engine_id for entry in world.commands(Route)[-1].entries]


def test_starts_by_routing_nobody_and_asking_everybody() -> None:
    core = PlaneCore(PlaneSettings(), ["a", "b", "c"], [0, 1, 0], now=0.0)
    commands = core.handle(0.0, Deadline())
    assert commands[0] == Route((), "start")
    assert commands[1:] == [
        Probe(Slot(0, 0), "a", 0),
        Probe(Slot(0, 1), "c", 0),
        Probe(Slot(1, 0), "b", 0),
    ]


def test_a_candidate_is_a_group_whose_members_all_answer() -> None:
    world = World([0, 0])
    world.feed(says(world, G0E0))
    assert world.state(0) == "starting"
    world.feed(says(world, G0E1))
    assert world.state(0) == "candidate"
    assert last_route(world) == []


def test_silence_evicts_the_whole_group_in_order() -> None:
    world = serving()
    commands = world.feed(EngineSilent(G0E1, 0, "timeout"))
    assert world.state(0) == "evicted"
    assert world.state(1) == "admitted"
    kinds = [type(command) for command in commands]
    assert kinds == [Report, Route, Fence, Fence, Probe, Probe]
    assert last_route(world) == ["g1e0", "g1e1"]
    group = world.group(0)
    assert (group.reason, group.detail, group.version) == ("probe_failed", "g0e1: timeout", None)
    assert not any(member.is_ready for member in group.members)


def test_silence_of_a_group_that_is_out_changes_nothing() -> None:
    world = serving()
    world.feed(EngineSilent(G0E1, 0, "timeout"))
    assert world.feed(EngineSilent(G0E0, 0, "timeout")) == []
    assert world.group(0).num_evictions == 1


@pytest.mark.parametrize("reason", ["core_hung", "engine_stalled"])
def test_stuck_engines_are_evicted(reason: Any) -> None:
    world = serving()
    assert world.feed(EngineStuck(G0E0, "another boot", reason, "x")) == []
    world.feed(EngineStuck(G0E0, world.engines[G0E0].boot_id, reason, "no tokens"))
    assert world.reports(0)[-1] == ("evicted", reason)
    assert world.feed(EngineStuck(G0E0, world.engines[G0E0].boot_id, reason, "again")) == []


def test_a_new_boot_evicts() -> None:
    world = serving()
    world.restart(G0E1)
    world.run(lambda: world.state(0) == "evicted")
    group = world.group(0)
    assert group.reason == "boot_changed"
    assert "g0e1 boot boot-2 is now boot-5" in group.detail


def test_a_new_boot_of_a_candidate_evicts() -> None:
    world = World([0])
    world.run(lambda: world.state(0) == "candidate")
    world.restart(G0E0)
    world.run(lambda: world.state(0) == "evicted")
    world.run(lambda: world.state(0) == "candidate")
    world.serve(0)
    assert world.state(0) == "admitted"


@pytest.mark.parametrize(("version", "text"), [(None, "no version"), (7, "v7")])
def test_another_version_evicts(version: int | None, text: str) -> None:
    world = serving()
    world.engines[G1E0].version = version
    world.run(lambda: world.state(1) == "evicted")
    assert world.group(1).reason == "version_mismatch"
    assert world.group(1).detail == f"g1e0 reports {text}, expected v0"


def test_an_answer_from_before_the_commit_is_not_held_against_the_engine() -> None:
    world = serving()
    old = says(world, G0E0)
    world.serve(1)
    assert world.feed(old) == []
    assert world.state(0) == "admitted"
    world.feed(says(world, G0E0, weight_version=0))
    assert world.reports(0)[-1] == ("evicted", "version_mismatch")


def test_an_answer_from_before_the_eviction_is_not_believed() -> None:
    world = serving(has_launcher=False)
    asked_at = world.now
    world.run_for(0.2)
    world.kill(G1E0)
    world.feed(EngineSilent(G1E0, 0, "timeout"))
    late = says(world, G1E0, asked_at=asked_at)
    world.feed(late)
    world.feed(says(world, G1E1, asked_at=asked_at))
    world.run_for(5.0)
    assert world.state(1) == "evicted", "the dead engine's old answer made it a candidate"


def test_a_pause_outside_an_update_evicts() -> None:
    world = serving()
    world.engines[G1E0].paused = True
    world.run(lambda: world.state(1) == "evicted", 5.0)
    assert (world.group(1).reason, world.group(1).detail) == (
        "engine_stalled",
        "g1e0 is paused outside an update",
    )
    assert last_route(world) == ["g0e0", "g0e1"]


def test_a_pause_that_was_seen_before_the_resume_is_part_of_the_update() -> None:
    world = serving()
    world.feed(says(world, G1E0, asked_at=world.group(1).since - 1.0, paused=True))
    assert world.state(1) == "admitted"


def test_a_pause_during_an_update_is_part_of_it() -> None:
    world = serving()
    world.publish(1)
    world.run(lambda: world.core.snapshot().update_phase == "commit")
    world.feed(says(world, G1E0, paused=True))
    assert world.state(1) == "admitted"


def test_evicted_comes_back_only_through_an_update() -> None:
    world = serving()
    world.mute.add(G0E1)
    world.run(lambda: world.state(0) == "evicted")
    world.mute.clear()
    world.run(lambda: world.state(0) == "candidate")
    world.run_for(60.0)
    assert world.state(0) == "candidate"
    assert last_route(world) == ["g1e0", "g1e1"]
    world.serve(1)
    assert [state for state, _ in world.reports(0)[-3:]] == ["evicted", "candidate", "admitted"]
    assert last_route(world) == ["g0e0", "g0e1", "g1e0", "g1e1"]


def test_back_off_grows_and_is_kept() -> None:
    world = World([0], retry_wait_s=2.0, retry_wait_max_s=5.0, max_evictions=99)
    waits = []
    for _ in range(4):
        world.run(lambda: world.state(0) == "candidate")
        world.feed(EngineSilent(G0E0, 0, "x"))
        evicted = world.now
        world.run(lambda: world.state(0) == "candidate")
        waits.append(round(world.now - evicted, 3))
    assert waits == [2.0, 4.0, 5.0, 5.0]


def test_a_relaunched_group_that_answers_within_its_back_off_waits_for_it_only() -> None:
    world = serving(has_launcher=True, retry_wait_s=6.0, restart_s=0.5)
    world.kill(G0E0)
    world.run(lambda: world.state(0) == "evicted")
    evicted = world.now
    world.run(lambda: world.state(0) == "candidate", limit_s=30.0)
    assert world.now == pytest.approx(evicted + 6.0)


def test_quarantine_after_many_evictions_and_the_way_out() -> None:
    world = World([0, 1], max_evictions=3, quarantine_s=50.0, retry_wait_s=0.1)
    world.serve(0)
    for _ in range(3):
        world.run(lambda: world.state(0) in ("candidate", "admitted"))
        world.feed(EngineSilent(G0E0, 0, "x"))
    assert world.reports(0)[-1] == ("quarantined", "probe_failed")
    start = world.now
    world.run_for(40.0)
    assert world.state(0) == "quarantined"
    world.run(lambda: world.state(0) == "candidate")
    assert world.now == pytest.approx(start + 50.0)
    assert [state for state, _ in world.reports(0)[-2:]] == ["evicted", "candidate"]
    world.serve(1)
    assert world.state(0) == "admitted"


def test_each_quarantine_is_longer() -> None:
    world = World([0], max_evictions=1, quarantine_s=10.0, startup_timeout_s=5000.0)
    stays = []
    for _ in range(5):
        world.run(lambda: world.state(0) == "candidate")
        world.feed(EngineSilent(G0E0, 0, "x"))
        start = world.now
        world.run(lambda: world.state(0) == "candidate")
        stays.append(round(world.now - start))
    assert stays == [10, 20, 40, 80, 80]


def test_evictions_long_ago_do_not_count() -> None:
    world = World([0], max_evictions=2, eviction_window_s=30.0)
    for _ in range(4):
        world.run(lambda: world.state(0) == "candidate")
        world.feed(EngineSilent(G0E0, 0, "x"))
        assert world.state(0) == "evicted"
        world.run_for(31.0)


def test_a_start_that_takes_too_long() -> None:
    world = World([0, 0, 1], startup_timeout_s=20.0)
    world.engines[G0E1].is_alive = False
    world.run(lambda: world.state(0) == "evicted")
    assert world.now == pytest.approx(120.0)
    assert world.group(0).reason == "probe_failed"
    assert world.group(0).detail == "no answer since its start: g0e1"
    assert world.state(1) == "candidate"
    world.engines[G0E1].is_alive = True
    world.run(lambda: world.state(0) == "candidate")


# -- with a launcher


def test_an_eviction_asks_for_a_relaunch_and_believes_only_the_next_life() -> None:
    world = serving(has_launcher=True)
    old = says(world, G0E0)
    commands = world.feed(EngineSilent(G0E0, 0, "timeout"))
    assert Relaunch(0, 0, "probe_failed: g0e0: timeout") in commands
    assert [c.life for c in commands if isinstance(c, Probe)] == [1, 1]
    for slot in (G0E0, G0E1):
        world.feed(says(world, slot, asked_at=world.now + 1))
    assert world.feed(old) == []
    assert not any(member.is_ready for member in world.group(0).members)
    world.run(lambda: world.state(0) == "candidate")
    assert world.group(0).life == 1


def test_exit_of_a_step_evicts_at_once() -> None:
    world = serving(has_launcher=True)
    world.kill(G1E1)
    world.run_for(0.06)
    assert world.reports(1)[-1] == ("evicted", "engine_exited")
    world.run(lambda: world.state(1) == "candidate")
    states = [state for state, _ in world.reports(1)[-3:]]
    assert states == ["evicted", "starting", "candidate"]
    world.serve(1)
    assert world.state(1) == "admitted"
    assert last_route(world) == ["g0e0", "g0e1", "g1e0", "g1e1"]


@pytest.mark.parametrize("state", ["exited", "waiting", "failed", "stopped"])
def test_every_ended_state_evicts_once(state: Any) -> None:
    world = serving(has_launcher=True)
    urls = (world.urls[G0E0], world.urls[G0E1])
    world.feed(GroupLaunched(0, 0, state, urls, "g0e0 ended with 1"))
    assert world.group(0).detail == "g0e0 ended with 1"
    world.feed(GroupLaunched(0, 0, "waiting", urls, "waiting"))
    assert world.group(0).num_evictions == 1


def test_a_starting_group_that_exits_is_evicted() -> None:
    world = World([0], has_launcher=True)
    world.feed(GroupLaunched(0, 0, "exited", (world.urls[G0E0],), "ended with 1"))
    assert world.reports(0) == [("evicted", "engine_exited")]
    assert world.commands(Relaunch) == [Relaunch(0, 0, "engine_exited: ended with 1")]


def test_a_new_life_told_by_the_launcher_first() -> None:
    world = serving(has_launcher=True)
    for slot in (G0E0, G0E1):
        world.urls[slot] += "x"
    urls = (world.urls[G0E0], world.urls[G0E1])
    world.feed(GroupLaunched(0, 1, "starting", urls, "starting"))
    assert [report for report in world.reports(0)[-2:]] == [
        ("evicted", "step_exited"),
        ("starting", "step_exited"),
    ]
    assert [m.url for m in world.group(0).members] == list(urls)
    assert [(c.url, c.life) for c in world.commands(Probe)[-2:]] == [(url, 1) for url in urls]
    assert [member.boot_id for member in world.group(0).members] == ["", ""]


def test_a_new_life_told_by_an_engine_first() -> None:
    world = serving(has_launcher=True)
    world.feed(says(world, G0E0, life=1, boot_id="new"))
    assert world.reports(0)[-1] == ("starting", "step_exited")
    assert [member.is_ready for member in world.group(0).members] == [True, False]
    world.feed(says(world, G0E1))
    assert not world.group(0).members[1].is_ready


def test_an_older_life_is_never_believed_and_cannot_hurt() -> None:
    world = serving(has_launcher=True)
    old = says(world, G0E0)
    world.kill(G0E0)
    world.run(lambda: world.state(0) == "candidate")
    world.serve(1)
    before = world.core.snapshot()
    assert world.feed(old) == []
    assert world.feed(EngineSilent(G0E0, 0, "gone")) == []
    assert world.feed(GroupLaunched(0, 0, "exited", (), "late news")) == []
    assert world.core.snapshot() == before


def test_a_group_that_the_run_does_not_know_is_ignored() -> None:
    world = serving(has_launcher=True)
    assert world.feed(GroupLaunched(9, 0, "running", ("x",), "")) == []


def test_urls_of_another_number_of_members_are_not_taken() -> None:
    world = serving(has_launcher=True)
    assert world.feed(GroupLaunched(0, 0, "running", ("only one",), "")) == []
    assert world.group(0).members[0].url == "http://g0e0.0"


def test_a_life_that_crashes_before_it_is_seen() -> None:
    world = serving(has_launcher=True)
    world.kill(G0E0)
    world.run(lambda: world.state(0) == "evicted")
    urls = tuple(world.urls[slot] for slot in (G0E0, G0E1))
    world.lives[0] = 1
    commands = world.feed(GroupLaunched(0, 1, "exited", urls, "ended with 3"))
    assert [c.new for c in commands if isinstance(c, Report)] == ["starting", "evicted"]
    assert Relaunch(0, 1, "engine_exited: ended with 3") in commands


def test_without_launcher_nobody_is_relaunched() -> None:
    world = serving()
    world.kill(G0E0)
    world.run(lambda: world.state(0) == "evicted")
    assert world.commands(Relaunch) == []
    world.restart(G0E0)
    world.run(lambda: world.state(0) == "candidate")
    world.serve(1)
    assert world.state(0) == "admitted"
    assert {op.slot for op in world.commands(Admit)[-2:]} == {G0E0, G0E1}
    assert {op.slot for op in world.commands(Resume)[-4:]} == set(world.slots)


def test_a_life_that_comes_during_quarantine_must_start_in_time_as_well() -> None:
    world = World(
        [0, 1], has_launcher=True, max_evictions=1, quarantine_s=10.0, startup_timeout_s=30.0
    )
    world.serve(0)
    world.kill(G0E0)
    world.run(lambda: world.state(0) == "quarantined")
    world.run(lambda: world.group(0).life == 1)
    world.engines[G0E0].is_alive = False  # hangs; its step does not end
    world.run(lambda: world.group(0).num_evictions == 2, limit_s=60.0)
    assert world.group(0).reason == "probe_failed"
    world.run(lambda: world.group(0).life == 2)
