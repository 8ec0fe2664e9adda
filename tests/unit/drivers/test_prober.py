"""The prober against fake engines: news, misses, leases, starting over."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from engine.fake_faults import FaultRule
from engine.fake_fleet import FakeFleet
from orchestrator.drivers.admin_http import AdminHttp
from orchestrator.drivers.engines import EngineDriver
from orchestrator.drivers.prober import Prober
from orchestrator.plane.commands import Probe, RouteEntry
from orchestrator.plane.events import EngineAnswered, EngineSilent
from orchestrator.plane.health import ProbeSettings
from protocol.engine_api import Identity
from protocol.ids import Slot

A, B = Slot(0, 0), Slot(1, 0)
QUICK = ProbeSettings(interval_s=0.02, retry_s=0.01, backoff_max_s=0.05, failure_threshold=2)


class Bench:
    """A prober over a fake fleet; `until` looks after each news."""

    def __init__(self, fleet: FakeFleet, prober: Prober, news: list[Any], pulse: asyncio.Event):
        self.fleet = fleet
        self.prober = prober
        self.news = news
        self._pulse = pulse

    def watch(self, slot: Slot, life: int = 0, url: str | None = None) -> None:
        self.prober.watch(Probe(slot, url or self.fleet.urls[slot], life))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(5.0):
            while not holds():
                self._pulse.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):  # not everything is news
                        await self._pulse.wait()

    def of(self, kind: type[Any], slot: Slot = A) -> list[Any]:
        return [event for event in self.news if isinstance(event, kind) and event.slot == slot]


@contextlib.asynccontextmanager
async def at_work(
    run_id: str = "run", timeout_s: float = 1.0, settings: ProbeSettings = QUICK
) -> AsyncIterator[Bench]:
    news: list[Any] = []
    pulse = asyncio.Event()

    def on_news(event: Any) -> None:
        news.append(event)
        pulse.set()

    async with FakeFleet([A, B]) as fleet, AdminHttp("secret", connect_timeout_s=1.0) as http:
        driver = EngineDriver(http, fleet.urls.__getitem__, time.monotonic, lease_s=30.0)
        prober = Prober(
            driver, settings, time.monotonic, on_news, run_id=run_id, timeout_s=timeout_s
        )
        task = asyncio.create_task(prober.run())
        try:
            yield Bench(fleet, prober, news, pulse)
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_answers_are_news_once() -> None:
    async with at_work() as bench:
        bench.watch(A)
        bench.watch(B)
        await bench.until(lambda: bool(bench.of(EngineAnswered, B) and bench.of(EngineAnswered)))
        identity = bench.fleet.engines[A].identity()
        first = bench.of(EngineAnswered)[0]
        assert (first.boot_id, first.life, first.world_size) == (identity.boot_id, 0, 1)
        assert (first.weight_version, first.paused) == (None, False)
        health = bench.prober.health(A)
        assert health is not None
        assert health.health == "ready"
        assert bench.prober.health(Slot(9, 9)) is None
        bench.fleet.engines[A].core.paused = True
        await bench.until(lambda: len(bench.of(EngineAnswered)) == 2)
        assert bench.of(EngineAnswered)[1].paused


async def test_death_and_return() -> None:
    async with at_work() as bench:
        bench.watch(A, life=0)
        await bench.until(lambda: bool(bench.of(EngineAnswered)))
        bench.fleet.kill(A)
        await bench.until(lambda: bool(bench.of(EngineSilent)))
        assert bench.of(EngineSilent)[0].life == 0
        await bench.fleet.relaunch(A)
        await bench.until(lambda: len(bench.of(EngineAnswered)) == 2)
        first, second = bench.of(EngineAnswered)
        assert first.boot_id != second.boot_id


async def test_a_hanging_engine_delays_nobody_and_is_silent_itself() -> None:
    async with at_work(timeout_s=0.1) as bench:
        bench.watch(A)
        bench.watch(B)
        await bench.until(lambda: bool(bench.of(EngineAnswered)))
        bench.fleet.engines[A].plan.add(FaultRule(at="/identity", action="hang", times=0))
        await bench.until(lambda: bool(bench.of(EngineSilent)))
        assert "no answer within" in bench.of(EngineSilent)[0].error
        assert not bench.of(EngineSilent, B)


async def test_watching_anew_makes_the_next_answer_news() -> None:
    async with at_work() as bench:
        bench.watch(A)
        await bench.until(lambda: len(bench.of(EngineAnswered)) == 1)
        bench.watch(A)
        await bench.until(lambda: len(bench.of(EngineAnswered)) == 2)


@pytest.mark.parametrize(
    ("run_id", "life", "url_of", "problem"),
    [
        ("other", 0, A, "it belongs to run 'run', not 'other'"),
        ("run", 0, B, "it is g1e0, not g0e0"),
        ("run", 2, A, "it is of life 0, expected 2 or later"),
    ],
)
async def test_somebody_else_is_a_miss(run_id: str, life: int, url_of: Slot, problem: str) -> None:
    async with at_work(run_id) as bench:
        bench.watch(A, life=life, url=bench.fleet.urls[url_of])
        health = bench.prober.health(A)
        assert health is not None
        await bench.until(lambda: health.num_misses > 3)
        assert health.last_error == problem
        assert bench.news == []


async def test_an_error_is_a_miss() -> None:
    async with at_work() as bench:
        bench.fleet.engines[A].plan.add(FaultRule(at="/identity", action="error", times=0))
        bench.watch(A)
        health = bench.prober.health(A)
        assert health is not None
        await bench.until(lambda: health.num_misses > 1)
        assert "HTTP 500" in health.last_error


async def test_leases_of_those_that_serve_are_renewed() -> None:
    async with at_work() as bench:
        engine = bench.fleet.engines[A]
        engine.keeper.hold(4)
        boot_id = engine.identity().boot_id
        bench.watch(A)
        bench.prober.serve([RouteEntry(A, bench.fleet.urls[A], "another boot", 4)])
        await bench.until(lambda: bool(bench.of(EngineAnswered)))
        assert engine.identity().admission == "closed"
        bench.prober.serve([RouteEntry(A, bench.fleet.urls[A], boot_id, 4)])
        await bench.until(lambda: engine.identity().admission == "open")


async def test_a_refused_lease_is_renewed_as_soon_as_the_next_version_is_routed() -> None:
    async with at_work(settings=ProbeSettings(interval_s=600.0)) as bench:
        engine = bench.fleet.engines[A]
        engine.keeper.hold(5)
        url, boot_id = bench.fleet.urls[A], engine.identity().boot_id
        bench.prober.serve([RouteEntry(A, url, boot_id, 4)])
        bench.watch(A)
        await bench.until(lambda: A in bench.prober.refused)
        assert engine.identity().admission == "closed"
        bench.prober.serve([RouteEntry(A, url, boot_id, 5)])
        await bench.until(lambda: engine.identity().admission == "open")
        assert not bench.prober.refused


async def test_a_programming_error_ends_the_prober() -> None:
    class Broken(EngineDriver):
        async def probe(self, url: str, timeout_s: float) -> Identity:
            raise ZeroDivisionError(url)

    async with AdminHttp("secret", connect_timeout_s=1.0) as http:
        driver = Broken(http, lambda _: "x", time.monotonic, lease_s=1.0)
        prober = Prober(driver, QUICK, time.monotonic, lambda _: None, run_id="run", timeout_s=1.0)
        prober.watch(Probe(A, "x", 0))
        with pytest.raises(ZeroDivisionError):
            async with asyncio.timeout(5.0):
                await prober.run()
