"""The router driver against a router that behaves like vllm-router, and worse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from engine.fake_fleet import FakeFleet, slots_of_sizes
from orchestrator.config import ClientConfig
from orchestrator.drivers import router as router_module
from orchestrator.drivers.admin_http import AdminHttp
from orchestrator.drivers.router import DirectRouting, RouterDriver, make_routing
from orchestrator.drivers.router_port import Ensured, VllmPdRouter, VllmRouter
from orchestrator.plane.events import MembersListed
from tests.fakes.router import FakeRouter
from tests.helpers.polling import until

DEAD = "http://127.0.0.1:9"


class Bench:
    """A driver at work on a fake router."""

    def __init__(self, fake: FakeRouter, http: AdminHttp) -> None:
        self.fake = fake
        self.heard: list[MembersListed] = []
        self._news = asyncio.Event()
        router = VllmRouter(http, fake.url)
        self.driver = RouterDriver(router, add_timeout_s=5.0, on_listed=self._listed)

    def _listed(self, event: MembersListed) -> None:
        self.heard.append(event)
        self._news.set()

    async def until(self, holds: Callable[[MembersListed], bool]) -> None:
        """Wait for a listing that is as it should be."""
        async with asyncio.timeout(10.0):
            while not (self.heard and holds(self.heard[-1])):
                self._news.clear()
                await self._news.wait()

    async def until_listed(self, *urls: str) -> None:
        await self.until(lambda event: event.urls == tuple(sorted(urls)))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "_INTERVAL_S", 0.02)
    monkeypatch.setattr(router_module, "_BUSY_INTERVAL_S", 0.005)


@pytest_asyncio.fixture
async def urls() -> AsyncIterator[list[str]]:
    """Three engines that answer."""
    async with FakeFleet(slots_of_sizes([3])) as fleet:
        yield [fleet.urls[slot] for slot in fleet.slots]


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeRouter]:
    async with FakeRouter(startup_timeout_s=0.05, health_interval_s=0.01).serve() as router:
        yield router


@contextlib.asynccontextmanager
async def at_work(fake: FakeRouter) -> AsyncIterator[Bench]:
    async with AdminHttp(None, 1.0) as http:
        bench = Bench(fake, http)
        task = asyncio.create_task(bench.driver.run())
        try:
            yield bench
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_adds_and_removes_what_differs(fake: FakeRouter, urls: list[str]) -> None:
    a, b, c = urls
    fake.workers = [c]
    async with at_work(fake) as bench:
        await bench.until_listed()
        bench.driver.want([b, a])
        await bench.until_listed(a, b)
        bench.driver.want([b])
        await bench.until_listed(b)
        assert sorted(fake.adds) == sorted([a, b])


async def test_only_news_is_told(fake: FakeRouter, urls: list[str]) -> None:
    a, *_ = urls
    async with at_work(fake) as bench:
        bench.driver.want([a])
        await bench.until_listed(a)
        fake.knobs.listing = ["x"]
        await bench.until(lambda event: event.urls is None)
        assert "unknown listing: ['x']" in bench.heard[-1].error
        fake.knobs.listing = None
        await bench.until_listed(a)
    assert [event.urls for event in bench.heard] == [(), (a,), None, (a,)]


async def test_adds_that_block_delay_neither_others_nor_removals(
    fake: FakeRouter, urls: list[str]
) -> None:
    a, b, c = urls
    # More than any pool of connections holds.
    blocked = [f"http://127.0.0.1:{port}" for port in range(20_000, 20_150)]
    fake.workers, fake.knobs.blocks = [c], {a, *blocked}
    async with at_work(fake) as bench:
        bench.driver.want([a, b, c, *blocked])
        await bench.until_listed(b, c)
        bench.driver.want([a, b, *blocked])
        await bench.until_listed(b)
        assert fake.adds.count(a) == 1


async def test_an_add_that_ends_after_its_removal_was_asked_does_not_stay(
    fake: FakeRouter, urls: list[str]
) -> None:
    a, b, _ = urls
    fake.knobs.blocks = {a}
    async with at_work(fake) as bench:
        bench.driver.want([a, b])
        await bench.until_listed(b)
        bench.driver.want([b])
        fake.release()
        await bench.until_listed(a, b)
        await bench.until_listed(b)
        fake.knobs.blocks = set()
        bench.driver.want([a, b])
        await bench.until_listed(a, b)


async def test_after_a_lost_add_the_listing_is_watched_closely(
    fake: FakeRouter, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a late member would get requests until the next slow look."""
    monkeypatch.setattr(router_module, "_INTERVAL_S", 3600.0)
    a, b, _ = urls
    fake.knobs.blocks = {a}
    async with at_work(fake) as bench:
        bench.driver.want([a, b])
        await bench.until_listed(b)
        bench.driver.want([b])
        num_looks = fake.num_looks
        await until(lambda: fake.num_looks >= num_looks + 3)
        fake.release()
        await bench.until_listed(a, b)
        await bench.until_listed(b)


