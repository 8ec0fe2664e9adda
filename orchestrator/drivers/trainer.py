"""The orchestrator's end of the trainer: its status by long poll, commands, batches.

Commands are carried out once; only what is idempotent (a batch, the stop) is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, assert_never

import httpx
import tenacity

from orchestrator.drivers.admin_http import NoAnswer, Refused, parse_body
from orchestrator.plane.commands import AbortGeneration, Finish, Join, Open, Send
from orchestrator.plane.events import BroadcastReady, OpResult
from protocol.engine_api import AbortRequest, Body
from protocol.records import TrainBatch, encode_batch
from protocol.trainer_api import (
    FinishRequest,
    JoinRequest,
    OpenReply,
    OpenRequest,
    SendReply,
    SendRequest,
    StepMetrics,
    TrainerStatus,
)

log = logging.getLogger(__name__)

TrainerCommand = AbortGeneration | Finish | Join | Open | Send
_POLL_S = 10.0
_POLL_MARGIN_S = 5.0
_RETRY_WAIT_S = 0.2
_RETRY_WAIT_MAX_S = 2.0
_STOP_TIMEOUT_S = 5.0
# As in the engine driver: who waits for us answers before we give up.
_SERVER_SHARE = 0.9
_MIN_TIMEOUT_S = 0.01


class TrainerLink:
    """Use as an async context manager; `watch` runs until cancelled."""

    def __init__(
        self,
        url: str,
        token: str,
        clock: Callable[[], float],
        *,
        on_ready: Callable[[BroadcastReady], None],
        on_step: Callable[[StepMetrics], None],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._clock = clock
        self._on_ready = on_ready
        self._on_step = on_step
        self.status: TrainerStatus | None = None
        self._has_status = asyncio.Event()
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            trust_env=False,
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def watch(self) -> None:
        """Follow the trainer's status; tell what is published and which steps are done."""
        since, last_step, told = -1, -1, ("", -1)
        wait_s, is_lost = _RETRY_WAIT_S, False
        while True:
            params = {"since": since, "wait_s": _POLL_S}
            try:
                answer = await self._http.get(
                    "/status", params=params, timeout=_POLL_S + _POLL_MARGIN_S
                )
                answer.raise_for_status()
                status = TrainerStatus.model_validate_json(answer.content)
            except (httpx.HTTPError, ValueError) as error:
                if self.status is not None and not is_lost:
                    log.warning("trainer does not answer: %s: %s", type(error).__name__, error)
                is_lost, since = True, -1
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, _RETRY_WAIT_MAX_S)
                continue
            wait_s, is_lost = _RETRY_WAIT_S, False
            since, self.status = status.seq, status
            self._has_status.set()
            for step in status.recent_steps:
                if step.step > last_step:
                    last_step = step.step
                    self._on_step(step)
            published = status.published_version
            if published is not None and (status.trainer_boot, published) != told:
                told = (status.trainer_boot, published)
                self._on_ready(BroadcastReady(published, status.trainer_boot))

    async def first_status(self) -> TrainerStatus:
        """The newest status, as soon as there is one."""
        await self._has_status.wait()
        assert self.status is not None
        return self.status

    async def run(self, command: TrainerCommand) -> OpResult:
        """Carry out `command`. Raises Refused, NoAnswer."""
        match command:
            case Open():
                request: Body = OpenRequest(
                    generation=command.generation,
                    world_size=command.world_size,
                    timeout_s=command.join_timeout_s,
                )
                answer = await self._post(command.deadline, "/transfer/open", request)
                reply = parse_body(OpenReply, answer)
                return OpResult(host=reply.host, port=reply.port)
            case Join():
                request = JoinRequest(
                    generation=command.generation, timeout_s=self._server_time(command.deadline)
                )
                await self._post(command.deadline, "/transfer/join", request)
            case Send():
                request = SendRequest(
                    generation=command.generation,
                    version=command.version,
                    timeout_s=self._server_time(command.deadline),
                )
                answer = await self._post(command.deadline, "/transfer/send", request)
                sent = parse_body(SendReply, answer)
                return OpResult(num_bytes=sent.num_bytes, digest=sent.digest)
            case AbortGeneration():
                request = AbortRequest(generation=command.generation, reason=command.reason)
                await self._post(command.deadline, "/transfer/abort", request)
            case Finish():
                request = FinishRequest(version=command.version, members=list(command.members))
                await self._post(command.deadline, "/finish", request)
            case _:
                assert_never(command)
        return OpResult()

    async def post_batch(self, batch: TrainBatch, timeout_s: float) -> None:
        """Hand over the batch of one step. Raises Refused, NoAnswer at `timeout_s`.

        Sent again after a lost answer: the trainer takes each step once, and says 409 to a repeat;
        whether it has the step is then asked. An orchestrator that was killed may have sent it.
        """
        content = encode_batch(batch)
        deadline = self._clock() + timeout_s

        @tenacity.retry(
            retry=tenacity.retry_if_exception(_may_pass),
            wait=tenacity.wait_exponential(_RETRY_WAIT_S, max=_RETRY_WAIT_MAX_S),
            stop=tenacity.stop_after_delay(timeout_s),
            reraise=True,
        )
        async def attempt() -> None:
            try:
                await self._send("/batch", content, "application/msgpack", deadline)
            except Refused as error:
                if error.status != 409 or not await self._has_step(batch.step, deadline):
                    raise

        await attempt()

    async def stop(self) -> None:
        """Ask the trainer to write its checkpoint and end. Raises Refused, NoAnswer."""
        await self._send("/stop", b"{}", "application/json", self._clock() + _STOP_TIMEOUT_S)

    async def _has_step(self, step: int, deadline: float) -> bool:
        """Whether the trainer has just taken the batch of `step`. Raises Refused, NoAnswer."""
        answer = await self._send("/status", None, "application/json", deadline)
        return parse_body(TrainerStatus, answer).next_step == step + 1

    async def _post(self, deadline: float, path: str, body: Body) -> bytes:
        content = body.model_dump_json().encode()
        return await self._send(path, content, "application/json", deadline)

    async def _send(self, path: str, content: bytes | None, kind: str, deadline: float) -> bytes:
        """POST, or GET without a content. Raises Refused, NoAnswer."""
        left = deadline - self._clock()
        if left <= 0:
            raise NoAnswer(f"trainer {path}: no time left")
        headers = {"Content-Type": kind}
        try:
            async with asyncio.timeout(left):
                answer = await self._http.request(
                    "GET" if content is None else "POST",
                    path,
                    content=content,
                    headers=headers,
                    timeout=left,
                )
        except TimeoutError:
            raise NoAnswer(f"trainer {path}: no answer within {left:.1f} s") from None
        except httpx.HTTPError as error:
            raise NoAnswer(f"trainer {path}: {type(error).__name__}: {error}") from None
        if not answer.is_success:
            raise Refused(answer.status_code, _text(answer))
        return answer.content

    def _server_time(self, deadline: float) -> float:
        return max((deadline - self._clock()) * _SERVER_SHARE, _MIN_TIMEOUT_S)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, NoAnswer) or (isinstance(error, Refused) and error.status == 503)


def _text(answer: httpx.Response) -> str:
    try:
        body: Any = answer.json()
    except ValueError:
        return answer.text[:800]
    return str(body.get("error", body) if isinstance(body, dict) else body)[:800]
