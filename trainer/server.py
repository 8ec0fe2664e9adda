"""The trainer's control server: protocol/trainer_api.py over HTTP, on rank 0, in a thread.

It queues and answers; the step loop (main thread) does the work. Every route needs the admin
bearer token. Errors are `ErrorBody` with the cause: 400 malformed, 401, 409 does not fit the state,
500 a transfer failed, 503 no room, 504 not in time.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.engine_api import AbortRequest, Body, ErrorBody
from protocol.records import TrainBatch, decode_batch
from protocol.trainer_api import FinishRequest, JoinRequest, OpenRequest, SendReply, SendRequest
from trainer.desk import Conflict, Desk, Full, SendCommand
from trainer.generations import Generations
from transfer.errors import TransferError

_MAX_POLL_S = 60.0
_STOP_TIMEOUT_S = 5.0
_GRACEFUL_S = 2

BodyT = TypeVar("BodyT", bound=Body)


class BadRequest(Exception):
    """The body is not what the route takes."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running control server."""

    uvicorn: uvicorn.Server
    thread: threading.Thread

    def stop(self) -> None:
        """Finish what is being answered and end the thread; bounded."""
        self.uvicorn.should_exit = True
        self.thread.join(_STOP_TIMEOUT_S)


class BearerAuth:
    """ASGI middleware: requests without the token get 401 and reach no route."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on."""
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await _error(401, "missing or wrong bearer token")(scope, receive, send)
                return
        await self._app(scope, receive, send)


class AnswersAtTheEnd:
    """ASGI middleware: a request that is still waiting when the server's time is over gets 503.
    Otherwise its cancellation would be logged as a crash of the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:  # nobody but the server at its end cancels a request
            await _error(503, "the trainer is stopping")(scope, receive, send)


def make_app(
    desk: Desk,
    generations: Generations,
    *,
    check_batch: Callable[[TrainBatch], str | None],
) -> Starlette:
    """All routes. `check_batch` says what is wrong with a batch's content, or None."""
    routes = _Routes(desk, generations, check_batch)
    table: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
        "/status": ("GET", routes.status),
        "/transfer/open": ("POST", routes.open),
        "/transfer/join": ("POST", routes.join),
        "/transfer/send": ("POST", routes.send),
        "/transfer/abort": ("POST", routes.abort),
        "/finish": ("POST", routes.finish),
        "/batch": ("POST", routes.batch),
        "/stop": ("POST", routes.stop),
    }
    return Starlette(
        routes=[
            Route(path, endpoint, methods=[method]) for path, (method, endpoint) in table.items()
        ],
        exception_handlers={
            BadRequest: _handler(400),
            Conflict: _handler(409),
            TransferError: _handler(500),
            Full: _handler(503),
            TimeoutError: _handler(504),
        },
    )


def start_server(app: ASGIApp, sock: socket.socket, *, token: str) -> Server:
    """Serve `app` on a bound socket from a thread, behind the token."""
    config = uvicorn.Config(
        AnswersAtTheEnd(BearerAuth(app, token)),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_GRACEFUL_S,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [sock]}, name="control-server", daemon=True
    )
    thread.start()
    return Server(server, thread)


class _Routes:
    def __init__(
        self,
        desk: Desk,
        generations: Generations,
        check_batch: Callable[[TrainBatch], str | None],
    ) -> None:
        self._desk = desk
        self._generations = generations
        self._check_batch = check_batch

    async def status(self, request: Request) -> Response:
        try:
            since = int(request.query_params.get("since", "-1"))
            wait_s = min(float(request.query_params.get("wait_s", "0")), _MAX_POLL_S)
        except ValueError as exc:
            raise BadRequest(str(exc)) from exc
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        self._desk.listen(wake)
        try:
            async with asyncio.timeout(wait_s):
                while self._desk.status().seq <= since:
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            pass  # then the answer is the unchanged status
        finally:
            self._desk.unlisten(wake)
        return _body(self._desk.status())

    async def open(self, request: Request) -> Response:
        body = await _parse(request, OpenRequest)
        reply = await asyncio.to_thread(self._generations.open, body)
        self._desk.opened(body.generation)
        return _body(reply)

    async def join(self, request: Request) -> Response:
        body = await _parse(request, JoinRequest)
        await asyncio.to_thread(self._generations.wait_joined, body.generation, body.timeout_s)
        return JSONResponse({})

    async def send(self, request: Request) -> Response:
        body = await _parse(request, SendRequest)
        deadline = time.monotonic() + body.timeout_s
        self._desk.check_published(body.version)
        group = await asyncio.to_thread(self._generations.wait_joined, body.generation, 0)
        command = SendCommand(group, body.version, deadline)
        self._desk.ask_send(command)
        try:
            async with asyncio.timeout(body.timeout_s):
                result = await asyncio.wrap_future(command.future)
        except TimeoutError:
            self._generations.abort(body.generation, "send timed out")
            message = f"version {body.version} was not sent in {body.timeout_s:g} s"
            return _error(500, message)
        return _body(SendReply(**result._asdict()))

    async def abort(self, request: Request) -> Response:
        body = await _parse(request, AbortRequest)
        await asyncio.to_thread(self._generations.abort, body.generation, body.reason)
        return JSONResponse({})

    async def finish(self, request: Request) -> Response:
        self._desk.finish((await _parse(request, FinishRequest)).version)
        return JSONResponse({})

    async def batch(self, request: Request) -> Response:
        try:
            batch = decode_batch(await request.body())
        except msgspec.MsgspecError as exc:
            raise BadRequest(f"not a TrainBatch: {exc}") from exc
        wrong = self._check_batch(batch)
        if wrong is not None:
            raise BadRequest(wrong)
        self._desk.offer(batch)
        return JSONResponse({})

    async def stop(self, request: Request) -> Response:
        self._desk.stop()
        return JSONResponse({})


async def _parse(request: Request, model: type[BodyT]) -> BodyT:
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as exc:
        raise BadRequest(str(exc)) from exc


def _body(model: Body) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


def _error(status: int, message: str) -> Response:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return Response(
        ErrorBody(error=message).model_dump_json(),
        status,
        headers=headers,
        media_type="application/json",
    )


def _handler(status: int) -> Callable[[Request, Exception], Response]:
    return lambda request, exc: _error(status, str(exc))
