"""Asks every engine how it is, and renews the leases of those that should serve.

One task an engine, so that a hung one delays nobody else's detection; when to ask and what an
answer means is decided in `plane/health.py`. A miss is: no answer, an error, an answer that does
not parse, or an identity that is not ours (other run, slot, or an older life).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from orchestrator.drivers.admin_http import NoAnswer, Refused
from orchestrator.drivers.engines import EngineDriver
from orchestrator.plane.commands import Probe, RouteEntry
from orchestrator.plane.events import EngineAnswered
from orchestrator.plane.health import EngineHealth, News, ProbeSettings, Sighting
from protocol.engine_api import Identity
from protocol.ids import Slot

log = logging.getLogger(__name__)


class Prober:
    """`watch` (re)starts the probing of a slot; `serve` says whose lease is renewed."""

    def __init__(
        self,
        driver: EngineDriver,
        settings: ProbeSettings,
        clock: Callable[[], float],
        on_news: Callable[[News], None],
        *,
        run_id: str,
        timeout_s: float,
    ) -> None:
        self._driver = driver
        self._settings = settings
        self._clock = clock
        self._on_news = on_news
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._health: dict[Slot, EngineHealth] = {}
        self._tasks: dict[Slot, asyncio.Task[None]] = {}
        self._serving: dict[Slot, RouteEntry] = {}
        # Asked about at once when they are to serve something else: their lease was not renewed.
        self._refused: set[Slot] = set()
        self._wake: dict[Slot, asyncio.Event] = {}

    def watch(self, command: Probe) -> None:
        """Start over with this slot: whatever it answers next is news."""
        slot = command.slot
        old = self._tasks.pop(slot, None)
        if old is not None:
            old.cancel()
        health = EngineHealth(self._settings, slot, command.life, self._clock())
        self._health[slot] = health
        self._refused.discard(slot)
        self._wake[slot] = wake = asyncio.Event()
        name = f"probe-{slot.engine_id}"
        work = self._follow(slot, command.url, health, wake)
        self._tasks[slot] = asyncio.create_task(work, name=name)

    def serve(self, entries: Iterable[RouteEntry]) -> None:
        """The engines whose lease is renewed from now on; all others run out."""
        before, self._serving = self._serving, {entry.slot: entry for entry in entries}
        for slot, entry in self._serving.items():
            if slot in self._refused and entry != before.get(slot):
                self._wake[slot].set()

    def health(self, slot: Slot) -> EngineHealth | None:
        """What is known of an engine."""
        return self._health.get(slot)

    @property
    def refused(self) -> frozenset[Slot]:
        """Engines that serve and would not renew their lease when they were last asked to."""
        return frozenset(self._refused)

    async def run(self) -> None:
        """Pass on what breaks in a probe task (a programming error); end all when cancelled."""
        try:
            while True:
                # Tasks come and go with `watch`; the wait is bounded so that new ones are seen.
                tasks = list(self._tasks.values())
                if not tasks:
                    await asyncio.sleep(self._settings.interval_s)
                    continue
                done, _ = await asyncio.wait(
                    tasks,
                    timeout=self._settings.interval_s,
                    return_when=asyncio.FIRST_EXCEPTION,
                )
                for task in done:
                    if not task.cancelled():
                        task.result()
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _follow(
        self, slot: Slot, url: str, health: EngineHealth, wake: asyncio.Event
    ) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(health.next_probe_at - self._clock(), 0.0)):
                    await wake.wait()
            wake.clear()
            asked_at = self._clock()
            before = health.health
            try:
                identity = await self._driver.probe(url, self._timeout_s)
                problem = self._problem(slot, health.life, identity)
            except (NoAnswer, Refused) as error:
                identity, problem = None, str(error)
            now = self._clock()
            if identity is None or problem is not None:
                news = health.missed(now, problem or "no answer")
            else:
                news = health.answered(now, _sighting(slot, asked_at, identity))
            if health.health != before:
                log.info("%s %s -> %s %s", slot.engine_id, before, health.health, health.last_error)
            if news is not None:
                self._on_news(news)
            if health.health == "ready" and identity is not None:
                await self._renew(slot)

    async def _renew(self, slot: Slot) -> None:
        self._refused.discard(slot)
        entry = self._serving.get(slot)
        if entry is None:
            return
        try:
            await self._driver.renew_lease(
                slot,
                boot_id=entry.boot_id,
                version=entry.version,
                timeout_s=self._timeout_s,
                is_wanted=lambda: self._serving.get(slot) == entry,
            )
        except (NoAnswer, Refused) as error:
            # During a commit the engine may hold the next version already, and is asked again
            # when that one is routed; a real difference shows in the next probe.
            self._refused.add(slot)
            if self._serving.get(slot) not in (None, entry):
                self._wake[slot].set()
            log.debug("%s lease not renewed: %s", slot.engine_id, error)

    def _problem(self, slot: Slot, life: int, identity: Identity) -> str | None:
        if identity.run_id != self._run_id:
            return f"it belongs to run {identity.run_id!r}, not {self._run_id!r}"
        if (identity.group, identity.index) != (slot.group, slot.index):
            return f"it is g{identity.group}e{identity.index}, not {slot.engine_id}"
        if identity.life < life:
            return f"it is of life {identity.life}, expected {life} or later"
        return None


def _sighting(slot: Slot, asked_at: float, identity: Identity) -> Sighting:
    answer = EngineAnswered(
        slot=slot,
        asked_at=asked_at,
        boot_id=identity.boot_id,
        life=identity.life,
        world_size=identity.world_size,
        weight_version=identity.weight_version,
        paused=identity.paused,
    )
    return Sighting(
        answer, identity.core_age_s, identity.running_requests, identity.generated_tokens
    )
