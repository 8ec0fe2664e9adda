"""One update: its phases, every failure in every phase, for engines and the trainer."""

from __future__ import annotations

import itertools
from typing import Any

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
    Report,
    Resume,
    Send,
    Stage,
    UpdateEnded,
)
from orchestrator.plane.events import BroadcastReady, EngineSilent, OpFailed, OpResult, OpSucceeded
from orchestrator.plane.state import PlaneSettings
from protocol.ids import Slot
from tests.helpers.plane_world import TRAINER, Outcome, World

G0E0, G0E1, G1E0, G1E1 = Slot(0, 0), Slot(0, 1), Slot(1, 0), Slot(1, 1)
ALL = ("g0e0", "g0e1", "g1e0", "g1e1")
SWAP = [Pause, Commit, ReadVersion, Resume]


def serving(groups: tuple[int, ...] = (0, 0, 1, 1), **settings: Any) -> World:
    """A fleet that serves v0."""
    world = World(groups, **settings)
    world.serve(0)
    return world


def since(world: World, mark: int, *kinds: type[Any]) -> list[Any]:
    """Commands of these kinds after the first `mark` of them."""
    return world.commands(*kinds)[mark:]


def kinds(world: World) -> list[str]:
    """Names of all ops so far, repeats in a row once."""
    names = [type(op).__name__ for op in world.commands(Op)]
    return [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]


def finished(world: World, version: int) -> UpdateEnded:
    """The update that put `version` in service."""
    world.run(lambda: world.ended("finished", version) is not None)
    update = world.ended("finished", version)
    assert update is not None
    return update


# -- without faults


def test_first_update() -> None:
    world = serving()
    assert kinds(world) == [
        "Open", "Join", "Send", "Stage", "Pause", "Commit", "ReadVersion", "Admit", "Resume",
        "Finish",
    ]  # fmt: skip
    update = finished(world, 0)
    assert (update.members, update.generation, update.num_regroups) == (ALL, 1, 0)
    assert update.num_bytes == 64
    assert [name for name, _ in update.phase_s] == [
        "open", "join", "stage", "pause", "commit", "verify", "admit", "resume", "finish",
    ]  # fmt: skip
    assert world.trainer.finished == [(0, ALL)]
    assert all(engine.is_open and not engine.paused for engine in world.engines.values())
    assert world.core.snapshot().policy_version == 0


def test_ranks_are_laid_out_by_slot_and_width() -> None:
    world = World((0, 0, 1), world_sizes={G0E1: 4, G1E0: 2})
    world.serve(0)
    opened = world.commands(Open)[0]
    assert opened.world_size == 8
    joins = {op.slot: op for op in world.commands(Join)}
    assert {slot: op.rank_offset for slot, op in joins.items()} == {
        TRAINER: 0, G0E0: 1, G0E1: 2, G1E0: 6,
    }  # fmt: skip
    assert {(op.host, op.port, op.world_size) for op in joins.values()} == {("trainer", 1001, 8)}


def test_rank_0_waits_as_long_as_the_engines_may_need_to_join() -> None:
    world = World((0,), admin_timeout_s=7.0, join_timeout_s=40.0)
    world.serve(0)
    assert world.commands(Open)[0].join_timeout_s == 47.0


def test_a_stable_fleet_does_not_join_again_nor_admit_again() -> None:
    world = serving()
    num_joins, num_admits = len(world.commands(Open, Join)), len(world.commands(Admit))
    for version in (1, 2, 3):
        world.serve(version)
    assert len(world.commands(Open, Join)) == num_joins
    assert len(world.commands(Admit)) == num_admits
    assert world.core.snapshot().generation == 1
    assert [version for version, _ in world.trainer.finished] == [0, 1, 2, 3]


def test_versions_are_told_once_and_old_ones_never_go_out() -> None:
    world = serving()
    num_sends = len(world.commands(Send))
    world.feed(BroadcastReady(0, world.trainer.boot))
    world.run_for(30.0)
    assert len(world.commands(Send)) == num_sends


def test_nothing_happens_without_groups() -> None:
    world = World((0,))
    world.mute.add(G0E0)
    world.publish(0)
    world.run_for(100.0)
    assert world.commands(Op) == []
    world.mute.clear()
    world.run(lambda: world.core.snapshot().policy_version == 0)


