"""The router driver against a small router that behaves like vllm-router, and worse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.drivers import router as router_module
from orchestrator.drivers.router import RouterDriver
from orchestrator.plane.events import MembersListed

A, B, C = "http://a", "http://b", "http://c"


class FakeRouter:
    """`blocked` adds hang until the caller leaves; `late` ones get in even then."""

    def __init__(self) -> None:
        self.workers: list[str] = []
        self.blocked: set[str] = set()
        self.is_down = False
        self.keeps = 0  # removals that say 200 and do nothing
        self.adds: list[str] = []
        self.listing: object = None
        self.app = Starlette(
            routes=[
                Route("/list_workers", self._list),
                Route("/add_worker", self._add, methods=["POST"]),
                Route("/remove_worker", self._remove, methods=["POST"]),
            ]
        )

    async def _list(self, _: Request) -> Response:
        if self.is_down:
            return Response(status_code=502)
        return JSONResponse(self.listing or {"urls": self.workers})

    async def _add(self, request: Request) -> Response:
        url = request.query_params["url"]
        self.adds.append(url)
        if url in self.blocked:
            await asyncio.Event().wait()
        if url in self.workers:
            return Response("worker is known", status_code=400)
        self.workers.append(url)
        return Response("added")

    async def _remove(self, request: Request) -> Response:
        url = request.query_params["url"]
        if self.keeps:
            self.keeps -= 1
        elif url in self.workers:
            self.workers.remove(url)
        return Response("removed")


class Bench:
    """A driver at work on a fake router."""

    def __init__(self, fake: FakeRouter) -> None:
        self.fake = fake
        self.heard: list[MembersListed] = []
        self._news = asyncio.Event()
        self.driver = RouterDriver(
            "http://router",
            add_timeout_s=5.0,
            on_listed=self._listed,
            transport=httpx.ASGITransport(fake.app),
        )

    def _listed(self, event: MembersListed) -> None:
        self.heard.append(event)
        self._news.set()

    async def until(self, holds: Callable[[MembersListed], bool]) -> None:
        """Wait for a listing that is as it should be."""
        async with asyncio.timeout(5.0):
            while not (self.heard and holds(self.heard[-1])):
                self._news.clear()
                await self._news.wait()

    async def until_listed(self, *urls: str) -> None:
        await self.until(lambda event: event.urls == urls)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "_INTERVAL_S", 0.02)
    monkeypatch.setattr(router_module, "_BUSY_INTERVAL_S", 0.005)


@contextlib.asynccontextmanager
async def at_work(fake: FakeRouter) -> AsyncIterator[Bench]:
    bench = Bench(fake)
    task = asyncio.create_task(bench.driver.run())
    try:
        yield bench
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_adds_and_removes_what_differs() -> None:
    fake = FakeRouter()
    fake.workers = [C]
    async with at_work(fake) as bench:
        await bench.until_listed()
        bench.driver.want([B, A])
        await bench.until_listed(A, B)
        bench.driver.want([B])
        await bench.until_listed(B)
        assert sorted(fake.adds) == [A, B]


async def test_only_news_is_told() -> None:
    fake = FakeRouter()
    async with at_work(fake) as bench:
        bench.driver.want([A])
        await bench.until_listed(A)
        fake.is_down = True
        await bench.until(lambda event: event.urls is None)
        assert "502" in bench.heard[-1].error
        fake.is_down = False
        await bench.until_listed(A)
    assert [event.urls for event in bench.heard] == [(), (A,), None, (A,)]


async def test_a_blocked_add_delays_neither_others_nor_removals() -> None:
    fake = FakeRouter()
    fake.workers, fake.blocked = [C], {A}
    async with at_work(fake) as bench:
        bench.driver.want([A, B, C])
        await bench.until_listed(B, C)
        bench.driver.want([A, B])
        await bench.until_listed(B)
        assert fake.adds.count(A) == 1


async def test_an_add_that_is_not_wanted_any_more_is_dropped_and_may_come_again() -> None:
    fake = FakeRouter()
    fake.blocked = {A}
    async with at_work(fake) as bench:
        bench.driver.want([A, B])
        await bench.until_listed(B)
        bench.driver.want([])
        await bench.until_listed()
        fake.blocked = set()
        bench.driver.want([A])
        await bench.until_listed(A)


async def test_only_the_listing_is_believed() -> None:
    fake = FakeRouter()
    fake.workers, fake.keeps = [A], 3
    async with at_work(fake) as bench:
        bench.driver.want([B])
        await bench.until_listed(B)
        assert fake.keeps == 0


async def test_a_router_that_forgot_everything_is_put_right() -> None:
    fake = FakeRouter()
    async with at_work(fake) as bench:
        bench.driver.want([A, B])
        await bench.until_listed(A, B)
        fake.workers.clear()
        await bench.until_listed()
        await bench.until_listed(A, B)


@pytest.mark.parametrize("listing", [["x"], {"workers": []}, {"urls": "x"}, {"urls": [1]}])
async def test_a_listing_of_another_shape_is_no_listing(listing: object) -> None:
    fake = FakeRouter()
    fake.listing = listing
    async with at_work(fake) as bench:
        await bench.until(lambda event: event.urls is None)
    assert "unknown answer of /list_workers" in bench.heard[-1].error


async def test_a_lost_request_is_no_end() -> None:
    fake = FakeRouter()

    class Flaky(httpx.ASGITransport):
        num_lost = 2

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/add_worker" and self.num_lost:
                self.num_lost -= 1
                raise httpx.ReadError("reset")
            return await super().handle_async_request(request)

    bench = Bench(fake)
    bench.driver = RouterDriver(
        "http://router", add_timeout_s=5.0, on_listed=bench._listed, transport=Flaky(fake.app)
    )
    task = asyncio.create_task(bench.driver.run())
    bench.driver.want([A])
    await bench.until_listed(A)
    task.cancel()
    await asyncio.wait([task])
