"""Our own HTTP routes of an engine, over an `EngineControl`; real and fake engine share them.

Bodies and answers are those of `protocol/engine_api.py`. Tokens, and the gate in front of data
routes, are `engine/gate.py`'s business. What is decided here:
- which generation a call may speak of: a new one only above the last, any other call only the last;
- when a new one begins: after a commit that is under way, so that none of an older generation ends
  in it, whoever has asked for that commit and does not live any more;
- which version may be committed: exactly the one that is staged;
- what the engine holds afterwards: the version, or nothing when the commit failed half-way.
Names and bodies of the weight-transfer routes are vLLM's; our plugin replaces vLLM's handlers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.control import Conflict, EngineControl, EngineFailure
from protocol.engine_api import (
    AbortRequest,
    AdmitRequest,
    AwaitRequest,
    Body,
    ErrorBody,
    FenceRequest,
    InitInfo,
    TransferStatus,
    UpdateInfo,
    WeightVersion,
)

Handler = Callable[[Request], Awaitable[Response]]
BodyT = TypeVar("BodyT", bound=Body)

MAX_BODY_BYTES = 1 << 20


class EngineRoute(NamedTuple):
    """One route, for whatever framework the app is made with."""

    method: str
    path: str
    handler: Handler


class InitBody(Body):
    """Body of /init_weight_transfer_engine. The answer waits up to `wait_s` for the stage."""

    init_info: InitInfo
    wait_s: float = Field(default=0.0, ge=0)


class UpdateBody(Body):
    """Body of /update_weights. The answer waits up to `wait_s` for the stage."""

    update_info: UpdateInfo
    wait_s: float = Field(default=0.0, ge=0)


class FinishBody(Body):
    """Body of /finish_weight_update. `weight_version` is a decimal number as a string."""

    weight_version: str
    generation: int


class BadBody(Exception):
    """The request's body is not what the route takes: 400 with this text."""


def engine_routes(control: EngineControl) -> list[EngineRoute]:
    """All routes that real and fake engine have in common."""
    api = _Api(control)
    table: list[tuple[str, str, Handler]] = [
        ("GET", "/identity", api.identity),
        ("GET", "/weight_version", api.weight_version),
        ("GET", "/ready", api.ready),
        ("GET", "/liveness", api.liveness),
        ("POST", "/admit", api.admit),
        ("POST", "/fence", api.fence),
        ("POST", "/init_weight_transfer_engine", api.init_transfer),
        ("POST", "/start_weight_update", api.start_update),
        ("POST", "/update_weights", api.update_weights),
        ("POST", "/await_weight_transfer", api.await_transfer),
        ("POST", "/finish_weight_update", api.finish_update),
        ("POST", "/abort_weight_transfer", api.abort_transfer),
        ("POST", "/shutdown_weight_transfer_engine", api.shutdown_transfer),
    ]
    return [EngineRoute(method, path, _with_errors(handler)) for method, path, handler in table]