def test_the_first_update_waits_a_while_for_groups_that_start() -> None:
    world = World((0, 1), startup_wait_s=30.0)
    world.mute.add(G1E0)
    world.publish(0)
    world.run(lambda: bool(world.commands(Open)))
    assert world.now == pytest.approx(130.01)
    assert finished(world, 0).members == ("g0e0",)


def test_the_first_update_needs_enough_groups() -> None:
    world = World((0, 1, 2), startup_wait_s=5.0, min_serving_groups=2)
    world.mute = {G1E0, Slot(2, 0)}
    world.publish(0)
    world.run_for(100.0)
    assert not world.commands(Open)
    world.mute = {Slot(2, 0)}
    assert finished(world, 0).members == ("g0e0", "g1e0")


def test_later_updates_wait_for_nobody() -> None:
    world = serving()
    world.kill(G1E0)
    world.run(lambda: world.state(1) == "evicted")
    world.serve(1)
    assert finished(world, 1).members == ("g0e0", "g0e1")


def test_a_candidate_of_the_middle_of_an_update_takes_part_in_the_next() -> None:
    world = serving()
    world.mute.add(G1E0)
    world.run(lambda: world.state(1) == "evicted")
    world.fault(Send, "slow", delay_s=20.0)
    world.publish(1)
    world.mute.clear()
    world.run(lambda: world.state(1) == "candidate")
    assert finished(world, 1).members == ("g0e0", "g0e1")
    assert world.state(1) == "candidate"
    world.serve(2)
    update = finished(world, 2)
    assert (update.members, update.generation) == (ALL, 3)


# -- engines that fail


@pytest.mark.parametrize("kind", [Join, Stage])
def test_a_transfer_that_fails_once_evicts_nobody(kind: type[Op]) -> None:
    """Whose fault it was is not known: all go on, with the next generation."""
    world = serving()
    world.kill(G1E1)
    world.run(lambda: world.state(1) == "evicted")
    world.restart(G1E1)
    world.run(lambda: world.state(1) == "candidate")
    fault = world.fault(kind, "fail", slot=G1E0)
    world.serve(1)
    update = finished(world, 1)
    assert (fault.fired, update.num_regroups, update.members) == (1, 1, ALL)
    aborts = world.commands(AbortGeneration)
    assert {op.slot for op in aborts} == {TRAINER, *world.slots}
    assert {op.generation for op in aborts} == {2}
    assert update.generation == 3
    assert "abort" in dict(update.phase_s)


@pytest.mark.parametrize("kind", [Join, Stage])
@pytest.mark.parametrize("outcome", ["unknown", "lost_reply"])
def test_a_transfer_without_an_answer_evicts_its_group(kind: type[Op], outcome: Outcome) -> None:
    world = World()
    world.fault(kind, outcome, slot=G1E0)
    world.serve(0)
    assert world.reports(1)[1] == ("evicted", "op_unknown")
    update = finished(world, 0)
    assert (update.members, update.num_regroups, update.generation) == (ALL[:2], 1, 2)
    assert {op.slot for op in world.commands(AbortGeneration)} == {TRAINER, G0E0, G0E1}


def test_who_fails_again_while_others_do_not_is_evicted() -> None:
    world = serving()
    world.fault(Stage, "fail", slot=G1E0, times=2)
    world.serve(1)
    assert world.reports(1)[-1][0] in ("evicted", "candidate")
    update = finished(world, 1)
    assert (update.members, update.num_regroups) == (ALL[:2], 2)
    assert ("evicted", "op_failed") in world.reports(1)


@pytest.mark.parametrize("silent", [G0E0, TRAINER])
def test_who_reports_a_failure_is_not_accused_when_another_is_silent(silent: Slot | None) -> None:
    world = serving((0, 0, 1, 1, 2, 2), max_regroups=9)
    world.fault(Stage, "fail", slot=G1E0, times=2)
    world.fault(AbortGeneration, "unknown", slot=silent, times=2)
    world.serve(1)
    assert world.group(1).num_evictions == 0
    assert world.group(0).num_evictions == (0 if silent is TRAINER else 1)


def test_who_reports_a_failure_is_not_accused_when_the_trainer_never_said_it_sent() -> None:
    world = serving((0, 0, 1, 1, 2, 2), max_regroups=9, update_timeout_s=3000.0)
    almost = PlaneSettings().stage_timeout_s - 1.0
    world.fault(Stage, "fail", slot=G1E0, times=2, delay_s=almost)
    world.fault(Send, "unknown", times=2)
    world.serve(1)
    assert [world.group(number).num_evictions for number in (0, 1, 2)] == [0, 0, 0]


