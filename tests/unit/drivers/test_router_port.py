"""Each way in which `ensure_present` and `ensure_absent` end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from engine.fake_fleet import FakeFleet, slots_of_sizes
from orchestrator.drivers import router_port
from orchestrator.drivers.admin_http import AdminHttp
from orchestrator.drivers.router_port import Ensured, RouterSilent, VllmPdRouter, VllmRouter
from tests.fakes.router import FakeRouter
from tests.helpers.polling import until

SUCCEEDED = Ensured("succeeded")
SHORT_S = 0.1
LONG_S = 10.0
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_port, "_POLL_S", 0.005)


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with FakeFleet(slots_of_sizes([1, 1])) as started:
        yield started


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeRouter]:
    async with FakeRouter(startup_timeout_s=0.05, health_interval_s=0.01).serve() as router:
        yield router


@pytest_asyncio.fixture
async def http() -> AsyncIterator[AdminHttp]:
    async with AdminHttp(None, 1.0) as client:
        yield client


@pytest.fixture
def router(fake: FakeRouter, http: AdminHttp) -> VllmRouter:
    return VllmRouter(http, fake.url)


class Held(AdminHttp):
    """Answers when the test says so."""

    def __init__(self) -> None:
        super().__init__(None, 1.0)
        self.answers: list[asyncio.Future[bytes]] = []

    async def call(
        self, method: str, url: str, body: dict[str, Any] | None = None, *, timeout_s: float
    ) -> bytes:
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def url(fleet: FakeFleet) -> str:
    return fleet.urls[fleet.slots[0]]


async def test_a_late_add_is_waited_for(fake: FakeRouter, router: VllmRouter, url: str) -> None:
    fake.knobs.late_s = 0.05
    assert await router.ensure_present(url, LONG_S) == SUCCEEDED
    assert (fake.workers, fake.adds) == ([url], [url])


async def test_a_second_add_is_no_failure(fake: FakeRouter, router: VllmRouter, url: str) -> None:
    both = await asyncio.gather(*(router.ensure_present(url, LONG_S) for _ in range(2)))
    assert both == [SUCCEEDED, SUCCEEDED]
    assert fake.workers == [url]


async def test_a_refused_add_has_failed_with_the_routers_text(router: VllmRouter) -> None:
    ended = await router.ensure_present(NOWHERE, LONG_S)
    assert ended.outcome == "failed"
    assert f"the router said HTTP 400: Timeout 0.05s waiting for worker {NOWHERE}" in ended.detail


async def test_an_add_that_blocks_or_is_forgotten_is_unknown(
    fake: FakeRouter, router: VllmRouter, url: str
) -> None:
    fake.knobs.blocks = {url}
    ended = await router.ensure_present(url, SHORT_S)
    assert ended.outcome == "unknown"
    assert "no answer" in ended.detail
    fake.knobs.blocks, fake.knobs.forgets_adds = set(), 1
    ended = await router.ensure_present(url, SHORT_S)
    assert ended.outcome == "unknown"
    assert "the router said Successfully added worker" in ended.detail
    fake.release()
    assert await router.ensure_present(url, LONG_S) == SUCCEEDED


async def test_a_router_that_lies_on_removal_is_asked_until_it_is_true(
    fake: FakeRouter, router: VllmRouter, url: str
) -> None:
    fake.workers, fake.knobs.lies = [url, url], 2
    assert await router.ensure_absent(url, LONG_S) == SUCCEEDED
    assert len(fake.removals) == 4
    fake.workers, fake.knobs.lies = [url], 10**6
    ended = await router.ensure_absent(url, SHORT_S)
    assert ended.outcome == "failed"
    assert ended.detail.startswith("still listed; the router said Successfully removed")


async def test_a_hung_listing_never_holds_a_caller_past_its_time(
    fake: FakeRouter, router: VllmRouter, url: str
) -> None:
    fake.knobs.hangs = True
    began = time.monotonic()
    ended = await asyncio.gather(
        *(router.ensure_absent(url, SHORT_S) for _ in range(20)),
        *(router.ensure_present(url, SHORT_S) for _ in range(20)),
    )
    assert {one.outcome for one in ended} == {"unknown"}
    assert time.monotonic() - began < router_port._LIST_TIMEOUT_S  # one after the other: 4 s


async def test_a_hung_listing_is_a_silent_router(
    fake: FakeRouter, router: VllmRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_port, "_LIST_TIMEOUT_S", 0.05)
    fake.knobs.hangs = True
    looks = await asyncio.gather(*(router.listed() for _ in range(8)), return_exceptions=True)
    assert [type(look) for look in looks] == [RouterSilent] * 8
    fake.knobs.hangs = False
    assert await router.listed() == frozenset()


async def test_a_dead_router_is_unknown(fake: FakeRouter, router: VllmRouter, url: str) -> None:
    fake.kill()
    ended = await router.ensure_present(url, LONG_S)
    assert ended.outcome == "unknown"
    assert "ClientConnectorError" in ended.detail
    assert (await router.ensure_absent(url, SHORT_S)).outcome == "unknown"
    with pytest.raises(RouterSilent, match="ClientConnectorError"):
        await router.listed()


@pytest.mark.parametrize("listing", [["x"], {"workers": []}, {"urls": "x"}, {"urls": [1]}])
async def test_a_listing_of_another_shape_is_no_listing(
    fake: FakeRouter, router: VllmRouter, listing: object
) -> None:
    fake.knobs.listing = listing
    with pytest.raises(RouterSilent, match="unknown listing"):
        await router.listed()


async def test_looks_at_the_same_time_share_an_answer_that_is_not_older(
    held: Held,
) -> None:
    """A look that began before the call is not good enough; all that wait share the next."""
    answers = held.answers
    router = VllmRouter(held, "http://router")
    first = asyncio.create_task(router.listed())
    await until(lambda: len(answers) == 1)
    others = [asyncio.create_task(router.listed()) for _ in range(5)]
    await asyncio.sleep(0)
    answers[0].set_result(b'{"urls": ["old"]}')
    assert await first == {"old"}
    await until(lambda: len(answers) == 2)
    answers[1].set_result(b'{"urls": ["new"]}')
    assert await asyncio.gather(*others) == [frozenset({"new"})] * 5
    assert len(answers) == 2


async def test_a_look_that_is_cut_off_leaves_no_answer_behind(held: Held) -> None:
    answers = held.answers
    router = VllmRouter(held, "http://router")
    first = asyncio.create_task(router.listed())
    await until(lambda: len(answers) == 1)
    second = asyncio.create_task(router.listed())
    await asyncio.sleep(0)
    first.cancel()
    await until(lambda: len(answers) == 2)
    answers[1].set_result(b'{"urls": ["new"]}')
    assert await second == {"new"}


async def test_with_roles_who_is_no_member_is_told_at_once(
    fleet: FakeFleet, http: AdminHttp
) -> None:
    a, b = (fleet.urls[slot] for slot in fleet.slots)
    mode = FakeRouter("pd", prefill=[a], decode=[f"{b}/"], health_interval_s=0.01)
    async with mode.serve() as fake:
        router = VllmPdRouter(http, fake.url)
        assert await router.ensure_present(NOWHERE, LONG_S) == Ensured(
            "failed", "no member: the router was started without it"
        )
        assert await router.ensure_absent(NOWHERE, LONG_S) == SUCCEEDED
        assert await router.ensure_absent(b, LONG_S) == SUCCEEDED  # its gate is closed
        ended = await router.ensure_present(b, SHORT_S)
        assert ended == Ensured("failed", "its check of /ready has not seen it yet")
        fake.knobs.hangs = True
        assert (await router.ensure_present(b, SHORT_S)).outcome == "unknown"
        fake.kill()
        assert (await router.ensure_present(b, SHORT_S)).outcome == "unknown"


@pytest.mark.parametrize("listing", [["x"], {"urls": []}, {"workers": [1]}, {"workers": [{}]}])
async def test_with_roles_a_listing_of_another_shape_is_no_listing(
    http: AdminHttp, listing: object
) -> None:
    async with FakeRouter("pd").serve() as fake:
        fake.knobs.listing = listing
        router = VllmPdRouter(http, fake.url)
        with pytest.raises(RouterSilent, match="unknown listing"):
            await router.listed()
