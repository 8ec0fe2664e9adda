"""The generation client against a small ASGI app: what is tried again, what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from orchestrator.rollouts.client import GenerationClient, GenerationRequest, Outcome
from orchestrator.rollouts.config import RolloutsConfig
from orchestrator.rollouts.errors import RolloutLost
from protocol.records import VersionSpan

HEADERS = {"X-Engine-Id": "g0e1", "X-Boot-Id": "boot-7"}
Answer = Response | Callable[[], Awaitable[Response]]


def answer_body(**changes: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [5, 6],
        "logprobs": {
            "content": [
                {"token_id": 5, "logprob": -0.25, "rank": 1, "top_logprobs": []},
                {"token_id": 6, "logprob": -1.5, "rank": 2, "top_logprobs": []},
            ]
        },
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
    return {"request_id": "x", "choices": [choice | changes]}


def good(headers: dict[str, str] | None = None, **changes: Any) -> Response:
    return JSONResponse(answer_body(**changes), headers=HEADERS if headers is None else headers)


class Fleet:
    """Answers one after the other; remembers what was asked."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.outcomes: list[Outcome] = []
        routes = [Route("/inference/v1/generate", self.generate, methods=["POST"])]
        self.app = Starlette(routes=routes)

    async def generate(self, request: Request) -> Response:
        self.requests.append((dict(request.headers), await request.json()))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer if isinstance(answer, Response) else await answer()

    def client(
        self,
        api_key: str | None = None,
        url_for: Callable[[str], str | None] | None = None,
        **settings: Any,
    ) -> GenerationClient:
        config = RolloutsConfig(
            **({"retry_wait_s": 0.001, "retry_wait_max_s": 0.002, "temperature": 0.7} | settings)
        )
        return GenerationClient(
            config,
            "http://router",
            api_key=api_key,
            url_for=url_for,
            on_outcome=self.outcomes.append,
            transport=httpx.ASGITransport(self.app),
        )


REQUEST = GenerationRequest(key="run-r4", prompt_ids=[1, 2, 3], cache_salt="v3", seed=11)


async def test_a_good_answer_becomes_a_sample_with_its_maker() -> None:
    fleet = Fleet(
        good(
            weight_versions=[
                {"version": "3", "start": 0, "end": 1},
                {"version": "4", "start": 1, "end": 2},
            ]
        )
    )
    async with fleet.client(api_key="secret") as client:
        sample, num_attempts = await client.generate(REQUEST)
    assert num_attempts == 1
    assert sample.prompt_ids == [1, 2, 3]
    assert sample.completion_ids == [5, 6]
    assert sample.logprobs == [-0.25, -1.5]
    assert sample.spans == [VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)]
    assert (sample.engine_id, sample.boot_id) == ("g0e1", "boot-7")
    assert sample.finish_reason == "stop"
    assert fleet.outcomes == [Outcome("g0e1", True, 200, "")]
    headers, body = fleet.requests[0]
    assert headers["authorization"] == "Bearer secret"
    assert headers["x-session-id"] == body["request_id"] == "run-r4-1"
    assert body["token_ids"] == [1, 2, 3]
    assert body["cache_salt"] == "v3"
    assert body["sampling_params"]["temperature"] == 0.7
    assert body["sampling_params"]["max_tokens"] == 16
    assert body["sampling_params"]["logprobs"] == 0
    assert body["sampling_params"]["seed"] == 11
    assert client.counts.num_attempts == client.counts.num_ok == 1


async def test_every_try_is_a_new_session() -> None:
    fleet = Fleet(
        PlainTextResponse("engine core died", 500, headers=HEADERS),
        PlainTextResponse("closed", 503, headers={"Retry-After": "0"}),
        good(finish_reason="abort", token_ids=[5]),
        good(),
    )
    async with fleet.client() as client:
        _, num_attempts = await client.generate(REQUEST)
    assert num_attempts == 4
    sessions = [headers["x-session-id"] for headers, _ in fleet.requests]
    assert sessions == ["run-r4-1", "run-r4-2", "run-r4-3", "run-r4-4"]
    assert fleet.outcomes == [
        Outcome("g0e1", False, 500, "g0e1 answered 500: engine core died"),
        Outcome(None, False, 503, "router answered 503: closed"),
        Outcome("g0e1", True, 200, "aborted after 1 tokens"),
        Outcome("g0e1", True, 200, ""),
    ]
    assert (client.counts.num_attempts, client.counts.num_retryable) == (4, 3)


async def test_without_a_router_each_try_asks_whom_to_send_to() -> None:
    fleet = Fleet(PlainTextResponse("closed", 503, headers=HEADERS), good())
    urls = iter([None, "http://engine-0:1", "http://engine-1:1"])
    asked: list[str] = []

    def url_for(session: str) -> str | None:
        asked.append(session)
        return next(urls)

    async with fleet.client(url_for=url_for) as client:
        _, num_attempts = await client.generate(REQUEST)
    assert num_attempts == 3
    assert asked == ["run-r4-1", "run-r4-2", "run-r4-3"]
    assert [headers["host"] for headers, _ in fleet.requests] == ["engine-0:1", "engine-1:1"]
    assert fleet.outcomes[0] == Outcome(None, False, None, "no engine serves")
    assert (client.counts.num_attempts, client.counts.num_retryable) == (3, 2)


async def test_a_cut_answer_is_tried_again() -> None:
    half = json.dumps(answer_body())[:40]
    fleet = Fleet(Response(half, media_type="application/json", headers=HEADERS), good())
    async with fleet.client() as client:
        _, num_attempts = await client.generate(REQUEST)
    assert num_attempts == 2
    assert fleet.outcomes[0].text.startswith("g0e1: answer of 40 bytes is not whole")