@pytest.mark.parametrize("kind", [Join, Stage])
def test_an_engine_that_refuses_the_abort_is_not_evicted(kind: type[Op]) -> None:
    world = serving()
    world.restart(G1E0)  # so that a join is needed
    world.run(lambda: world.state(1) == "candidate")
    evictions = world.group(1).num_evictions
    world.fault(kind, "fail", slot=G0E0)
    world.fault(AbortGeneration, "fail", slot=G1E0)
    world.serve(1)
    assert finished(world, 1).members == ALL
    assert (world.group(0).num_evictions, world.group(1).num_evictions) == (0, evictions)


def test_a_group_that_was_out_is_fenced_again_before_its_weights_change() -> None:
    world = serving()
    world.fault(Fence, "unknown", slot=G1E0)
    world.fault(Pause, "fail", slot=G1E1)
    world.serve(1)
    world.run(lambda: world.state(1) == "candidate")
    assert world.engines[G1E0].is_open, "its fence was lost"
    world.publish(2)
    world.run(lambda: world.core.snapshot().update_phase == "commit")
    assert [engine.is_open for engine in world.of(0)] == [True, True]
    assert [engine.is_open for engine in world.of(1)] == [False, False]
    assert finished(world, 2).members == ALL
    assert all(engine.is_open for engine in world.engines.values())


def test_when_all_fail_nobody_is_accused_and_the_update_ends() -> None:
    world = serving(max_regroups=2)
    world.fault(Stage, "fail", slot=G0E0, times=99)
    world.fault(Stage, "fail", slot=G1E0, times=99)
    world.fault(Send, "fail", times=99)
    world.publish(1)
    world.run(lambda: world.ended("failed") is not None)
    update = world.ended("failed")
    assert update is not None
    assert update.reason.startswith("2 regroups; last: stage on ")
    assert update.num_regroups == 3
    assert [world.state(group) for group in (0, 1)] == ["admitted", "admitted"]
    assert world.core.snapshot().policy_version == 0


def test_a_single_group_is_never_accused() -> None:
    world = serving((0, 0))
    world.fault(Stage, "fail", slot=G0E0, times=6)
    world.publish(1)
    assert finished(world, 1).members == ALL[:2]
    assert world.state(0) == "admitted"
    assert world.group(0).num_evictions == 0


@pytest.mark.parametrize("kind", SWAP)
@pytest.mark.parametrize(
    ("outcome", "reason"),
    [("fail", "op_failed"), ("unknown", "op_unknown"), ("lost_reply", "op_unknown")],
)
def test_a_failure_from_the_pause_on_costs_its_group(
    kind: type[Op], outcome: Outcome, reason: str
) -> None:
    world = serving()
    world.fault(kind, outcome, slot=G1E0)
    mark = len(world.commands(Resume))
    world.serve(1)
    assert world.reports(1)[2:4][0] == ("evicted", reason)
    assert finished(world, 1).members == ALL[:2]
    assert finished(world, 1).num_regroups == 0
    assert world.trainer.finished[-1] == (1, ALL[:2])
    resumed = {op.slot for op in since(world, mark, Resume)}
    assert resumed == (set(world.slots) if kind is Resume else {G0E0, G0E1})
    fenced = {op.slot for op in world.commands(Fence)}
    assert fenced == {G1E0, G1E1}
    world.run(lambda: world.state(1) == "candidate")
    world.serve(2)
    assert (finished(world, 2).members, finished(world, 2).generation) == (ALL, 2)
    assert not any(engine.paused for engine in world.engines.values())


def test_siblings_of_the_lost_take_no_part_in_later_phases() -> None:
    world = serving()
    world.fault(Pause, "fail", slot=G1E0)
    mark = len(world.commands(Commit, ReadVersion))
    world.serve(1)
    assert {op.slot for op in since(world, mark, Commit, ReadVersion)} == {G0E0, G0E1}


@pytest.mark.parametrize("outcome", ["fail", "unknown"])
def test_an_admission_that_fails_costs_its_group(outcome: Outcome) -> None:
    world = World()
    world.fault(Admit, outcome, slot=G1E1)
    world.serve(0)
    assert finished(world, 0).members == ALL[:2]
    assert world.state(1) != "admitted"
    assert {op.slot for op in world.commands(Resume)} == {G0E0, G0E1}


