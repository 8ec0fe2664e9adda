"""Fixtures of the integration tests: the real router, fake engines, the fake trainer.

def test_x(router, engine_processes):      # real processes
    engines = engine_processes([0, 0, 1, 1])
async def test_y(fake_fleet, fake_trainer):  # in this loop, quick
    fleet = await fake_fleet([0, 0, 1, 1])
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.fake_fleet import FakeFleet
from protocol.ids import Slot
from tests.fakes.processes import (
    FakeEngineProcess,
    RouterProcess,
    fake_engine_processes,
    router_process,
)
from tests.fakes.trainer import FakeTrainer

RUN_ID = "run"

EngineProcesses = Callable[..., list[FakeEngineProcess]]
StartFleet = Callable[..., Awaitable[FakeFleet]]
StartTrainer = Callable[..., Awaitable[FakeTrainer]]


def slots_of(groups: Sequence[int]) -> list[Slot]:
    """`[0, 0, 1, 1]` -> the four slots of two groups of two."""
    return [Slot(group, groups[:place].count(group)) for place, group in enumerate(groups)]


@pytest.fixture
def admin_token() -> str:
    """What all fakes of a test expect."""
    return "secret"


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RouterProcess]:
    """A real vllm-router without workers."""
    with router_process(log_dir=tmp_path) as started:
        yield started


@pytest.fixture
def engine_processes(tmp_path: Path, admin_token: str) -> Iterator[EngineProcesses]:
    """`engine_processes([0, 0, 1], "--transfer", "gloo")`: fake engines, a process each."""
    with contextlib.ExitStack() as stack:

        def start(groups: Sequence[int], *args: str) -> list[FakeEngineProcess]:
            args = ("--run-id", RUN_ID, *args)
            return stack.enter_context(
                fake_engine_processes(
                    slots_of(groups), admin_token=admin_token, log_dir=tmp_path, args=args
                )
            )

        yield start


@pytest_asyncio.fixture
async def fake_fleet(admin_token: str) -> AsyncIterator[StartFleet]:
    """`await fake_fleet([0, 0, 1], transfer="none")`: fake engines in the test's own loop."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(groups: Sequence[int], **settings: Any) -> FakeFleet:
            fleet = FakeFleet(slots_of(groups), run_id=RUN_ID, admin_token=admin_token, **settings)
            return await stack.enter_async_context(fleet)

        yield start


@pytest_asyncio.fixture
async def fake_trainer(admin_token: str) -> AsyncIterator[StartTrainer]:
    """`await fake_trainer(step_s=0.1)`: a fake trainer in the test's own loop, v0 published."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**settings: Any) -> FakeTrainer:
            trainer = FakeTrainer(run_id=RUN_ID, admin_token=admin_token, **settings)
            return await stack.enter_async_context(trainer.serve())

        yield start