class _Api:
    def __init__(self, control: EngineControl) -> None:
        self._control = control
        self._committing = asyncio.Lock()

    async def identity(self, request: Request) -> Response:
        return _answer(self._control.identity())

    async def weight_version(self, request: Request) -> Response:
        keeper = self._control.keeper
        return _answer(WeightVersion(version=keeper.weight_version, boot_id=keeper.boot_id))

    async def ready(self, request: Request) -> Response:
        gate = self._control.keeper.gate
        problem = self._control.liveness_problem()
        if not gate.is_open:
            problem = f"admission is closed: {gate.reason}"
        return _plain(problem)

    async def liveness(self, request: Request) -> Response:
        return _plain(self._control.liveness_problem())

    async def admit(self, request: Request) -> Response:
        body = await _read(request, AdmitRequest)
        keeper = self._control.keeper
        result = keeper.admit(body)
        if result == "foreign_boot":
            raise Conflict(f"boot id is {keeper.boot_id}, not {body.boot_id}")
        if result == "wrong_version":
            raise Conflict(f"weight version is {keeper.weight_version}, not {body.version}")
        return _answer(self._control.identity())

    async def fence(self, request: Request) -> Response:
        body = await _read(request, FenceRequest)
        self._control.keeper.fence(body.reason)
        return _answer(self._control.identity())

    async def init_transfer(self, request: Request) -> Response:
        body = await _read(request, InitBody)
        info = body.init_info
        async with self._committing:
            if info.generation <= self._control.generation:
                raise Conflict(
                    f"generation {info.generation} is not above the last one, "
                    f"{self._control.generation}"
                )
            await self._control.init_transfer(info)
        return _answer(await self._control.wait_transfer("joined", body.wait_s))

    async def start_update(self, request: Request) -> Response:
        await self._control.start_update()
        return _done("weight update started")

    async def update_weights(self, request: Request) -> Response:
        body = await _read(request, UpdateBody)
        self._check_generation(body.update_info.generation)
        await self._control.receive(body.update_info)
        return _answer(await self._control.wait_transfer("staged", body.wait_s))

    async def await_transfer(self, request: Request) -> Response:
        body = await _read(request, AwaitRequest)
        self._check_generation(body.generation)
        return _answer(await self._control.wait_transfer(body.stage, body.timeout_s))

    async def finish_update(self, request: Request) -> Response:
        body = await _read(request, FinishBody)
        if not body.weight_version.isdecimal():
            raise BadBody(f"weight_version {body.weight_version!r} is not a decimal number")
        self._check_generation(body.generation)
        if self._committing.locked():
            raise Conflict("another commit is under way")
        async with self._committing:
            await self._commit(int(body.weight_version))
        return _done(f"weight version is {body.weight_version}")

    async def _commit(self, version: int) -> None:
        _check_staged(await self._control.transfer_status(), version)
        keeper = self._control.keeper
        try:
            await self._control.commit(version)
        except BaseException:  # whatever it was, half of the weights may be new
            keeper.hold(None)
            raise
        keeper.hold(version)

    async def abort_transfer(self, request: Request) -> Response:
        body = await _read(request, AbortRequest)
        self._check_generation(body.generation)
        return _answer(await self._control.abort_transfer(body.generation, body.reason))

    async def shutdown_transfer(self, request: Request) -> Response:
        await self._control.shutdown_transfer()
        return _done("weight transfer shut down")

    def _check_generation(self, generation: int) -> None:
        if generation != self._control.generation:
            raise Conflict(f"generation is {self._control.generation}, not {generation}")


def _check_staged(status: TransferStatus, version: int) -> None:
    if status.state != "staged":
        raise Conflict(f"nothing is staged: the transfer is {status.state}")
    if status.staged_version != version:
        raise Conflict(f"staged version is {status.staged_version}, not {version}")


def _with_errors(handler: Handler) -> Handler:
    """`handler` with our exceptions as answers."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except BadBody as exc:
            return _error(400, str(exc))
        except Conflict as exc:
            return _error(409, str(exc))
        except EngineFailure as exc:
            return _error(500, str(exc))

    answer.__name__ = handler.__name__
    return answer


async def _read(request: Request, kind: type[BodyT]) -> BodyT:
    """The request's JSON body. Raises BadBody."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise BadBody(f"body is larger than {MAX_BODY_BYTES} bytes")
    try:
        return kind.model_validate_json(data)
    except ValidationError as exc:
        problems = [
            f"{'.'.join(map(str, error['loc'])) or 'body'}: {error['msg']}"
            for error in exc.errors(include_url=False)
        ]
        raise BadBody("; ".join(problems)) from exc


def _answer(body: Body) -> Response:
    return JSONResponse(body.model_dump())


def _done(message: str) -> Response:
    return JSONResponse({"message": message})


def _error(status: int, error: str) -> Response:
    return JSONResponse(ErrorBody(error=error).model_dump(), status)


def _plain(problem: str | None) -> Response:
    """200, or 503 with the reason."""
    return JSONResponse({"status": "ok"}) if problem is None else _error(503, problem)