def test_a_false_version_after_the_commit() -> None:
    world = serving()
    world.publish(1)
    world.run(lambda: world.core.snapshot().update_phase == "verify")
    world.engines[G1E0].version = 7
    finished(world, 1)
    assert ("evicted", "version_mismatch") in world.reports(1)
    details = [report.detail for report in world.commands(Report)]
    assert "g1e0 reports v7 after the commit of v1" in details


def test_no_version_after_the_commit() -> None:
    world = serving()
    world.publish(1)
    world.run(lambda: world.core.snapshot().update_phase == "verify")
    world.engines[G1E0].version = None
    finished(world, 1)
    assert ("evicted", "version_mismatch") in world.reports(1)


def test_another_boot_in_the_answer_to_the_read_back() -> None:
    world = serving()
    world.publish(1)
    world.run(lambda: world.core.snapshot().update_phase == "verify")
    world.engines[G1E0].boot_id = "another"
    finished(world, 1)
    assert ("evicted", "boot_changed") in world.reports(1)


@pytest.mark.parametrize(
    ("phase", "num_regroups"),
    [("open", 1), ("join", 1), ("stage", 1), ("pause", 0), ("commit", 0), ("verify", 0),
     ("resume", 0), ("finish", 0)],
)  # fmt: skip
def test_an_engine_dies_in_any_phase(phase: str, num_regroups: int) -> None:
    """Seen by its probes while the ops are slow; the version goes on without it."""
    world = World()
    for kind in (Open, Join, Send, Pause, Commit, ReadVersion, Resume, Finish):
        world.fault(kind, "slow", delay_s=5.0, times=99)
    world.publish(0)
    world.run(lambda: world.core.snapshot().update_phase == phase)
    world.kill(G1E0)
    update = finished(world, 0)
    assert update.members == ALL[:2]
    assert update.num_regroups == num_regroups
    assert world.state(1) == "evicted"
    assert world.core.snapshot().generation == 1 + num_regroups
    for engine in world.of(0):
        assert (engine.version, engine.paused) == (0, False)


def test_a_member_that_dies_during_the_abort() -> None:
    world = World()
    world.fault(Stage, "fail", slot=G0E0)
    world.fault(AbortGeneration, "slow", delay_s=5.0, slot=G0E0)
    world.publish(0)
    world.run(lambda: world.core.snapshot().update_phase == "abort")
    world.feed(EngineSilent(G1E0, 0, "gone"))
    update = finished(world, 0)
    assert (update.members, update.num_regroups) == (ALL[:2], 1)


def test_who_does_not_answer_the_abort_is_evicted() -> None:
    world = World()
    world.fault(Stage, "fail", slot=G0E0)
    world.fault(AbortGeneration, "unknown", slot=G1E1)
    world.serve(0)
    assert ("evicted", "op_unknown") in world.reports(1)
    assert finished(world, 0).members == ALL[:2]


@pytest.mark.parametrize("kind", [Join, Stage, Pause, Commit, ReadVersion, Admit, Resume])
def test_no_group_is_left(kind: type[Op]) -> None:
    world = World((0, 0))
    world.fault(kind, "unknown", slot=G0E0)
    world.publish(0)
    world.run(lambda: world.ended("failed") is not None or world.ended("finished") is not None)
    if kind is Resume:  # v0 was in service already, on nobody now
        assert world.commands(UpdateEnded)[0].outcome == "failed"
    update = world.commands(UpdateEnded)[0]
    assert update.outcome == "failed"
    assert "no group is left" in update.reason
    assert finished(world, 0).members == ALL[:2]
    assert world.state(0) == "admitted"


# -- the trainer fails


@pytest.mark.parametrize("kind", [Open, Join, Send])
@pytest.mark.parametrize("outcome", ["fail", "unknown", "lost_reply"])
def test_a_trainer_that_fails_once_costs_a_generation(kind: type[Op], outcome: Outcome) -> None:
    world = World()
    world.fault(kind, outcome, slot=TRAINER)
    world.serve(0)
    update = finished(world, 0)
    assert (update.members, update.num_regroups, update.generation) == (ALL, 1, 2)
    assert [world.group(n).num_evictions for n in (0, 1)] == [0, 0]


