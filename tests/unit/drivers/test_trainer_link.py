"""The trainer link over a transport in memory: commands, batches, the watch."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from orchestrator.drivers.admin_http import NoAnswer, Refused
from orchestrator.drivers.trainer import TrainerLink
from orchestrator.plane.commands import AbortGeneration, Finish, Join, Open, Send
from orchestrator.plane.events import BroadcastReady
from protocol.records import TrainBatch, decode_batch
from protocol.trainer_api import StepMetrics

Answer = httpx.Response | Exception | Callable[[httpx.Request], Any]
BATCH = TrainBatch(run_id="run", step=3, samples=[])


class Trainer(httpx.AsyncBaseTransport):
    """Gives its answers one after the other, the last one for ever; remembers the questions."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.bodies: list[bytes] = []
        self.asked = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self.bodies.append(await request.aread())
        self.asked.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer = await answer(request)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, httpx.Response)
        return httpx.Response(answer.status_code, content=answer.content)


async def never(_: httpx.Request) -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError


def ok(body: Any = None, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json={} if body is None else body)


def status_body(seq: int, **changes: Any) -> dict[str, Any]:
    return {
        "run_id": "run",
        "trainer_boot": "t1",
        "seq": seq,
        "state": "publishing",
        "next_step": 0,
        "published_version": 0,
        "finished_version": None,
        "generation": 0,
        "num_bytes": 10,
        "recent_steps": [],
        **changes,
    }


def link(trainer: Trainer, heard: list[Any] | None = None) -> TrainerLink:
    sink: list[Any] = [] if heard is None else heard
    return TrainerLink(
        "http://trainer",
        "secret",
        time.monotonic,
        on_ready=sink.append,
        on_step=sink.append,
        transport=trainer,
    )


def op(timeout_s: float = 5.0) -> tuple[int, float, str]:
    return 1, time.monotonic() + timeout_s, "test"


async def test_commands_and_results() -> None:
    sent = {"num_bytes": 8, "num_buckets": 1, "duration_s": 0.1, "digest": "d"}
    trainer = Trainer(ok({"host": "h", "port": 7}), ok(), ok(sent), ok(), ok())
    async with link(trainer) as out:
        opened = await out.run(Open(*op(), 2, 5, 40.0))
        assert (opened.host, opened.port) == ("h", 7)
        await out.run(Join(*op(), None, 2, "h", 7, 0, 5))
        result = await out.run(Send(*op(), 2, 4))
        assert (result.num_bytes, result.digest) == (8, "d")
        await out.run(AbortGeneration(*op(), None, 2))
        await out.run(Finish(*op(), 4, ("g0e0",)))
    paths = [request.url.path for request in trainer.requests]
    assert paths == [
        "/transfer/open", "/transfer/join", "/transfer/send", "/transfer/abort", "/finish",
    ]  # fmt: skip
    bodies = [json.loads(body) for body in trainer.bodies]
    assert bodies[0] == {"generation": 2, "world_size": 5, "timeout_s": 40.0}
    assert bodies[1]["timeout_s"] == pytest.approx(4.5, abs=0.2)
    assert bodies[3] == {"generation": 2, "reason": "test"}
    assert bodies[4] == {"version": 4, "members": ["g0e0"]}
    assert {r.headers["authorization"] for r in trainer.requests} == {"Bearer secret"}


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (ok({"error": "generation 2 is not above 3"}, 409), Refused, "HTTP 409: generation 2"),
        (ok(["x"], 500), Refused, r"HTTP 500: \['x'\]"),
        (httpx.Response(500, text="boom"), Refused, "HTTP 500: boom"),
        (ok({"odd": 1}), Refused, "answer is no OpenReply"),
        (httpx.Response(200, text="<html>"), Refused, "answer is no OpenReply"),
        (httpx.ConnectError("refused"), NoAnswer, "ConnectError: refused"),
        (httpx.ReadError("reset"), NoAnswer, "ReadError: reset"),
    ],
)
async def test_failures(answer: Answer, kind: type[Exception], text: str) -> None:
    async with link(Trainer(answer)) as out:
        with pytest.raises(kind, match=text):
            await out.run(Open(*op(), 2, 5, 40.0))


async def test_a_hanging_trainer_is_unknown_at_the_deadline() -> None:
    async with link(Trainer(never)) as out:
        with pytest.raises(NoAnswer, match="no answer within"):
            await out.run(Send(*op(0.05), 2, 4))


@pytest.mark.parametrize("command", [Open(1, 0.0, "", 2, 5, 1.0), Send(1, 0.0, "", 2, 4)])
async def test_nothing_is_sent_after_the_deadline(command: Open | Send) -> None:
    trainer = Trainer(ok())
    async with link(trainer) as out:
        with pytest.raises(NoAnswer, match="no time left"):
            await out.run(command)
    assert trainer.requests == []


