"""ASGI middleware that makes routes of a fake fail by its `FaultPlan`; outermost of all.

A fault before the app means that nothing was done; `drop_reply` means that it was done and nobody
heard of it, and `slow` that it is done even when whoever asked has gone meanwhile: the cases that
make an outcome unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.fake_faults import FaultPlan

FAULT_PATH = "/fault"  # never fails itself


class FaultGate:
    """`kill` ends the fake like SIGKILL and need not return."""

    def __init__(self, app: ASGIApp, plan: FaultPlan, kill: Callable[[], None]) -> None:
        self._app = app
        self._plan = plan
        self._kill = kill

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or fail it."""
        rule = None
        if scope["type"] == "http" and scope["path"] != FAULT_PATH:
            rule = self._plan.hit(scope["path"])
        match rule.action if rule is not None else None:
            case "exit":
                self._kill()
                await wait_for_disconnect(receive)
            case "hang":
                await wait_for_disconnect(receive)
            case "error":
                await _answer(500, "injected fault")(scope, receive, send)
            case "conflict":
                await _answer(409, "injected conflict")(scope, receive, send)
            case "drop_reply":
                await self._app(scope, receive, _swallow)
                scope["state"]["transport"].abort()
                await wait_for_disconnect(receive)
            case "slow":
                assert rule is not None
                read = await _whole_request(receive)
                await asyncio.sleep(rule.delay_s)
                await self._app(scope, read, send)
            case None:
                await self._app(scope, receive, send)


async def _whole_request(receive: Receive) -> Receive:
    """Read the request to its end now; what is returned gives it again."""
    messages: list[Message] = []
    while not messages or messages[-1].get("more_body"):
        messages.append(await receive())
    messages.reverse()

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _answer(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status)


async def _swallow(message: Message) -> None:
    """Takes the answer that nobody gets."""
