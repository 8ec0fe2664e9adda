"""A trainer without a model, behind the contract of protocol/trainer_api.py.

    v0 published at start -> /finish -> batch of step s -> v(s+1) published -> /finish -> ...

Transfer mode `none` moves nothing; `gloo` really opens a generation and really broadcasts a small
tensor. Faults come from the same table as the fake engine's: routes (`/transfer/send`) fail before
they act, phases (`join`, `send`, `train`) fail inside.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.fake_faults import FaultOrder, FaultPlan, FaultReport
from engine.fake_gate import FaultGate
from engine.fake_server import AppServer
from engine.fake_transfer import EMPTY_DIGEST, LinkError, TransferMode
from protocol.engine_api import AbortRequest, Body
from protocol.records import TrainBatch, decode_batch
from protocol.trainer_api import (
    FinishRequest,
    JoinRequest,
    OpenReply,
    OpenRequest,
    SendReply,
    SendRequest,
    StepMetrics,
    TrainerState,
    TrainerStatus,
)

_BodyT = TypeVar("_BodyT", bound=Body)
_UNUSED_PORT = 9  # mode `none`: nobody connects
_QUEUE_LEN = 1


class _Refused(Exception):
    """Answer with `status` and this text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _GlooSender:
    """Rank 0 of one generation."""

    def __init__(self, host: str, num_bytes: int) -> None:
        from transfer.rendezvous import listen

        self._num_bytes = num_bytes
        self._rendezvous = listen(host)
        self._cancel = threading.Event()
        self._group: Any = None

    @property
    def port(self) -> int:
        return self._rendezvous.port

    async def join(self, generation: int, world_size: int, timeout_s: float) -> None:
        from transfer.errors import TransferError
        from transfer.join import join

        try:
            self._group = await asyncio.to_thread(
                join,
                self._rendezvous.host,
                self._rendezvous.port,
                generation=generation,
                rank=0,
                world_size=world_size,
                backend="gloo",
                device="cpu",
                timeout_s=timeout_s,
                store=self._rendezvous.store,
                cancel=self._cancel,
            )
        except TransferError as exc:
            raise LinkError(str(exc)) from exc
        finally:
            self._rendezvous.close()

    async def send(self, version: int, timeout_s: float) -> SendReply:
        import torch

        from transfer.bucket import ParamMeta
        from transfer.errors import TransferError
        from transfer.send import send

        weights = torch.full((self._num_bytes // 4,), float(version))
        try:
            result = await asyncio.to_thread(
                send,
                self._group,
                iter([("weights", weights)]),
                [ParamMeta.of("weights", weights)],
                version=version,
                bucket_bytes=1 << 20,
                timeout_s=timeout_s,
            )
        except TransferError as exc:
            raise LinkError(str(exc)) from exc
        return SendReply(
            num_bytes=result.num_bytes,
            num_buckets=result.num_buckets,
            duration_s=result.duration_s,
            digest=result.digest,
        )

    def abort(self, reason: str) -> None:
        self._cancel.set()
        group, self._group = self._group, None
        if group is not None:
            group.abort(reason)
            threading.Thread(target=group.close, daemon=True).start()


class FakeTrainer:
    """One trainer. Start it with `serve`; change `plan` and `step_s` at any time."""

    def __init__(
        self,
        *,
        run_id: str = "run",
        admin_token: str = "secret",
        transfer: TransferMode = "none",
        num_bytes: int = 0,
        step_s: float = 0.0,
        is_free_running: bool = False,
        host: str = "127.0.0.1",
    ) -> None:
        self.run_id = run_id
        self.boot = secrets.token_hex(4)
        self.plan = FaultPlan()
        self.step_s = step_s
        self.is_free_running = is_free_running  # steps need no batch: versions follow one another
        self.batches: list[TrainBatch] = []
        self.finished: list[FinishRequest] = []
        self.sent: list[tuple[int, int]] = []  # (generation, version)
        self.generation = 0
        self.published: int | None = None
        self.url = ""
        self._host = host
        self._token = admin_token
        self._mode = transfer
        self._num_bytes = num_bytes if transfer == "gloo" else 0
        self._state: TrainerState = "starting"
        self._seq = 0
        self._changed = asyncio.Event()
        self._queue: list[TrainBatch] = []
        self._next_step = 0
        self._steps: list[StepMetrics] = []
        self._error: str | None = None
        self._sender: _GlooSender | None = None
        self._phase_task: asyncio.Task[Any] | None = None
        self._step_task: asyncio.Task[None] | None = None
        self._server: AppServer | None = None

    # -- what tests drive

    @contextlib.asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[FakeTrainer]:
        """Listen on `port` (0: a free one, see `url`) and publish v0."""
        app = FaultGate(self.app(), self.plan, self.kill)
        self._server = AppServer(app)
        await self._server.start(self._host, port)
        self.url = f"http://{self._host}:{self._server.port}"
        self.publish(0)
        try:
            yield self
        finally:
            if self._step_task is not None:
                self._step_task.cancel()
            self._abort("the fake trainer ends")
            self.kill()

    def publish(self, version: int) -> None:
        """Weights of `version` are ready to be sent; the step loop waits for its finish."""
        self.published = version
        self._set("publishing")

    def kill(self) -> None:
        """Go away without a word."""
        if self._server is not None:
            self._server.kill()

    def status(self) -> TrainerStatus:
        """What `/status` says."""
        return TrainerStatus(
            run_id=self.run_id,
            trainer_boot=self.boot,
            seq=self._seq,
            state=self._state,
            next_step=self._next_step,
            published_version=self.published,
            finished_version=max((said.version for said in self.finished), default=None),
            generation=self.generation,
            num_bytes=self._num_bytes,
            recent_steps=self._steps[-64:],
            error=self._error,
        )

    # -- HTTP

    def app(self) -> Starlette:
        """The routes of the contract, and `/fault`."""
        bodies = {
            "/transfer/open": _json_body(OpenRequest, self._open),
            "/transfer/join": _json_body(JoinRequest, self._join),
            "/transfer/send": _json_body(SendRequest, self._send),
            "/transfer/abort": _json_body(AbortRequest, self._abort_route),
            "/finish": _json_body(FinishRequest, self._finish),
            "/fault": _json_body(FaultOrder, self._fault),
        }
        routes = [
            Route(path, self._guarded(handler), methods=["POST"])
            for path, handler in bodies.items()
        ]
        routes += [
            Route("/status", self._guarded(self._status_route)),
            Route("/batch", self._guarded(self._batch), methods=["POST"]),
            Route("/stop", self._guarded(self._stop), methods=["POST"]),
        ]
        return Starlette(routes=routes)

    def _guarded(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if request.headers.get("authorization") != f"Bearer {self._token}":
                return JSONResponse({"error": "admin token is missing or wrong"}, 401)
            try:
                return await handler(request)
            except _Refused as exc:
                headers = {"Retry-After": "1"} if exc.status == 503 else {}
                return JSONResponse({"error": str(exc)}, exc.status, headers)

        return endpoint

    async def _status_route(self, request: Request) -> Response:
        since = int(request.query_params.get("since", "-1"))
        wait_s = float(request.query_params.get("wait_s", "0"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._seq <= since:
                    await self._changed.wait()
        return _reply(self.status())

    async def _open(self, request: OpenRequest) -> Body:
        if request.generation <= self.generation:
            text = f"generation {request.generation} is not above {self.generation}"
            raise _Refused(409, text)
        self._abort("superseded")
        self.generation = request.generation
        port = _UNUSED_PORT
        if self._mode == "gloo":
            self._sender = _GlooSender(self._host, self._num_bytes)
            port = self._sender.port
        self._phase_task = asyncio.create_task(self._join_phase(self._sender, request))
        self._set(self._state)
        return OpenReply(host=self._host, port=port)

    async def _join(self, request: JoinRequest) -> Body | None:
        self._check(request.generation)
        await self._phase_result(request.timeout_s, "join")
        return None

    async def _send(self, request: SendRequest) -> Body:
        self._check(request.generation)
        if request.version != self.published:
            raise _Refused(409, f"version {request.version} is not published: {self.published}")
        self._phase_task = asyncio.create_task(self._send_phase(request))
        reply = await self._phase_result(request.timeout_s, "send")
        self.sent.append((request.generation, request.version))
        assert isinstance(reply, SendReply)
        return reply

    async def _abort_route(self, request: AbortRequest) -> None:
        if request.generation == self.generation:
            self._abort(request.reason)

    async def _finish(self, request: FinishRequest) -> None:
        if self.published is None or request.version > self.published:
            raise _Refused(409, f"version {request.version} is not published: {self.published}")
        self.finished.append(request)
        if self._state != "publishing" or request.version != self.published:
            return  # said before, or of an older version: changes nothing
        self._set("waiting_batch")
        if self.is_free_running:
            self._queue = [TrainBatch(run_id=self.run_id, step=self._next_step, samples=[])]
            self._next_step += 1
        self._start_step()

    async def _batch(self, request: Request) -> Response:
        try:
            batch = decode_batch(await request.body())
        except msgspec.MsgspecError as exc:
            raise _Refused(400, f"not a TrainBatch: {exc}") from exc
        if batch.step != self._next_step:
            raise _Refused(409, f"step {batch.step} is not the next one: {self._next_step}")
        if len(self._queue) >= _QUEUE_LEN:
            raise _Refused(503, "the queue is full")
        self._queue.append(batch)
        self._next_step += 1
        self._set(self._state)
        self._start_step()
        return JSONResponse({})

    async def _stop(self, _request: Request) -> Response:
        self._set("stopping")
        return JSONResponse({})

    async def _fault(self, order: FaultOrder) -> Body:
        if order.clear:
            self.plan.clear()
        for rule in order.rules:
            self.plan.add(rule)
        return FaultReport(fired=self.plan.fired)

    # -- inside

    def _set(self, state: TrainerState) -> None:
        self._state = state
        self._seq += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _check(self, generation: int) -> None:
        if generation != self.generation:
            raise _Refused(409, f"generation {generation} is foreign, ours is {self.generation}")

    def _abort(self, reason: str) -> None:
        if self._phase_task is not None:
            self._phase_task.cancel(reason)
        if self._sender is not None:
            self._sender.abort(reason)
            self._sender = None

    async def _phase_result(self, timeout_s: float, name: str) -> Any:
        """Outcome of the running phase; 504 at the deadline, 500 with the cause."""
        task = self._phase_task
        assert task is not None
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            raise _Refused(504, f"{name}: timed out after {timeout_s:g} s")
        if task.cancelled():
            raise _Refused(500, f"{name}: generation was aborted")
        if (exc := task.exception()) is not None:
            raise _Refused(500, f"{name}: {exc}")
        return task.result()

    async def _join_phase(self, sender: _GlooSender | None, request: OpenRequest) -> None:
        await self._phase("join")
        if sender is not None:
            await sender.join(request.generation, request.world_size, request.timeout_s)

    async def _send_phase(self, request: SendRequest) -> SendReply:
        start = time.monotonic()
        await self._phase("send")
        if self._sender is not None:
            return await self._sender.send(request.version, request.timeout_s)
        duration_s = time.monotonic() - start
        return SendReply(num_bytes=0, num_buckets=0, duration_s=duration_s, digest=EMPTY_DIGEST)

    async def _phase(self, name: str) -> None:
        rule = self.plan.hit(name)
        match rule.action if rule is not None else None:
            case "exit":
                self.kill()
            case "hang":
                await asyncio.Event().wait()
            case "slow":
                assert rule is not None
                await asyncio.sleep(rule.delay_s)
            case "error" | "conflict" | "drop_reply":
                raise LinkError("injected fault")
            case None:
                pass

    def _start_step(self) -> None:
        if self._state == "waiting_batch" and self._queue:
            self._set("training")
            self._step_task = asyncio.create_task(self._step(self._queue.pop(0)))

    async def _step(self, batch: TrainBatch) -> None:
        await asyncio.sleep(self.step_s)
        try:
            await self._phase("train")
        except LinkError as exc:
            self._error = str(exc)
            self._set("stopping")
            return
        self.batches.append(batch)
        values = {"num_samples": float(len(batch.samples))}
        self._steps.append(StepMetrics(step=batch.step, values=values))
        self.publish(batch.step + 1)


def _json_body(
    model: type[_BodyT], handler: Callable[[_BodyT], Awaitable[Body | None]]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            body = model.model_validate_json(await request.body())
        except ValidationError as exc:
            raise _Refused(422, str(exc)) from exc
        return _reply(await handler(body))

    return endpoint


def _reply(body: Body | None) -> Response:
    if body is None:
        return JSONResponse({})
    return Response(body.model_dump_json(), media_type="application/json")


def train_batches(run_id: str) -> Iterator[TrainBatch]:
    """Empty batches, step by step, for tests that only want versions to grow."""
    step = 0
    while True:
        yield TrainBatch(run_id=run_id, step=step, samples=[])
        step += 1


async def _serve(args: argparse.Namespace) -> None:
    token = os.environ["MUSTER_ADMIN_TOKEN"]
    trainer = FakeTrainer(
        run_id=args.run_id,
        admin_token=token,
        transfer=args.transfer,
        num_bytes=args.num_bytes,
        step_s=args.step_s,
        is_free_running=args.free_running,
    )
    async with trainer.serve(args.port):
        print(trainer.url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """`MUSTER_ADMIN_TOKEN=... python -m tests.fakes.trainer`: prints its URL, serves on."""
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.trainer")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--run-id", default="run")
    parser.add_argument("--transfer", choices=["none", "gloo"], default="none")
    parser.add_argument("--num-bytes", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--free-running", action="store_true")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