@pytest.mark.parametrize("outcome", ["fail", "unknown"])
def test_an_abort_that_the_trainer_does_not_take_is_no_reason_to_wait(outcome: Outcome) -> None:
    world = World()
    world.fault(Send, "fail")
    world.fault(AbortGeneration, outcome, slot=TRAINER)
    world.serve(0)
    assert finished(world, 0).num_regroups == 1


def test_a_confirmation_is_repeated() -> None:
    world = World(retry_wait_s=2.0)
    fault = world.fault(Finish, "fail", times=3)
    world.serve(0)
    assert fault.fired == 3
    assert world.trainer.finished == [(0, ALL)]
    assert dict(finished(world, 0).phase_s)["finish"] == pytest.approx(6.04)


def test_a_confirmation_that_is_never_taken_ends_with_the_update() -> None:
    world = World(update_timeout_s=30.0, join_timeout_s=9.0)
    world.fault(Finish, "fail", times=99)
    world.serve(0)
    assert world.now <= 131.0
    assert finished(world, 0).reason == "the trainer did not take the confirmation"
    assert world.core.snapshot().policy_version == 0


def test_a_broken_trainer_ends_the_update_after_its_regroups() -> None:
    world = serving(max_regroups=1, retry_wait_s=1.0, retry_wait_max_s=8.0)
    world.kill(G1E0)
    world.run(lambda: world.state(1) == "evicted")
    fault = world.fault(Open, "fail", times=99)
    world.publish(1)
    world.run_for(60.0)
    failures = [(t, c) for t, _, cs in world.log for c in cs if isinstance(c, UpdateEnded)][1:]
    waits = [round(b[0] - a[0]) for a, b in itertools.pairwise(failures)]
    assert waits[:4] == [2, 4, 8, 8]
    assert fault.fired == 2 * len(failures)
    assert failures[0][1].members == ("g0e0", "g0e1")
    world.clear_faults()
    finished(world, 1)
    assert world.group(0).num_evictions == 0


def test_generations_grow_over_failed_updates() -> None:
    world = serving(max_regroups=0)
    world.fault(Send, "fail", times=3)
    world.publish(1)
    assert finished(world, 1).generation == 4
    assert [op.generation for op in world.commands(Open)] == [1, 2, 3, 4]


def test_a_new_trainer_before_the_commit() -> None:
    world = serving()
    world.fault(Send, "slow", delay_s=20.0)
    world.publish(1)
    world.run(lambda: world.core.snapshot().update_phase == "stage")
    world.trainer.boot, world.trainer.generation = "trainer-2", 0
    world.publish(1)
    failed = world.ended("failed", 1)
    assert failed is not None
    assert failed.reason == "the trainer restarted"
    assert {op.slot for op in world.commands(AbortGeneration)} == {TRAINER, *world.slots}
    assert finished(world, 1).generation == 2


def test_a_new_trainer_after_the_commit() -> None:
    world = serving()
    world.publish(1)
    world.run(lambda: world.core.snapshot().update_phase == "commit")
    world.trainer.boot, world.trainer.generation = "trainer-2", 0
    world.feed(BroadcastReady(1, "trainer-2"))
    assert finished(world, 1).members == ALL
    world.serve(2)
    assert finished(world, 2).generation == 2


def test_a_new_trainer_at_the_version_in_service_is_confirmed_again() -> None:
    world = serving()
    world.trainer.boot = "trainer-2"
    mark = len(world.commands(UpdateEnded))
    world.publish(0)
    world.run(lambda: len(world.commands(UpdateEnded)) > mark)
    update = world.commands(UpdateEnded)[-1]
    assert (update.version, update.outcome, update.generation) == (0, "finished", 2)
    assert world.trainer.finished == [(0, ALL), (0, ALL)]
    world.run_for(5.0)
    assert len(world.commands(UpdateEnded)) == mark + 1


def test_what_a_former_trainer_had_ready_is_not_asked_of_the_next() -> None:
    world = serving()
    world.fault(Open, "unknown", times=1)
    world.publish(1)
    world.trainer.boot = "trainer-2"
    world.publish(0)
    world.run_for(60.0)
    assert world.core.snapshot().policy_version == 0
    assert [update.version for update in world.commands(UpdateEnded)] == [0, 1, 0]
    world.serve(1)


