"""The orchestrator is killed and goes on from what it had written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.plane.commands import (
    AbortGeneration,
    Admit,
    Command,
    Commit,
    Fence,
    Finish,
    Open,
    Relaunch,
    Resume,
    Route,
    Stage,
    UpdateEnded,
)
from orchestrator.plane.events import Event, Restarted
from orchestrator.plane.state import Phase
from protocol.ids import Slot
from tests.helpers.plane_world import World

_PHASES: tuple[Phase, ...] = (
    "open", "join", "stage", "abort", "pause", "commit", "verify", "admit", "resume", "finish",
)  # fmt: skip
_HOLD_V0: tuple[Phase, ...] = ("open", "join", "stage", "abort", "pause")


class Watched(World):
    """Also asserts what is true of the engines: who can make a token, makes it with a version that
    it was admitted at."""

    def feed(self, event: Event) -> list[Command]:
        commands = super().feed(event)
        admitted = {
            (e.slot, e.boot_id, e.version) for route in self.commands(Route) for e in route.entries
        }
        for engine in self.engines.values():
            if engine.is_open and not engine.paused and engine.is_alive:
                assert (engine.slot, engine.boot_id, engine.version) in admitted, self.history(30)
        return commands


def after_restart(world: World, *kinds: type[Any]) -> list[Any]:
    """What was commanded since the last restart, in it too."""
    starts = [i for i, (_, event, _) in enumerate(world.log) if isinstance(event, Restarted)]
    since = [command for _, _, commands in world.log[starts[-1] :] for command in commands]
    return [command for command in since if isinstance(command, kinds)]


def served() -> Watched:
    """Three groups serve v0; the third comes back in the next update of some tests."""
    world = Watched([0, 0, 1, 2], startup_wait_s=5.0, has_launcher=False)
    world.serve(0)
    return world


def num_commits(world: World, slot: Slot) -> int:
    """Weight reloads of an engine since the restart."""
    return sum(command.slot == slot for command in after_restart(world, Commit))


@pytest.mark.parametrize("phase", _PHASES)
@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "unsent"])
@pytest.mark.parametrize("away_s", [0.0, 20.0])
def test_killed_in_each_phase(phase: Phase, is_sent: bool, away_s: float) -> None:
    """`unsent`: what the phase begins with was written down, and the kill came before the act."""
    world = served()
    if phase == "abort":
        world.fault(Stage, "fail", slot=Slot(1, 0))
    if phase in ("open", "join", "admit"):  # these are only for a membership that has changed
        world.restart(Slot(2, 0))
        world.run(lambda: world.state(2) == "candidate")
    is_there: Callable[[], bool] = lambda: world.core.snapshot().update_phase == phase  # noqa: E731
    restarts: Callable[[], bool] = lambda: any(isinstance(e, Restarted) for _, e, _ in world.log)  # noqa: E731
    if not is_sent:
        world.dies_when = is_there
    world.publish(1)
    if is_sent:
        world.run(is_there)
        generation = world.core.snapshot().generation
        world.restart_orchestrator(away_s)
    else:
        world.run(restarts)
        generation = world.core.snapshot().generation
    is_in_service = phase in ("resume", "finish")
    assert world.core.snapshot().num_admitted == 0
    assert world.core.snapshot().policy_version == (1 if is_in_service else 0)

    world.run(lambda: world.ended("finished", 1) is not None)
    world.run(lambda: world.core.snapshot().update_phase is None)
    world.run_for(5.0)
    snapshot = world.core.snapshot()
    assert (snapshot.policy_version, snapshot.num_admitted) == (1, 3)
    assert not any(engine.paused for engine in world.engines.values())
    # Who held v0 or v1 for certain did not load it again; v1 was loaded once more where its commit
    # has no outcome, and once where it had not come that far.
    num_loads = 0 if is_in_service or phase in ("verify", "admit") else 1
    assert [num_commits(world, slot) for slot in world.slots] == [num_loads] * 4
    opened = after_restart(world, Open)
    assert all(command.generation > generation for command in opened)
    assert len(opened) == num_loads
    assert world.trainer.finished[-1][0] == 1
    if phase in ("open", "join", "stage", "abort", "pause"):
        # They served v0 before they got v1.
        first = next(r for r in after_restart(world, Route) if r.entries)
        assert {entry.version for entry in first.entries} == {0}


def test_between_updates_nothing_is_sent_again() -> None:
    world = served()
    world.restart_orchestrator(3.0)
    assert [len(r.entries) for r in after_restart(world, Route)] == [0]
    world.run(lambda: world.core.snapshot().num_admitted == 3)
    world.run(lambda: world.core.snapshot().update_phase is None)
    assert after_restart(world, Open, Stage, Commit, Fence) == []
    assert len(after_restart(world, Admit)) == len(after_restart(world, Resume)) == 4
    assert world.group(0).detail == "all members still report v0"
    assert {f.version for f in after_restart(world, Finish)} == {0}
    world.serve(1)
    assert after_restart(world, Open) == []  # the membership is what it was: same generation


def test_what_changed_meanwhile_comes_back_by_an_update_only() -> None:
    world = served()
    world.engines[Slot(0, 0)].is_alive = False
    world.restart(Slot(1, 0))
    world.engines[Slot(2, 0)].version = None  # weights lost: the gate closes with them
    world.engines[Slot(2, 0)].is_open = False
    world.restart_orchestrator(5.0)
    world.run_for(1.0)
    assert [world.state(g) for g in (0, 1, 2)] == ["starting", "candidate", "candidate"]
    assert {f.slot for f in after_restart(world, Fence)} == {Slot(1, 0), Slot(2, 0)}
    world.run(lambda: world.core.snapshot().num_admitted == 2)  # too few served: v0 was sent again
    assert world.reports(0)[-1] == ("evicted", "probe_failed")
    assert "no answer since the restart: g0e0" in world.group(0).detail
    assert {c.slot for c in after_restart(world, Commit)} == {Slot(1, 0), Slot(2, 0)}


def test_it_waits_for_the_trainer_before_it_sends() -> None:
    world = served()
    for slot in world.slots:
        world.restart(slot)
    world.trainer.published = None  # does not answer yet
    world.restart_orchestrator(1.0)
    world.run_for(20.0)
    assert {g.state for g in world.core.snapshot().groups} == {"candidate"}
    assert after_restart(world, Open) == []
    world.publish(1)
    world.run(lambda: world.core.snapshot().num_admitted == 3)
    assert {s.version for s in after_restart(world, Stage)} == {1}


def test_evictions_and_wishes_are_not_forgotten() -> None:
    world = Watched([0, 1], has_launcher=True, max_evictions=2, eviction_window_s=100.0,
                    quarantine_s=50.0)  # fmt: skip
    world.serve(0)
    world.kill(Slot(1, 0))
    world.run(lambda: world.state(1) == "candidate")
    world.dies_when = lambda: world.state(1) == "quarantined"
    world.kill(Slot(1, 0))
    world.run(lambda: world.state(1) == "quarantined")
    began = world.group(1).since
    assert world.group(1).num_evictions == 2
    assert [r.life for r in after_restart(world, Relaunch)] == [1]
    assert Slot(1, 0) in {f.slot for f in after_restart(world, Fence)}
    world.run(lambda: world.state(1) != "quarantined")
    assert world.now == pytest.approx(began + 50.0, abs=0.1)


def test_killed_again_before_anybody_has_answered() -> None:
    world = served()
    for _ in range(3):
        world.restart_orchestrator(1.0)
    world.run(lambda: world.core.snapshot().num_admitted == 3)
    assert after_restart(world, Commit) == []
    world.restart_orchestrator()
    world.run(lambda: world.core.snapshot().update_phase == "verify")
    world.restart_orchestrator()
    world.run(lambda: world.core.snapshot().num_admitted == 3)
    assert after_restart(world, Commit) == []


def test_a_commit_without_an_outcome_may_still_happen() -> None:
    """It ends long after the restart, when the engine has said that it holds v0."""
    world = served()
    world.fault(Commit, "slow", slot=Slot(1, 0), delay_s=8.0)
    world.publish(1)
    world.run(lambda: world.core.snapshot().update_phase == "commit")
    world.restart_orchestrator()
    world.run_for(20.0)
    world.run(lambda: world.core.snapshot().num_admitted == 3)
    assert world.core.snapshot().policy_version == 1


def test_a_generation_under_way_is_ended_on_both_sides() -> None:
    world = served()
    world.publish(1)
    world.run(lambda: world.core.snapshot().update_phase == "stage")
    world.restart_orchestrator()
    aborts = {c.slot for c in after_restart(world, AbortGeneration)}
    assert aborts == {None, *world.slots}
    ended = after_restart(world, UpdateEnded)[0]
    assert ended.reason == "the orchestrator restarted in stage"


def test_engines_that_moved_are_asked_at_their_new_place() -> None:
    world = served()
    urls = tuple(f"http://new-{slot.engine_id}" for slot in world.slots)
    world.core.handle(world.now, Restarted(urls))
    assert [world.core.url_of(slot) for slot in world.slots] == list(urls)
