"""The plane, its drivers, fake engines, a fake trainer and the real router, together.

One story: an engine dies in the middle of a transfer, its group leaves as a block, versions go on
without it, it comes back through an update. Then the router forgets everything; and a router with
prefill and decode roles, to which nobody can be added.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import httpx

from engine.fake_faults import FaultRule
from orchestrator.drivers.router_port import VllmPdRouter
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


async def test_a_router_that_restarts_gets_back_whom_the_plane_wants_and_nobody_else(
    fake_fleet: StartFleet, fake_trainer: StartTrainer, admin_token: str, tmp_path: Path
) -> None:
    groups = [number // 4 for number in range(32)]
    fleet = await fake_fleet(groups)
    trainer = await fake_trainer()
    urls = [fleet.urls[slot] for slot in fleet.slots]
    evicted, wish = set(urls[:4]), set(urls[4:])
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        first = await _start_router(tmp_path, port)
        url = first.router.url
        plane = await stack.enter_async_context(
            running_plane(
                urls,
                groups,
                trainer_url=trainer.url,
                token=admin_token,
                directory=tmp_path,
                router_url=url,
            )
        )
        await plane.until(lambda: set(plane.listed or ()) == set(urls))
        fleet.kill(Slot(0, 2))
        await plane.until(lambda: set(plane.listed or ()) == wish)
        await asyncio.to_thread(first.close)
        await plane.until(lambda: plane.listed is None)
        assert plane.core.snapshot().router_error
        assert plane.core.snapshot().num_admitted == 7

        second = await _start_router(tmp_path, port, is_waited_for=False)
        try:
            seen = await asyncio.to_thread(_listings, second.router, wish)
            assert not [listing for listing in seen if set(listing) & evicted]
            await plane.until(lambda: set(plane.listed or ()) == wish)
            assert plane.core.snapshot().router_error == ""
            assert plane.core.snapshot().num_admitted == 7
        finally:
            await asyncio.to_thread(second.close)


async def test_with_roles_a_decode_group_returns_without_a_restart_of_the_router(
    fake_fleet: StartFleet, fake_trainer: StartTrainer, admin_token: str, tmp_path: Path
) -> None:
    groups = [0, 1, 1, 2, 2]
    fleet = await fake_fleet(groups)
    trainer = await fake_trainer(step_s=0.05, is_free_running=True)
    urls = [fleet.urls[slot] for slot in fleet.slots]
    roles = ["--vllm-pd-disaggregation", "--prefill", urls[0]]
    roles += [part for url in urls[1:] for part in ("--decode", url)]
    router = await _start_router(tmp_path, free_port(), args=roles)
    try:
        async with running_plane(
            urls,
            groups,
            trainer_url=trainer.url,
            token=admin_token,
            directory=tmp_path,
            router_url=router.router.url,
            router_kind=VllmPdRouter,
        ) as plane:
            await plane.until(lambda: plane.core.snapshot().num_admitted == 3)
            await plane.until(lambda: set(plane.listed or ()) == set(urls))
            fleet.kill(Slot(2, 0))
            await plane.until(lambda: set(plane.listed or ()) == set(urls[:3]))
            assert plane.state(2) == "evicted"
            await fleet.relaunch(Slot(2, 0))
            await plane.until(lambda: set(plane.listed or ()) == set(urls))
            assert plane.state(2) == "admitted"
            assert router.router.process.poll() is None
            # Never removed: it could not be put back.
            assert router.router.workers() == sorted(urls)
    finally:
        await asyncio.to_thread(router.close)


class _Router:
    """A router process that is ended by hand."""

    def __init__(self, log_dir: Path, port: int, args: list[str], is_waited_for: bool) -> None:
        self._stack = contextlib.ExitStack()
        process = router_process(log_dir=log_dir, port=port, args=args, is_waited_for=is_waited_for)
        self.router = self._stack.enter_context(process)

    def close(self) -> None:
        """End it without a word."""
        self.router.process.kill()
        self._stack.close()


async def _start_router(
    log_dir: Path, port: int, args: list[str] | None = None, *, is_waited_for: bool = True
) -> _Router:
    return await asyncio.to_thread(_Router, log_dir, port, args or [], is_waited_for)


def _listings(router: RouterProcess, wish: set[str]) -> list[list[str]]:
    """What the router says from the opening of its port until it has all of `wish`."""
    seen: list[list[str]] = []
    deadline = time.monotonic() + 20.0
    while not seen or set(seen[-1]) != wish:
        assert time.monotonic() < deadline, seen[-1:]
        with contextlib.suppress(httpx.HTTPError):
            seen.append(router.workers())
        time.sleep(0.005)
    return seen
