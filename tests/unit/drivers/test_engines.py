"""The engine driver against fake engines: each command, each way to fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from engine.fake_faults import FaultRule
from engine.fake_fleet import FakeFleet
from engine.fake_server import AppServer
from orchestrator.drivers.admin_http import AdminHttp, NoAnswer, Refused
from orchestrator.drivers.engines import EngineDriver
from orchestrator.plane.commands import (
    AbortGeneration,
    Admit,
    Commit,
    Fence,
    Join,
    Pause,
    ReadVersion,
    Resume,
    Stage,
)
from orchestrator.plane.events import OpResult
from protocol.ids import Slot

SLOT = Slot(1, 0)
TIMEOUT_S = 5.0


@dataclass(slots=True)
class Bench:
    """One fake engine and a driver for it."""

    fleet: FakeFleet
    driver: EngineDriver
    num_ops: int = 0
    urls: dict[Slot, str] = field(default_factory=dict)

    @property
    def engine(self) -> Any:
        return self.fleet.engines[SLOT]

    def op(self, timeout_s: float = TIMEOUT_S) -> tuple[int, float, str]:
        self.num_ops += 1
        return self.num_ops, time.monotonic() + timeout_s, "test"

    async def join(self, generation: int = 1, timeout_s: float = TIMEOUT_S) -> OpResult:
        op = Join(*self.op(timeout_s), SLOT, generation, "127.0.0.1", 9, 1, 2)
        return await self.driver.run(op)

    async def load(self, version: int, generation: int = 1) -> None:
        await self.join(generation)
        await self.driver.run(Stage(*self.op(), SLOT, generation, version))
        await self.driver.run(Commit(*self.op(), SLOT, generation, version))

    def spoil(self, at: str, action: Any, **rule: Any) -> None:
        self.engine.plan.add(FaultRule(at=at, action=action, **rule))


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    async with FakeFleet([SLOT]) as fleet, AdminHttp("secret", connect_timeout_s=1.0) as http:
        urls = fleet.urls
        yield Bench(fleet, EngineDriver(http, urls.__getitem__, time.monotonic, lease_s=30.0))


async def test_a_whole_update(bench: Bench) -> None:
    assert await bench.join() == OpResult()
    staged = await bench.driver.run(Stage(*bench.op(), SLOT, 1, 4))
    assert staged.digest
    await bench.driver.run(Pause(*bench.op(), SLOT))
    assert bench.engine.core.paused
    await bench.driver.run(Commit(*bench.op(), SLOT, 1, 4))
    said = await bench.driver.run(ReadVersion(*bench.op(), SLOT))
    boot_id = bench.engine.identity().boot_id
    assert (said.version, said.boot_id) == (4, boot_id)
    await bench.driver.run(Admit(*bench.op(), SLOT, boot_id, 4))
    assert bench.engine.identity().admission == "open"
    await bench.driver.run(Resume(*bench.op(), SLOT))
    assert not bench.engine.core.paused
    await bench.driver.run(Fence(*bench.op(), SLOT))
    assert bench.engine.identity().admission == "closed"
    await bench.driver.run(AbortGeneration(*bench.op(), SLOT, 1))


async def test_refusals_carry_the_engines_words(bench: Bench) -> None:
    await bench.load(3)
    with pytest.raises(Refused, match="409") as refused:
        await bench.driver.run(Admit(*bench.op(), SLOT, "another boot", 3))
    assert refused.value.status == 409
    with pytest.raises(Refused, match="409"):
        await bench.join(generation=1)
    with pytest.raises(Refused, match="409"):
        await bench.driver.run(Stage(*bench.op(), SLOT, 7, 4))
    with pytest.raises(Refused, match="409"):
        await bench.driver.run(Commit(*bench.op(), SLOT, 1, 9))


@pytest.mark.parametrize(("phase", "text"), [("join", "transfer is failed: .*injected")])
async def test_a_transfer_that_fails_inside(bench: Bench, phase: str, text: str) -> None:
    bench.spoil(phase, "error")
    with pytest.raises(Refused, match=text):
        await bench.join()


async def test_a_staging_that_fails_inside(bench: Bench) -> None:
    await bench.join()
    bench.spoil("stage", "error")
    with pytest.raises(Refused, match="transfer is failed"):
        await bench.driver.run(Stage(*bench.op(), SLOT, 1, 4))


async def test_a_healthy_engine_says_itself_that_it_is_late(bench: Bench) -> None:
    bench.spoil("join", "hang")
    with pytest.raises(Refused, match=r"transfer is (joining|failed)"):
        await bench.join(timeout_s=0.5)


async def test_a_hanging_engine_is_unknown_at_the_deadline(bench: Bench) -> None:
    bench.spoil("/pause", "hang")
    with pytest.raises(NoAnswer, match="no answer within"):
        await bench.driver.run(Pause(*bench.op(0.3), SLOT))


async def test_a_lost_answer_is_unknown(bench: Bench) -> None:
    bench.spoil("/pause", "drop_reply")
    with pytest.raises(NoAnswer):
        await bench.driver.run(Pause(*bench.op(), SLOT))
    assert bench.engine.core.paused


async def test_a_dead_engine_is_unknown(bench: Bench) -> None:
    bench.fleet.kill(SLOT)
    with pytest.raises(NoAnswer, match=r"POST .*/resume"):
        await bench.driver.run(Resume(*bench.op(), SLOT))


async def test_nothing_is_sent_after_the_deadline(bench: Bench) -> None:
    with pytest.raises(NoAnswer, match="no time left"):
        await bench.driver.run(Pause(*bench.op(-1.0), SLOT))
    assert not bench.engine.core.paused


async def test_probe(bench: Bench) -> None:
    identity = await bench.driver.probe(bench.fleet.urls[SLOT], TIMEOUT_S)
    assert (identity.group, identity.index) == (1, 0)


async def test_the_wrong_token_is_refused(bench: Bench) -> None:
    async with AdminHttp("wrong", connect_timeout_s=1.0) as http:
        driver = EngineDriver(http, bench.fleet.urls.__getitem__, time.monotonic, lease_s=1.0)
        with pytest.raises(Refused, match="401"):
            await driver.run(Pause(*bench.op(), SLOT))


async def test_a_lease_is_renewed_only_while_wanted(bench: Bench) -> None:
    await bench.load(2)
    lease: dict[str, Any] = {
        "boot_id": bench.engine.identity().boot_id,
        "version": 2,
        "timeout_s": TIMEOUT_S,
    }
    await bench.driver.renew_lease(SLOT, is_wanted=lambda: False, **lease)
    assert bench.engine.identity().admission == "closed"
    await bench.driver.renew_lease(SLOT, is_wanted=lambda: True, **lease)
    assert bench.engine.identity().admission == "open"


async def test_a_fence_is_never_undone_by_a_renewal_on_its_way(bench: Bench) -> None:
    await bench.load(2)
    bench.spoil("/admit", "slow", delay_s=0.2)
    is_routed = True
    renewal = asyncio.create_task(
        bench.driver.renew_lease(
            SLOT,
            boot_id=bench.engine.identity().boot_id,
            version=2,
            timeout_s=TIMEOUT_S,
            is_wanted=lambda: is_routed,
        )
    )
    await asyncio.sleep(0)  # the renewal has the gate
    is_routed = False
    await bench.driver.run(Fence(*bench.op(), SLOT))
    await renewal
    assert bench.engine.identity().admission == "closed"


# -- answers that break the contract


async def _odd(answers: dict[str, Response]) -> tuple[AppServer, str]:
    async def answer(request: Request) -> Response:
        return answers[request.url.path]

    server = AppServer(Starlette(routes=[Route("/{rest:path}", answer, methods=["GET", "POST"])]))
    await server.start("127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.port}"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (JSONResponse({"version": "four"}), "answer is no WeightVersion"),
        (PlainTextResponse("<html>", 200), "answer is no WeightVersion"),
        (JSONResponse({"error": "core is dead"}, 500), "HTTP 500: core is dead"),
        (JSONResponse({"detail": "Not Found"}, 404), "HTTP 404: Not Found"),
        (JSONResponse(["odd"], 500), r'HTTP 500: \["odd"\]'),
        (PlainTextResponse("x" * 5000, 502), "HTTP 502: x{800}$"),
        (Response(status_code=307, headers={"location": "/"}), "HTTP 307"),
    ],
)
async def test_odd_answers_are_refusals(answer: Response, error: str) -> None:
    server, url = await _odd({"/weight_version": answer})
    try:
        async with AdminHttp("secret", connect_timeout_s=1.0) as http:
            driver = EngineDriver(http, lambda _: url, time.monotonic, lease_s=1.0)
            with pytest.raises(Refused, match=error):
                await driver.run(ReadVersion(1, time.monotonic() + TIMEOUT_S, "", SLOT))
    finally:
        server.kill()


async def test_another_version_than_the_one_asked_for_was_staged() -> None:
    status = {"generation": 1, "state": "staged", "staged_version": 3}
    server, url = await _odd({"/update_weights": JSONResponse(status)})
    try:
        async with AdminHttp("secret", connect_timeout_s=1.0) as http:
            driver = EngineDriver(http, lambda _: url, time.monotonic, lease_s=1.0)
            with pytest.raises(Refused, match="staged version 3, not 4"):
                await driver.run(Stage(1, time.monotonic() + TIMEOUT_S, "", SLOT, 1, 4))
    finally:
        server.kill()