async def test_an_odd_answer_to_a_send_is_a_refusal() -> None:
    async with link(Trainer(ok({"num_bytes": -1}))) as out:
        with pytest.raises(Refused, match="answer is no SendReply"):
            await out.run(Send(*op(), 2, 4))


async def test_a_batch_goes_out_once() -> None:
    trainer = Trainer(ok())
    async with link(trainer) as out:
        await out.post_batch(BATCH, 5.0)
    assert [decode_batch(body) for body in trainer.bodies] == [BATCH]
    assert trainer.requests[0].headers["content-type"] == "application/msgpack"


async def test_a_batch_is_sent_again_after_a_lost_answer_and_a_full_queue() -> None:
    taken = ok(status_body(1, next_step=BATCH.step + 1))
    trainer = Trainer(ok({"error": "full"}, 503), httpx.ReadError("reset"), ok({}, 409), taken)
    async with link(trainer) as out:
        await out.post_batch(BATCH, 30.0)
    assert [r.url.path for r in trainer.requests] == ["/batch", "/batch", "/batch", "/status"]


async def test_a_batch_that_a_former_orchestrator_has_sent_is_taken() -> None:
    refused = ok({"error": "the next step is another"}, 409)
    trainer = Trainer(refused, ok(status_body(1, next_step=BATCH.step + 1)))
    async with link(trainer) as out:
        await out.post_batch(BATCH, 5.0)
    assert [r.method for r in trainer.requests] == ["POST", "GET"]


async def test_the_first_status_is_waited_for() -> None:
    trainer = Trainer(httpx.ConnectError("refused"), ok(status_body(3, next_step=7)), never)
    async with link(trainer) as out:
        task = asyncio.create_task(out.watch())
        try:
            async with asyncio.timeout(5.0):
                assert (await out.first_status()).next_step == 7
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_a_batch_of_a_wrong_step_is_refused() -> None:
    trainer = Trainer(
        ok({"error": "step 3 is not the next"}, 409), ok(status_body(1, next_step=BATCH.step + 2))
    )
    async with link(trainer) as out:
        with pytest.raises(Refused, match="step 3 is not the next"):
            await out.post_batch(BATCH, 5.0)
    assert len(trainer.requests) == 2


async def test_a_batch_that_nobody_takes() -> None:
    async with link(Trainer(httpx.ConnectError("refused"))) as out:
        with pytest.raises(NoAnswer):
            await out.post_batch(BATCH, 0.3)


async def test_stop() -> None:
    trainer = Trainer(ok())
    async with link(trainer) as out:
        await out.stop()
    assert trainer.requests[0].url.path == "/stop"


async def watched(trainer: Trainer, num_requests: int) -> tuple[list[Any], TrainerLink]:
    """What was heard by the time that the trainer was asked so often."""
    heard: list[Any] = []
    async with link(trainer, heard) as out:
        task = asyncio.create_task(out.watch())
        try:
            async with asyncio.timeout(5.0):
                while len(trainer.requests) < num_requests:
                    trainer.asked.clear()
                    await trainer.asked.wait()
        finally:
            task.cancel()
            await asyncio.wait([task])
    return heard, out


async def test_the_watch_tells_each_version_and_step_once() -> None:
    step = {"step": 0, "values": {"loss": 1.0}}
    trainer = Trainer(
        ok(status_body(1, published_version=None)),
        ok(status_body(2)),
        ok(status_body(3, state="waiting_batch")),
        ok(status_body(4, published_version=1, recent_steps=[step])),
        ok(status_body(5, published_version=1, trainer_boot="t2", recent_steps=[step])),
        never,
    )
    heard, out = await watched(trainer, 6)
    assert heard == [
        BroadcastReady(0, "t1"),
        StepMetrics(step=0, values={"loss": 1.0}),
        BroadcastReady(1, "t1"),
        BroadcastReady(1, "t2"),
    ]
    assert [r.url.params["since"] for r in trainer.requests] == ["-1", "1", "2", "3", "4", "5"]
    assert out.status is not None
    assert out.status.seq == 5


async def test_the_watch_survives_an_absence_and_starts_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = Trainer(
        ok(status_body(9)),
        httpx.ConnectError("refused"),
        ok({"odd": 1}),
        ok(status_body(1, trainer_boot="t2")),
        never,
    )
    heard, _ = await watched(trainer, 5)
    assert heard == [BroadcastReady(0, "t1"), BroadcastReady(0, "t2")]
    assert [r.url.params["since"] for r in trainer.requests] == ["-1", "9", "-1", "-1", "1"]
    assert caplog.text.count("trainer does not answer") == 1
