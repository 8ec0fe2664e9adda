"""Journals of simulated runs, as the runtime would have written them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.drivers.journal import Journal
from orchestrator.recovery import core_of
from protocol.ids import Slot
from tests.helpers.plane_world import World

EPOCH = 1_800_000_000.0  # unix time of the plane's clock at 0


def some_run(**settings: Any) -> World:
    """A run with an eviction, relaunches and two restarts of the orchestrator."""
    world = World([0, 0, 1], has_launcher=True, train_s=1.0, **settings)
    world.publish(0)
    world.run_for(5.0)
    world.kill(Slot(1, 0))
    world.run_for(4.0)
    world.restart_orchestrator(2.0)
    world.run_for(6.0)
    world.restart_orchestrator()
    world.run_for(6.0)
    return world


def write_journal(path: Path, world: World, **limits: int) -> None:
    """The world's log, in segments of the given size."""
    now = world.header.t
    journal = Journal(path, lambda: EPOCH + now, **limits)
    journal.begin(world.header)
    core = core_of(world.header)
    for now, event, commands in world.log:
        assert core.handle(now, event) == commands
        journal.append(now, event, commands)
        if journal.is_full:
            journal.rotate(core.memory())
    journal.close()