async def test_only_the_listing_is_believed(fake: FakeRouter, urls: list[str]) -> None:
    a, b, _ = urls
    fake.workers, fake.knobs.lies, fake.knobs.forgets_adds = [a], 3, 1
    async with at_work(fake) as bench:
        bench.driver._add_timeout_s = 0.1
        bench.driver.want([b])
        await bench.until_listed(b)
        assert (fake.knobs.lies, fake.adds) == (0, [b, b])


async def test_who_is_listed_twice_or_in_another_spelling_goes(
    fake: FakeRouter, urls: list[str]
) -> None:
    a, b, _ = urls
    fake.workers, fake.knobs.twice = [f"{b}/", b.replace("http", "HTTP")], True
    async with at_work(fake) as bench:
        bench.driver.want([a, b])
        await bench.until_listed(a, b)
        bench.driver.want([b])
        await bench.until_listed(b)
        assert fake.workers == [b, b]


async def test_a_router_that_restarts_is_put_right(fake: FakeRouter, urls: list[str]) -> None:
    a, b, c = urls
    async with at_work(fake) as bench:
        bench.driver.want(urls)
        await bench.until_listed(*urls)
        bench.driver.want([a, b])
        await bench.until_listed(a, b)
        fake.kill()
        await bench.until(lambda event: event.urls is None)
        await fake.restart()
        await bench.until_listed(a, b)
        assert fake.adds.count(c) == 1


async def test_adds_are_begun_a_few_at_a_time(
    fake: FakeRouter, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "_YOUNG_S", 3600.0)
    blocked = [f"http://127.0.0.1:{port}" for port in range(20_000, 20_040)]
    fake.knobs.blocks = set(blocked)
    async with at_work(fake) as bench:
        bench.driver.want([*blocked, *urls])
        await until(lambda: len(fake.adds) >= router_module._MAX_YOUNG_ADDS)
        num_looks = fake.num_looks
        await until(lambda: fake.num_looks >= num_looks + 3)
        assert len(fake.adds) == router_module._MAX_YOUNG_ADDS
        fake.release()
        await bench.until_listed(*blocked, *urls)


async def test_after_an_outage_nobody_waits_for_the_next_turn(
    fake: FakeRouter, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "_INTERVAL_S", 3600.0)
    async with at_work(fake) as bench:
        bench.driver.want(urls[:2])
        await bench.until_listed(*urls[:2])
        fake.kill()
        bench.driver.want(urls)
        await bench.until(lambda event: event.urls is None)
        await fake.restart()
        await bench.until_listed(*urls)


async def test_who_is_refused_is_asked_for_again_and_logged_once(
    fake: FakeRouter, urls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    a, *_ = urls
    async with at_work(fake) as bench:
        bench.driver.want([a, DEAD])
        await until(lambda: fake.adds.count(DEAD) >= 3)
        assert bench.heard[-1].urls == (a,)
    lines = [line for line in caplog.messages if DEAD in line]
    assert len(lines) == 1
    assert "not present: the router said HTTP 400: Timeout" in lines[0]


async def test_what_breaks_in_a_job_ends_the_driver(fake: FakeRouter, urls: list[str]) -> None:
    class Broken(VllmRouter):
        async def ensure_present(self, url: str, timeout_s: float) -> Ensured:
            raise AssertionError("a bug")

    async with AdminHttp(None, 1.0) as http:
        driver = RouterDriver(Broken(http, fake.url), add_timeout_s=5.0, on_listed=lambda _: None)
        driver.want(urls)
        with pytest.raises(AssertionError, match="a bug"):
            async with asyncio.timeout(10.0):
                await driver.run()


async def test_without_a_router_sessions_spread_over_who_serves() -> None:
    routing = DirectRouting()
    assert routing.url_for("s") is None
    routing.want(["http://a:1", "http://b:1"])
    sessions = [f"run-r{number}-1" for number in range(64)]
    picked = {session: routing.url_for(session) for session in sessions}
    assert set(picked.values()) == {"http://a:1", "http://b:1"}
    assert {session: routing.url_for(session) for session in sessions} == picked
    routing.want(["http://b:1"])
    assert {routing.url_for(session) for session in sessions} == {"http://b:1"}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await routing.run()


@pytest.mark.parametrize(("name", "kind"), [("vllm", VllmRouter), ("vllm_pd", VllmPdRouter)])
async def test_the_config_names_the_router(name: str, kind: type) -> None:
    http = AdminHttp(None, 1.0)
    routing = make_routing(ClientConfig(router=name), http, lambda _: None)
    assert isinstance(routing, RouterDriver)
    assert type(routing._router) is kind
    direct = make_routing(ClientConfig(router="none"), http, lambda _: None)
    assert isinstance(direct, DirectRouting)
