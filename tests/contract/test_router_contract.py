"""What the admin plane relies on in a router, held against the fake and the real vllm-router.

Four routers: each in regular mode and with prefill and decode roles. Engines are fakes in the
test's own loop; `world.open` and `world.close` move their gates, which is all that a router with
roles goes by. Deadlines are generous: the real one asks `/ready` once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx
import pytest
import pytest_asyncio

from engine.fake_fleet import FakeFleet, slots_of_sizes
from orchestrator.drivers.admin_http import AdminHttp
from orchestrator.drivers.router import RouterDriver
from orchestrator.drivers.router_port import Ensured, Router, VllmPdRouter, VllmRouter
from orchestrator.plane.events import MembersListed
from protocol.engine_api import AdmitRequest
from tests.fakes.processes import free_port, router_process
from tests.fakes.router import FakeRouter
from tests.helpers.polling import DEADLINE_S, until

Kind = Literal["regular", "pd"]
DEAD = "http://127.0.0.1:9"
SUCCEEDED = Ensured("succeeded")


@dataclass
class World:
    """Four engines (two to prefill, two to decode), a router, and the port to it."""

    kind: Kind
    fleet: FakeFleet
    http: AdminHttp
    url: str
    port: Router
    restart: Callable[[], contextlib.AbstractAsyncContextManager[None]]
    heard: list[MembersListed] = field(default_factory=list)

    @property
    def urls(self) -> list[str]:
        """All engines."""
        return [self.fleet.urls[slot] for slot in self.fleet.slots]

    def open(self, *numbers: int) -> None:
        """Admit these engines at version 0."""
        for number in numbers:
            keeper = self.fleet.engines[self.fleet.slots[number]].keeper
            keeper.hold(0)
            keeper.admit(AdmitRequest(boot_id=keeper.boot_id, version=0, lease_s=600.0))

    def close(self, number: int) -> None:
        """Fence this engine."""
        self.fleet.engines[self.fleet.slots[number]].keeper.fence("evicted")

    async def until_listed(self, *urls: str) -> None:
        """Wait until the router lists these and no others."""

        async def is_so() -> bool:
            return await self.port.listed() == set(urls)

        await until(is_so)

    @contextlib.asynccontextmanager
    async def driven(self) -> AsyncIterator[RouterDriver]:
        """The reconcile loop at work; `heard` is what it tells the plane."""
        kind = VllmPdRouter if self.kind == "pd" else VllmRouter
        router = kind(self.http, self.url)
        driver = RouterDriver(router, add_timeout_s=DEADLINE_S, on_listed=self.heard.append)
        task = asyncio.create_task(driver.run())
        try:
            yield driver
        finally:
            task.cancel()
            await asyncio.wait([task])


@contextlib.asynccontextmanager
async def fake_world(kind: Kind, fleet: FakeFleet, http: AdminHttp) -> AsyncIterator[World]:
    urls = [fleet.urls[slot] for slot in fleet.slots]
    prefill, decode = (urls[:2], urls[2:]) if kind == "pd" else ([], [])
    fake = FakeRouter(kind, prefill=prefill, decode=decode, startup_timeout_s=0.5)

    @contextlib.asynccontextmanager
    async def restart() -> AsyncIterator[None]:
        fake.kill()
        yield
        await fake.restart()

    async with fake.serve():
        port = VllmPdRouter(http, fake.url) if kind == "pd" else VllmRouter(http, fake.url)
        yield World(kind, fleet, http, fake.url, port, restart)


@contextlib.asynccontextmanager
async def real_world(
    kind: Kind, fleet: FakeFleet, http: AdminHttp, log_dir: Path
) -> AsyncIterator[World]:
    urls = [fleet.urls[slot] for slot in fleet.slots]
    args = ["--vllm-pd-disaggregation"] if kind == "pd" else []
    if kind == "pd":
        args += [part for url in urls[:2] for part in ("--prefill", url)]
        args += [part for url in urls[2:] for part in ("--decode", url)]
    number = free_port()
    stack = contextlib.ExitStack()

    async def start() -> str:
        process = router_process(log_dir=log_dir, port=number, args=args)
        return (await asyncio.to_thread(stack.enter_context, process)).url

    @contextlib.asynccontextmanager
    async def restart() -> AsyncIterator[None]:
        await asyncio.to_thread(stack.close)
        yield
        await start()

    url = await start()
    port = VllmPdRouter(http, url) if kind == "pd" else VllmRouter(http, url)
    try:
        yield World(kind, fleet, http, url, port, restart)
    finally:
        await asyncio.to_thread(stack.close)


@pytest_asyncio.fixture(params=["fake", "real"])
async def build(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[object]:
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(FakeFleet(slots_of_sizes([1, 1, 1, 1])))
        http = await stack.enter_async_context(AdminHttp(None, 2.0))

        async def start(kind: Kind) -> World:
            if request.param == "fake":
                return await stack.enter_async_context(fake_world(kind, fleet, http))
            return await stack.enter_async_context(real_world(kind, fleet, http, tmp_path))

        yield start


@pytest_asyncio.fixture(params=["regular", "pd"])
async def world(request: pytest.FixtureRequest, build: Callable[..., object]) -> World:
    """Either mode."""
    return await build(request.param)  # type: ignore[misc, no-any-return]


@pytest_asyncio.fixture
async def regular(build: Callable[..., object]) -> World:
    return await build("regular")  # type: ignore[misc, no-any-return]


@pytest_asyncio.fixture
async def pd(build: Callable[..., object]) -> World:
    return await build("pd")  # type: ignore[misc, no-any-return]


@pytest_asyncio.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client:
        yield client


# -- both modes


async def test_an_engine_is_put_in_and_taken_out_and_either_may_be_asked_twice(
    world: World,
) -> None:
    world.open(0, 1, 2, 3)
    for url in world.urls:
        assert await world.port.ensure_present(url, DEADLINE_S) == SUCCEEDED
        assert await world.port.ensure_present(url, DEADLINE_S) == SUCCEEDED
    assert await world.port.listed() == set(world.urls)
    world.close(3)
    for _ in range(2):
        assert await world.port.ensure_absent(world.urls[3], DEADLINE_S) == SUCCEEDED
    assert await world.port.listed() == set(world.urls[:3])
    world.open(3)
    assert await world.port.ensure_present(world.urls[3], DEADLINE_S) == SUCCEEDED
    assert await world.port.listed() == set(world.urls)


async def test_one_that_was_never_there_is_absent(world: World) -> None:
    assert await world.port.ensure_absent(DEAD, DEADLINE_S) == SUCCEEDED


async def test_a_dead_engine_is_not_put_in_and_holds_up_nobody(world: World) -> None:
    world.open(0, 1)
    world.fleet.kill(world.fleet.slots[2])
    # With roles it is a member from the start; the router has to notice.
    assert await world.port.ensure_absent(world.urls[2], DEADLINE_S) == SUCCEEDED
    async with asyncio.timeout(DEADLINE_S):
        dead = asyncio.create_task(world.port.ensure_present(world.urls[2], 3.0))
        for number in (0, 1):
            ended = await world.port.ensure_present(world.urls[number], DEADLINE_S)
            assert ended == SUCCEEDED
        assert (await dead).outcome != "succeeded"
    assert world.urls[2] not in await world.port.listed()


async def test_after_a_restart_the_loop_puts_it_right_without_who_was_evicted(
    world: World,
) -> None:
    world.open(0, 1, 2, 3)
    wish = world.urls[:3]
    async with world.driven() as driver:
        driver.want(world.urls)
        await world.until_listed(*world.urls)
        world.close(3)
        driver.want(wish)
        await world.until_listed(*wish)
        async with world.restart():
            await until(lambda: world.heard[-1].urls is None)
        num_before = len(world.heard)
        await world.until_listed(*wish)
        await until(lambda: world.heard[-1].urls == tuple(sorted(wish)))
        if world.kind == "regular":  # with roles it is listed until its gate was asked
            since = world.heard[num_before:]
            assert all(world.urls[3] not in (event.urls or ()) for event in since)
        world.open(3)
        driver.want(world.urls)
        await world.until_listed(*world.urls)


# -- regular mode


async def test_the_api_of_regular_mode(regular: World, http: httpx.AsyncClient) -> None:
    """The answers are not believed; this is what they are."""
    url = regular.urls[0]
    answer = await http.post(f"{regular.url}/add_worker", params={"url": url})
    assert answer.status_code == 200  # whose gate is closed: `/health` is asked, not `/ready`
    answer = await http.post(f"{regular.url}/add_worker", params={"url": url})
    assert answer.status_code == 400
    assert "already exists" in answer.text
    answer = await http.get(f"{regular.url}/list_workers")
    assert answer.json() == {"urls": [url]}
    for _ in range(2):
        answer = await http.post(f"{regular.url}/remove_worker", params={"url": url})
        assert answer.status_code == 200
    answer = await http.get(f"{regular.url}/list_workers")
    assert answer.json() == {"urls": []}


async def test_a_refused_add_says_why(regular: World) -> None:
    ended = await regular.port.ensure_present(DEAD, DEADLINE_S)
    assert ended.outcome == "failed"
    assert "HTTP 400: Timeout" in ended.detail


async def test_another_spelling_is_another_member_and_is_taken_out(
    regular: World, http: httpx.AsyncClient
) -> None:
    url = regular.urls[0]
    other = url.replace("http://", "HTTP://")
    for spelling in (url, other):
        await http.post(f"{regular.url}/add_worker", params={"url": spelling})
    assert await regular.port.listed() == {url, other}
    async with regular.driven() as driver:
        driver.want([url])
        await regular.until_listed(url)


# -- prefill and decode roles


async def test_the_api_with_roles(pd: World, http: httpx.AsyncClient) -> None:
    """Why nothing is ever removed there: it could not be put back."""
    answer = await http.get(f"{pd.url}/list_workers")
    assert sorted(answer.json()["urls"]) == sorted(pd.urls)
    workers = (await http.get(f"{pd.url}/workers")).json()["workers"]
    roles = {worker["url"]: worker["worker_type"] for worker in workers}
    assert [roles[url] for url in pd.urls] == ["prefill", "prefill", "decode", "decode"]
    for url in (pd.urls[3], DEAD):
        answer = await http.post(f"{pd.url}/add_worker", params={"url": url})
        assert answer.status_code == 400
    answer = await http.post(f"{pd.url}/remove_worker", params={"url": pd.urls[3]})
    assert answer.status_code == 200
    answer = await http.post(f"{pd.url}/add_worker", params={"url": pd.urls[3]})
    assert answer.status_code == 400
    assert "add_decode_server" in answer.text
    answer = await http.get(f"{pd.url}/list_workers")
    assert sorted(answer.json()["urls"]) == sorted(pd.urls[:3])


async def test_with_roles_an_engine_that_died_returns_without_a_restart(pd: World) -> None:
    pd.open(0, 1, 2, 3)
    async with pd.driven() as driver:
        driver.want(pd.urls)
        await pd.until_listed(*pd.urls)
        pd.fleet.kill(pd.fleet.slots[3])
        driver.want(pd.urls[:3])
        await pd.until_listed(*pd.urls[:3])
        await pd.fleet.relaunch(pd.fleet.slots[3])  # closed, at the same address
        assert await pd.port.ensure_absent(pd.urls[3], DEADLINE_S) == SUCCEEDED
        pd.open(3)
        driver.want(pd.urls)
        await pd.until_listed(*pd.urls)


async def test_with_roles_one_that_the_router_was_not_started_with_is_told(pd: World) -> None:
    ended = await pd.port.ensure_present(DEAD, DEADLINE_S)
    assert ended == Ensured("failed", "no member: the router was started without it")