async def test_connection_errors_are_tried_again() -> None:
    class Refusing(httpx.AsyncBaseTransport):
        num_requests = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            self.num_requests += 1
            if self.num_requests == 1:
                raise httpx.ConnectError("connection refused")
            if self.num_requests == 2:
                raise httpx.ReadError("connection reset by peer")
            return httpx.Response(200, headers=HEADERS, json=answer_body())

    outcomes: list[Outcome] = []
    config = RolloutsConfig(retry_wait_s=0.001, retry_wait_max_s=0.002)
    async with GenerationClient(
        config, "http://router", on_outcome=outcomes.append, transport=Refusing()
    ) as client:
        _, num_attempts = await client.generate(REQUEST)
    assert num_attempts == 3
    assert [outcome.text for outcome in outcomes] == [
        "ConnectError: connection refused",
        "ReadError: connection reset by peer",
        "",
    ]
    assert outcomes[0].engine_id is None
    assert outcomes[0].status is None


@pytest.mark.parametrize("status", [400, 401, 404, 409, 429])
async def test_a_4xx_is_not_tried_again_and_its_text_is_kept(status: int) -> None:
    fleet = Fleet(PlainTextResponse("prompt too long", status, headers=HEADERS))
    async with fleet.client() as client:
        with pytest.raises(RolloutLost) as caught:
            await client.generate(REQUEST)
    assert caught.value.reason == "refused"
    assert caught.value.detail == f"g0e1 answered {status}: prompt too long"
    assert len(fleet.requests) == 1
    assert client.counts.num_refused == 1


LOGPROBS = answer_body()["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize(
    ("response", "detail"),
    [
        (
            good(weight_versions=[{"version": "default", "start": 0, "end": 2}]),
            "weight version 'default' is not a policy version",
        ),
        (
            good(weight_versions=[{"version": "-1", "start": 0, "end": 2}]),
            "weight version '-1' is not a policy version",
        ),
        (good(weight_versions=None), "no weight_versions"),
        (
            good(weight_versions=[{"version": "3", "start": 0, "end": 1}]),
            "weight_versions cover 1 of 2 tokens",
        ),
        (
            good(weight_versions=[{"version": "3", "start": 1, "end": 2}]),
            "weight_versions do not tile the completion at token 0",
        ),
        (good(headers={"X-Boot-Id": "b"}), "no X-Engine-Id in the answer's headers"),
        (good(headers={}), "no X-Engine-Id and no X-Boot-Id in the answer's headers"),
        (
            good(headers={"X-Engine-Id": "engine1", "X-Boot-Id": "b"}),
            "engine id 'engine1' is not of the form g<group>e<index>",
        ),
        (good(logprobs=None), "no logprobs"),
        (
            good(logprobs={"content": LOGPROBS[:1]}),
            "logprobs belong to other tokens than the completion",
        ),
        (
            good(logprobs={"content": [LOGPROBS[0], {"token_id": 6, "logprob": -9999.0}]}),
            "logprob -9999.0 of token 1 is not one",
        ),
        (good(token_ids=[]), "no tokens"),
        (good(finish_reason="repetition"), "unknown finish_reason 'repetition'"),
        (JSONResponse({"choices": []}, headers=HEADERS), "0 choices, asked for 1"),
        (
            JSONResponse({"object": "error"}, headers=HEADERS),
            "answer does not parse: Object missing required field `choices`",
        ),
    ],
)
async def test_an_answer_that_breaks_the_contract_is_an_error_and_never_a_guess(
    response: Response, detail: str
) -> None:
    fleet = Fleet(response)
    async with fleet.client() as client:
        with pytest.raises(RolloutLost) as caught:
            await client.generate(REQUEST)
    assert caught.value.reason == "bad_answer"
    assert detail in caught.value.detail
    assert len(fleet.requests) == 1
    assert not fleet.outcomes[0].ok


async def test_a_version_that_made_no_token_is_no_span() -> None:
    fleet = Fleet(
        good(
            weight_versions=[
                {"version": "2", "start": 0, "end": 0},
                {"version": "3", "start": 0, "end": 2},
            ]
        )
    )
    async with fleet.client() as client:
        sample, _ = await client.generate(REQUEST)
    assert sample.spans == [VersionSpan(3, 0, 2)]


async def hang() -> Response:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def test_an_attempt_that_hangs_is_cut_off_and_tried_again() -> None:
    fleet = Fleet(hang, good())
    async with fleet.client(request_timeout_s=0.02) as client:
        _, num_attempts = await client.generate(REQUEST)
    assert num_attempts == 2
    assert fleet.outcomes[0] == Outcome(None, False, None, "no answer within 0.02 s")


async def test_a_rollout_is_lost_at_its_deadline_with_the_last_error() -> None:
    fleet = Fleet(PlainTextResponse("no workers", 503))
    async with fleet.client(rollout_timeout_s=0.1, request_timeout_s=0.05) as client:
        with pytest.raises(RolloutLost) as caught:
            await client.generate(REQUEST)
    assert caught.value.reason == "timeout"
    assert caught.value.detail == ("no good answer within 0.1 s; router answered 503: no workers")
    assert caught.value.num_attempts == client.counts.num_attempts >= 2


async def test_cancelling_a_rollout_cancels_its_request() -> None:
    asked = asyncio.Event()

    async def ask_and_hang() -> Response:
        asked.set()
        return await hang()

    fleet = Fleet(ask_and_hang)
    async with fleet.client() as client:
        task = asyncio.create_task(client.generate(REQUEST))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert client.counts.num_cancelled == 1
