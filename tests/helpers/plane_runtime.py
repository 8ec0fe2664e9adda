"""The plane with its real drivers, for tests: wired as in `orchestrator/main.py`, without rollouts.

async with running_plane(urls, groups, trainer_url, ...) as plane:
    await plane.until(lambda: plane.core.snapshot().policy_version == 0)
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.drivers.admin_http import AdminHttp
from orchestrator.drivers.engines import EngineDriver
from orchestrator.drivers.journal import Header, Journal
from orchestrator.drivers.launcher import LauncherDesk
from orchestrator.drivers.prober import Prober
from orchestrator.drivers.router import RouterDriver
from orchestrator.drivers.router_port import VllmPdRouter, VllmRouter
from orchestrator.drivers.runtime import Drivers, Notice, Runtime
from orchestrator.drivers.trainer import TrainerLink
from orchestrator.plane.commands import Command, UpdateEnded
from orchestrator.plane.core import PlaneCore
from orchestrator.plane.events import Event, MembersListed
from orchestrator.plane.health import ProbeSettings
from orchestrator.plane.state import PlaneSettings

RUN_ID = "run"
PROBE = ProbeSettings(interval_s=0.1, retry_s=0.05, failure_threshold=2, backoff_max_s=0.2)
SETTINGS = PlaneSettings(
    admin_timeout_s=3.0,
    join_timeout_s=3.0,
    stage_timeout_s=3.0,
    pause_timeout_s=3.0,
    commit_timeout_s=3.0,
    update_timeout_s=30.0,
    startup_timeout_s=20.0,
    startup_wait_s=5.0,
    retry_wait_s=0.1,
    retry_wait_max_s=0.5,
    max_evictions=50,
)


class PulsingJournal(Journal):
    """Remembers what it wrote and wakes whoever waits for a change."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, time.time)
        self.lines: list[tuple[Event, list[Command]]] = []
        self.pulse = asyncio.Event()

    def append(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """One line."""
        super().append(now, event, commands)
        self.lines.append((event, list(commands)))
        self.pulse.set()


@dataclass(slots=True)
class RunningPlane:
    """What a test looks at."""

    core: PlaneCore
    runtime: Runtime
    journal: PulsingJournal
    desk: LauncherDesk
    link: TrainerLink
    notices: list[Notice] = field(default_factory=list)
    listed: tuple[str, ...] | None = None

    async def until(self, holds: Callable[[], bool], timeout_s: float = 15.0) -> None:
        """Wait until it holds, looking after each event."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    self.journal.pulse.clear()
                    await self.journal.pulse.wait()
        except TimeoutError:
            tail = "\n".join(
                f"{event} -> {commands}" for event, commands in self.journal.lines[-30:]
            )
            raise AssertionError(
                f"not within {timeout_s} s: {self.core.snapshot()}\n{tail}"
            ) from None

    def state(self, group: int) -> str:
        """What the core says of a group."""
        return next(g.state for g in self.core.snapshot().groups if g.number == group)

    def updates(self) -> list[UpdateEnded]:
        """All updates that ended."""
        return [notice for notice in self.notices if isinstance(notice, UpdateEnded)]


@contextlib.asynccontextmanager
async def running_plane(
    urls: Sequence[str],
    groups: Sequence[int],
    *,
    trainer_url: str,
    token: str,
    directory: Path,
    router_url: str | None = None,
    router_kind: type[VllmRouter | VllmPdRouter] = VllmRouter,
    probe: ProbeSettings = PROBE,
    settings: PlaneSettings = SETTINGS,
    lease_s: float = 5.0,
) -> AsyncIterator[RunningPlane]:
    """Runs until the block ends; what a background task raises ends the block."""
    clock = time.monotonic
    core = PlaneCore(settings, urls, groups, clock())
    journal = PulsingJournal(directory / "journal.jsonl")
    journal.begin(Header(RUN_ID, 0, settings, tuple(urls), tuple(groups), clock()))
    notices: list[Notice] = []
    runtime = Runtime(core, journal, clock, notices.append)
    desk = LauncherDesk(RUN_ID, runtime.post)
    async with (
        AdminHttp(token, connect_timeout_s=1.0) as http,
        AdminHttp(None, connect_timeout_s=1.0) as plain,
        TrainerLink(
            trainer_url, token, clock, on_ready=runtime.post, on_step=lambda _: None
        ) as link,
    ):
        plane = RunningPlane(core, runtime, journal, desk, link, notices)

        def listed(event: MembersListed) -> None:
            plane.listed = event.urls
            runtime.post(event)

        engines = EngineDriver(http, core.url_of, clock, lease_s=lease_s)
        prober = Prober(engines, probe, clock, runtime.post, run_id=RUN_ID, timeout_s=1.0)
        routing = None
        if router_url is not None:
            router = router_kind(plain, router_url)
            routing = RouterDriver(router, add_timeout_s=5.0, on_listed=listed)
        drivers = Drivers(engines, prober, link, routing, desk if settings.has_launcher else None)
        jobs: list[Any] = [runtime.run(drivers), prober.run(), link.watch()]
        if routing is not None:
            jobs.append(routing.run())
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            yield plane
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=5.0)
            journal.close()
