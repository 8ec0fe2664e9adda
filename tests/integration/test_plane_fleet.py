"""The plane, its drivers, fake engines, a fake trainer and the real router, together.

One story: an engine dies in the middle of a transfer, its group leaves as a block, versions go on
without it, it comes back through an update; then the router forgets everything and is put right.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from engine.fake_faults import FaultRule
from orchestrator.plane.commands import AbortGeneration
from protocol.ids import Slot
from tests.fakes.processes import RouterProcess, free_port, router_process
from tests.helpers.plane_runtime import running_plane
from tests.integration.conftest import StartFleet, StartTrainer

GROUPS = [0, 0, 1, 1]


async def test_an_engine_dies_in_a_transfer_and_its_group_returns(
    fake_fleet: StartFleet,
    fake_trainer: StartTrainer,
    router: RouterProcess,
    admin_token: str,
    tmp_path: Path,
) -> None:
    fleet = await fake_fleet(GROUPS)
    trainer = await fake_trainer(step_s=0.05, is_free_running=True)
    urls = [fleet.urls[slot] for slot in fleet.slots]
    everybody, first_group = set(urls), set(urls[:2])
    async with running_plane(
        urls,
        GROUPS,
        trainer_url=trainer.url,
        token=admin_token,
        directory=tmp_path,
        router_url=router.url,
    ) as plane:
        await plane.until(lambda: set(plane.listed or ()) == everybody)
        generation = plane.core.snapshot().generation
        assert generation == 1

        victim = Slot(1, 0)
        fleet.engines[victim].plan.add(FaultRule(at="stage", action="exit"))
        await plane.until(lambda: plane.state(1) == "evicted")
        lost_at = plane.core.snapshot().policy_version
        assert lost_at is not None
        await plane.until(lambda: set(plane.listed or ()) == first_group)
        assert set(router.workers()) == first_group
        await plane.until(lambda: (plane.core.snapshot().policy_version or 0) >= lost_at + 2)
        assert plane.core.snapshot().generation > generation
        assert plane.updates()[-1].members == ("g0e0", "g0e1")
        aborted = {
            command.slot
            for _, commands in plane.journal.lines
            for command in commands
            if isinstance(command, AbortGeneration)
        }
        assert {None, Slot(0, 0), Slot(0, 1)} <= aborted
        assert plane.state(0) == "admitted"

        await fleet.relaunch(victim)
        await plane.until(lambda: plane.state(1) == "admitted")
        await plane.until(lambda: set(plane.listed or ()) == everybody)
        version = plane.core.snapshot().policy_version
        assert version is not None
        assert version > lost_at + 2
        for slot in fleet.slots:
            identity = fleet.engines[slot].identity()
            assert identity.admission == "open"
            assert identity.weight_version is not None
            assert identity.weight_version >= version
    finished = [request.version for request in trainer.finished]
    assert finished == list(range(len(finished)))


async def test_a_router_that_restarts_is_put_right(
    fake_fleet: StartFleet, fake_trainer: StartTrainer, admin_token: str, tmp_path: Path
) -> None:
    fleet = await fake_fleet(GROUPS)
    trainer = await fake_trainer()
    urls = [fleet.urls[slot] for slot in fleet.slots]
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        first = await _start_router(tmp_path, port)
        url = first.router.url
        plane = await stack.enter_async_context(
            running_plane(
                urls,
                GROUPS,
                trainer_url=trainer.url,
                token=admin_token,
                directory=tmp_path,
                router_url=url,
            )
        )
        await plane.until(lambda: set(plane.listed or ()) == set(urls))
        await asyncio.to_thread(first.close)
        await plane.until(lambda: plane.listed is None)
        assert plane.core.snapshot().router_error
        assert plane.core.snapshot().num_admitted == 2

        second = await _start_router(tmp_path, port)
        try:
            await plane.until(lambda: set(plane.listed or ()) == set(urls))
            assert plane.core.snapshot().router_error == ""
            assert plane.core.snapshot().num_admitted == 2
        finally:
            await asyncio.to_thread(second.close)


class _Router:
    """A router process that is ended by hand."""

    def __init__(self, log_dir: Path, port: int) -> None:
        self._stack = contextlib.ExitStack()
        self.router = self._stack.enter_context(router_process(log_dir=log_dir, port=port))

    def close(self) -> None:
        """End it without a word."""
        self.router.process.kill()
        self._stack.close()


async def _start_router(log_dir: Path, port: int) -> _Router:
    return await asyncio.to_thread(_Router, log_dir, port)
