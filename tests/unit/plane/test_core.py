"""The core as a whole: capacity, giving up, deadlines, what the snapshot says."""

from __future__ import annotations

import pytest

from orchestrator.plane.commands import Fail, Open, UpdateEnded
from orchestrator.plane.core import PlaneCore
from orchestrator.plane.events import (
    BroadcastReady,
    Deadline,
    EngineSilent,
    GroupLaunched,
    MembersListed,
)
from orchestrator.plane.state import PlaneSettings
from protocol.ids import Slot
from tests.helpers.plane_world import World

G0E0, G1E0 = Slot(0, 0), Slot(1, 0)


def test_snapshot_of_a_serving_fleet() -> None:
    world = World([0, 0, 1])
    assert not world.core.snapshot().has_capacity
    world.serve(0)
    world.run_for(2.0)
    snapshot = world.core.snapshot()
    assert (snapshot.policy_version, snapshot.generation) == (0, 1)
    assert (snapshot.has_capacity, snapshot.num_admitted) == (True, 2)
    assert (snapshot.update_version, snapshot.update_phase) == (None, None)
    group = snapshot.groups[0]
    assert (group.number, group.state, group.life, group.version) == (0, "admitted", 0, 0)
    assert [(m.engine_id, m.url, m.is_ready, m.weight_version) for m in group.members] == [
        ("g0e0", "http://g0e0.0", True, 0),
        ("g0e1", "http://g0e1.0", True, 0),
    ]
    assert world.core.url_of(G1E0) == "http://g1e0.0"


def test_snapshot_during_an_update() -> None:
    world = World([0])
    world.publish(0)
    world.run(lambda: world.core.snapshot().update_phase == "stage")
    assert world.core.snapshot().update_version == 0


def test_groups_without_an_order_and_one_length() -> None:
    core = PlaneCore(PlaneSettings(), ["c", "a", "b"], [2, 0, 2], now=0.0)
    assert [(g.number, [m.url for m in g.members]) for g in core.snapshot().groups] == [
        (0, ["a"]),
        (2, ["c", "b"]),
    ]
    with pytest.raises(ValueError, match="zip"):
        PlaneCore(PlaneSettings(), ["a"], [0, 0], now=0.0)


def test_a_router_that_is_down_evicts_nobody() -> None:
    world = World([0])
    world.serve(0)
    assert world.feed(MembersListed(None, "connection refused")) == []
    assert world.core.snapshot().router_error == "connection refused"
    assert world.state(0) == "admitted"
    world.feed(MembersListed(("http://g0e0.0",)))
    assert world.core.snapshot().router_error == ""


def test_capacity_is_lost_and_comes_back() -> None:
    world = World([0, 1], min_serving_groups=2, no_capacity_timeout_s=100.0)
    world.serve(0)
    assert world.core.snapshot().has_capacity
    world.mute.add(G0E0)
    world.run(lambda: world.state(0) == "evicted")
    assert not world.core.snapshot().has_capacity
    world.mute.clear()
    world.run(lambda: world.core.snapshot().has_capacity)  # the current version again
    assert world.commands(UpdateEnded)[-1].version == 0
    world.run_for(200.0)
    assert world.failed is None


def test_the_run_fails_once_with_a_table_of_causes() -> None:
    world = World([0, 1], no_capacity_timeout_s=50.0)
    world.serve(0)
    world.mute = {G0E0, G1E0}
    world.run(lambda: world.state(0) == "evicted" and world.state(1) == "evicted")
    lost = world.now
    world.run(lambda: world.failed is not None)
    assert world.now == pytest.approx(lost + 50.0)
    assert world.failed is not None
    first, *rows = world.failed.splitlines()
    assert first == "no capacity: fewer than 1 groups have served for 50 s"
    assert rows == [
        "  g0  evicted for 50 s, life 0, evicted 1 times; last: probe_failed g0e0: "
        "connection refused",
        "  g1  evicted for 50 s, life 0, evicted 1 times; last: probe_failed g1e0: "
        "connection refused",
    ]
    world.run_for(200.0)
    assert len(world.commands(Fail)) == 1


def test_the_start_has_its_own_patience() -> None:
    world = World([0], no_capacity_timeout_s=10.0, startup_timeout_s=300.0)
    world.mute.add(G0E0)
    start = world.now
    world.run(lambda: world.failed is not None)
    assert world.now == pytest.approx(start + 300.0)


def test_a_run_whose_launcher_gave_up_fails_at_once() -> None:
    world = World([0, 1], has_launcher=True)
    world.serve(0)
    world.feed(GroupLaunched(0, 0, "failed", ("http://g0e0.0",), "g0e0 ended with 1"))
    assert not world.failed
    world.feed(GroupLaunched(1, 0, "failed", ("http://g1e0.0",), "g1e0 ended with 1"))
    assert world.failed is not None
    assert world.failed.startswith("no capacity: no group will be started again")
    assert "engine_exited g0e0 ended with 1" in world.failed


def test_a_group_that_was_given_up_and_is_started_again_is_not_hopeless() -> None:
    world = World([0], has_launcher=True)
    world.lives[0] = 1
    world.feed(GroupLaunched(0, 1, "starting", ("http://g0e0.0",), "starting"))
    world.feed(Deadline())
    assert world.failed is None


@pytest.mark.parametrize("startup_wait_s", [5.0, 60.0])
def test_time_alone_is_never_a_busy_loop(startup_wait_s: float) -> None:
    """After `handle(next_deadline, Deadline())` the next one is later, or there is none."""
    core = PlaneCore(
        PlaneSettings(startup_wait_s=startup_wait_s, min_serving_groups=2),
        ["a", "b", "c"],
        [0, 1, 2],
        now=0.0,
    )
    core.handle(0.0, Deadline())
    core.handle(1.0, BroadcastReady(0, "t"))
    core.handle(2.0, EngineSilent(G0E0, 0, "x"))
    now = 2.0
    for _ in range(100):
        deadline = core.next_deadline()
        if deadline is None:
            break
        assert deadline > now
        now = deadline
        core.handle(now, Deadline())
    else:
        raise AssertionError("it never comes to rest")


def test_while_an_update_waits_for_answers_its_deadline_is_the_next() -> None:
    world = World([0], update_timeout_s=80.0, startup_timeout_s=5000.0, stage_timeout_s=70.0)
    world.publish(0)
    world.run(lambda: bool(world.commands(Open)))
    deadline = world.core.next_deadline()
    assert deadline is not None
    assert deadline <= world.now + 80.0


def test_the_same_events_give_the_same_commands() -> None:
    """Nothing depends on anything but what it is told: a journal can be replayed."""
    world = World([0, 0, 1, 1], has_launcher=True, train_s=3.0)
    world.publish(0)
    world.run_for(10.0)
    world.kill(Slot(1, 1))
    world.run_for(30.0)
    again = World([0, 0, 1, 1], has_launcher=True).core
    for now, event, commands in world.log[1:]:
        assert again.handle(now, event) == commands
    assert again.snapshot() == world.core.snapshot()