def test_a_new_trainer_between_updates() -> None:
    world = serving()
    world.trainer.boot = "trainer-2"
    world.serve(1)
    assert finished(world, 1).generation == 2


# -- time


@pytest.mark.parametrize("phase", ["open", "join", "stage"])
def test_an_update_that_takes_too_long_before_the_commit_fails(phase: str) -> None:
    kind: type[Op] = {"open": Open, "join": Join, "stage": Send}[phase]
    world = World(update_timeout_s=60.0, max_regroups=99, admin_timeout_s=40.0,
                  join_timeout_s=40.0, stage_timeout_s=40.0)  # fmt: skip
    world.fault(kind, "unknown", slot=TRAINER, times=2)
    start = world.now
    world.publish(0)
    world.run(lambda: world.ended("failed") is not None)
    assert world.now <= start + 60.5
    update = world.ended("failed")
    assert update is not None
    assert update.reason.startswith("update timed out in ") or update.num_regroups
    last = [op.slot for op in world.log[-1][2] if isinstance(op, AbortGeneration)]
    assert last[-5:] == [TRAINER, *world.slots]
    assert all(world.group(n).num_evictions == 0 for n in (0, 1))
    finished(world, 0)


def test_a_late_staging_does_not_cost_the_fleet() -> None:
    """What is left of the update must be enough for the commit, or there is no commit."""
    world = serving(update_timeout_s=100.0, stage_timeout_s=90.0, join_timeout_s=10.0,
                    pause_timeout_s=5.0, commit_timeout_s=5.0, admin_timeout_s=2.0)  # fmt: skip
    world.fault(Send, "fail", delay_s=15.0)
    world.fault(Send, "slow", delay_s=84.4)
    for kind in (Pause, Commit):
        world.fault(kind, "slow", delay_s=1.0, times=99)
    world.publish(1)
    world.run(lambda: bool(world.commands(UpdateEnded)[1:]))
    assert [world.group(n).num_evictions for n in (0, 1)] == [0, 0]
    assert finished(world, 1).members == ALL


def test_ops_end_before_their_update() -> None:
    world = World(update_timeout_s=20.0, stage_timeout_s=19.0, join_timeout_s=19.0,
                  pause_timeout_s=19.0, commit_timeout_s=19.0, admin_timeout_s=19.0)  # fmt: skip
    start = world.now + 0.01
    world.serve(0)
    transfer = world.commands(Open, Join, Send, Stage)
    assert all(op.deadline <= start + 20.0 for op in transfer)


# -- catch-up


def test_the_current_version_goes_out_again_when_nobody_serves() -> None:
    world = serving((0, 1))
    world.kill(G0E0, G1E0)
    world.run(lambda: world.state(0) == "evicted" and world.state(1) == "evicted")
    assert not world.core.snapshot().has_capacity
    world.relaunch(0)
    world.run(lambda: world.core.snapshot().has_capacity)
    update = world.commands(UpdateEnded)[-1] if world.state(0) == "admitted" else None
    world.run(lambda: len(world.commands(UpdateEnded)) == 2)
    update = world.commands(UpdateEnded)[-1]
    assert (update.version, update.members, update.outcome) == (0, ("g0e0",), "finished")
    world.relaunch(1)
    world.run(lambda: world.state(1) == "candidate")
    world.run_for(60.0)
    assert world.state(1) == "candidate"
    world.serve(1)
    assert finished(world, 1).members == ("g0e0", "g1e0")


def test_a_new_version_overtakes_a_catch_up_that_fails() -> None:
    world = serving((0,))
    world.kill(G0E0)
    world.run(lambda: world.state(0) == "evicted")
    world.fault(Open, "slow", delay_s=5.0)
    world.restart(G0E0)
    world.run(lambda: world.core.snapshot().update_phase == "open")
    world.publish(1)
    finished(world, 1)
    assert world.core.snapshot().policy_version == 1


# -- answers that nobody waits for


def test_late_and_foreign_completions_are_ignored() -> None:
    world = serving()
    assert world.core.handle(world.now, OpSucceeded(10_000, OpResult())) == []
    assert world.core.handle(world.now, OpFailed(10_001, "x")) == []
    world.fault(Stage, "fail", slot=G0E0)
    world.fault(Stage, "slow", slot=G1E0, delay_s=0.5)
    world.publish(1)
    assert finished(world, 1).members == ALL
