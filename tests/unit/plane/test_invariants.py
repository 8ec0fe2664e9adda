"""Random faults over many short runs; the invariants of protocol.md hold after every event.

Safety first: deaths, reboots, hangs, lies, lost answers, slow ops and restarts of the orchestrator
itself while versions grow (I1-I6 are asserted by `plane_checks` after each event). Then liveness:
faults stop, and every group that is healthy is admitted within two updates (I9).
"""

from __future__ import annotations

import random

import pytest

from orchestrator.plane.commands import (
    AbortGeneration,
    Admit,
    Commit,
    Fence,
    Finish,
    Join,
    Op,
    Open,
    Pause,
    ReadVersion,
    Resume,
    Send,
    Stage,
    UpdateEnded,
)
from orchestrator.plane.events import MembersListed
from orchestrator.plane.health import ProbeSettings
from tests.helpers.plane_world import ANY, Outcome, World

_KINDS: tuple[type[Op], ...] = (
    AbortGeneration, Admit, Commit, Fence, Finish, Join, Open, Pause, ReadVersion, Resume, Send,
    Stage,
)  # fmt: skip
_OUTCOMES: tuple[Outcome, ...] = ("fail", "unknown", "lost_reply", "slow")
_FLEETS = ((0,), (0, 1), (0, 0, 1, 1), (0, 1, 1, 2), (0, 0, 0, 1, 2))
_NUM_SEEDS = 200


def _world(chance: random.Random) -> World:
    return World(
        chance.choice(_FLEETS),
        train_s=chance.uniform(0.2, 3.0),
        restart_s=chance.uniform(0.2, 6.0),
        latency=lambda: chance.uniform(0.001, 0.3),
        probe=ProbeSettings(interval_s=1.0, failure_threshold=2, stall_timeout_s=8.0),
        has_launcher=chance.random() < 0.6,
        admin_timeout_s=2.0,
        join_timeout_s=4.0,
        stage_timeout_s=6.0,
        pause_timeout_s=3.0,
        commit_timeout_s=4.0,
        update_timeout_s=chance.choice((20.0, 40.0)),
        max_regroups=chance.choice((0, 1, 3)),
        startup_timeout_s=20.0,
        startup_wait_s=5.0,
        max_evictions=3,
        eviction_window_s=30.0,
        quarantine_s=5.0,
        min_serving_groups=1,
        no_capacity_timeout_s=10_000.0,
        retry_wait_s=0.5,
        retry_wait_max_s=4.0,
    )


def _disturb(world: World, chance: random.Random) -> None:
    """One random trouble."""
    engine = chance.choice(list(world.engines.values()))
    slot = engine.slot
    match chance.randrange(11):
        case 0:
            world.kill(slot)
        case 1:
            if engine.is_alive:
                world.restart(slot)
        case 2:
            if not world.settings.has_launcher:
                world.relaunch(slot.group)
        case 3:
            world.mute.add(slot)
            world.later(chance.uniform(0.5, 6.0), lambda: world.mute.discard(slot))
        case 4:
            engine.version = chance.choice((None, 0, 99))
        case 5:
            engine.core_age_s = chance.choice((0.0, 100.0))
            engine.running = 1
        case 6:
            world.trainer.boot += "'"
            world.trainer.generation = 0
        case 7:
            world.feed(MembersListed(chance.choice((None, ()))))
        case 8:
            world.restart_orchestrator(chance.choice((0.0, 0.5, 5.0, 30.0)))
        case 9:
            world.dies_when = lambda: True
        case _:
            where = chance.choice((ANY, None, slot))
            world.fault(
                chance.choice(_KINDS),
                chance.choice(_OUTCOMES),
                slot=where,
                after=chance.randrange(3),
                times=chance.randrange(1, 4),
                delay_s=chance.uniform(0.0, 5.0),
            )


def _heal(world: World) -> None:
    """All processes run, answer, and do what they are told; nobody lies any more."""
    world.clear_faults()
    world.dies_when = None
    world.mute.clear()
    for engine in world.engines.values():
        engine.core_age_s, engine.running = 0.0, 0
        if not engine.is_alive and not world.settings.has_launcher:
            world.restart(engine.slot)
    if world.trainer.published is not None:
        world.publish(world.trainer.published)  # a new trainer says what it has


def _num_finished(world: World) -> int:
    return sum(update.outcome == "finished" for update in world.commands(UpdateEnded))


def _all_in_service(world: World) -> bool:
    return all(group.state in ("candidate", "admitted") for group in world.core.snapshot().groups)


def run_seed(seed: int) -> World:
    """One run; the seed is all that it depends on."""
    chance = random.Random(seed)
    world = _world(chance)
    world.later(chance.uniform(0.0, 3.0), lambda: world.publish(0))
    for _ in range(chance.randrange(1, 9)):
        world.run_for(chance.expovariate(1 / 3.0))
        _disturb(world, chance)
    world.run_for(chance.uniform(0.0, 10.0))
    _heal(world)
    world.run_for(15.0)  # what was spoilt before is told by now
    world.run(lambda: _all_in_service(world), limit_s=200.0)
    before = _num_finished(world)
    world.run(lambda: _num_finished(world) >= before + 2, limit_s=200.0)
    for group in world.core.snapshot().groups:
        assert group.state == "admitted", f"I9: g{group.number}\n{world.history(60)}"
    for engine in world.engines.values():
        assert engine.is_open
        assert not engine.paused or world.core.snapshot().update_phase is not None
    return world


@pytest.mark.parametrize("block", range(10))
def test_random_faults(block: int) -> None:
    size = _NUM_SEEDS // 10
    for seed in range(block * size, (block + 1) * size):
        try:
            run_seed(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None


def test_the_runs_meet_what_they_are_meant_to_meet() -> None:
    """Guards the test itself: evictions, regroups and failed updates all happen."""
    worlds = [run_seed(seed) for seed in range(40)]
    updates = [update for world in worlds for update in world.commands(UpdateEnded)]
    assert any(update.outcome == "failed" for update in updates)
    assert any(update.num_regroups for update in updates)
    reasons = {reason for world in worlds for g in world.lives for _, reason in world.reports(g)}
    assert reasons >= {"engine_exited", "probe_failed", "boot_changed", "op_failed", "op_unknown"}
