"""The gate and the tokens in front of all routes of an engine, real or fake, as ASGI middleware.

    request -> access of its route -> token? -> gate open? -> app -> identity in its headers

Rules:
- A refused request reaches no handler and changes nothing.
- Tokens are compared in constant time and never logged.
- The lease is checked at each request, so a gate whose lease is over refuses at once, without any
  task that would have to wake up first.
- Requests in flight are not cut by a gate that closes: `/abort_requests` does that.
"""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.access import access_of
from engine.admission import AdmitResult, Gate
from protocol.engine_api import AdmitRequest, ErrorBody
from protocol.ids import HEADER_BOOT_ID, HEADER_ENGINE_ID, HEADER_WEIGHT_VERSION

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

RETRY_AFTER_S = 1


class Gatekeeper:
    """The one mutable gate of an engine process. `clock` gives monotonic seconds; longer leases
    than `max_lease_s` are cut to it."""

    def __init__(
        self,
        *,
        engine_id: str,
        boot_id: str,
        clock: Callable[[], float],
        max_lease_s: float = math.inf,
    ) -> None:
        self.engine_id = engine_id
        self._max_lease_s = max_lease_s
        self._clock = clock
        self._gate = Gate(boot_id)

    @property
    def gate(self) -> Gate:
        """State as of now."""
        self._gate = self._gate.expire(self._clock())
        return self._gate

    @property
    def boot_id(self) -> str:
        """Random id of this engine process."""
        return self._gate.boot_id

    @property
    def weight_version(self) -> int | None:
        """Policy version of the loaded weights, None = of no version."""
        return self._gate.weight_version

    def admit(self, request: AdmitRequest) -> AdmitResult:
        """Open the gate or renew its lease; refused requests change nothing."""
        self._gate, result = self._gate.admit(
            self._clock(),
            boot_id=request.boot_id,
            version=request.version,
            lease_s=min(request.lease_s, self._max_lease_s),
        )
        return result

    def fence(self, reason: str) -> None:
        """Close the gate. Idempotent."""
        self._gate = self._gate.fence(reason)

    def hold(self, version: int | None) -> None:
        """A commit has loaded `version`, or has failed half-way (None)."""
        self._gate = self._gate.hold(version)


class GateMiddleware:
    """ASGI middleware over a Gatekeeper. An `api_key` of None leaves data routes without a key."""

    def __init__(
        self, app: ASGIApp, *, keeper: Gatekeeper, admin_token: str, api_key: str | None = None
    ) -> None:
        if not admin_token:
            raise ValueError("admin token is empty")
        self._app = app
        self._keeper = keeper
        self._admin_token = admin_token
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no web socket of vLLM is behind the gate
            await send({"type": "websocket.close", "code": 1008, "reason": "not served"})
            return
        access = access_of(scope["method"], scope["path"])
        refusal = self._refusal(access, scope)
        if access == "data":
            send = self._identified(send)
        if refusal is not None:
            await refusal(send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, access: str, scope: Scope) -> Refusal | None:
        """The answer to a request that may not pass, None for one that may."""
        if access == "public":
            return None
        if access == "forbidden":
            return Refusal(403, f"{scope['path']} is not served by a muster engine")
        token = _bearer(scope)
        if not self._may_pass(access, token):
            what = "admin token" if access == "admin" else "API key"
            problem = "missing" if token is None else "wrong"
            return Refusal(401, f"{problem} {what}", {"www-authenticate": "Bearer"})
        if access == "data" and not (gate := self._keeper.gate).is_open:
            retry = {"retry-after": str(RETRY_AFTER_S)}
            return Refusal(503, f"admission is closed: {gate.reason}", retry)
        return None

    def _may_pass(self, access: str, token: bytes | None) -> bool:
        is_admin = token is not None and hmac.compare_digest(token, self._admin_token.encode())
        if access == "admin" or is_admin:
            return is_admin
        if self._api_key is None:
            return True
        return token is not None and hmac.compare_digest(token, self._api_key.encode())

    def _identified(self, send: Send) -> Send:
        """`send` that adds who answers, and with which weights, when the answer starts."""

        async def send_identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = {
                    HEADER_ENGINE_ID: self._keeper.engine_id,
                    HEADER_BOOT_ID: self._keeper.boot_id,
                }
                version = self._keeper.weight_version
                if version is not None:
                    headers[HEADER_WEIGHT_VERSION] = str(version)
                message = {**message, "headers": [*message.get("headers", []), *_raw(headers)]}
            await send(message)

        return send_identified


class Refusal:
    """A whole JSON answer, ready to be sent."""

    def __init__(self, status: int, error: str, headers: dict[str, str] | None = None) -> None:
        self.status = status
        self.error = error
        self._headers = headers or {}

    async def __call__(self, send: Send) -> None:
        """Send it. The request's body is left unread; the server drops it."""
        body = json.dumps(ErrorBody(error=self.error).model_dump()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await send(
            {
                "type": "http.response.start",
                "status": self.status,
                "headers": _raw({**headers, **self._headers}),
            }
        )
        await send({"type": "http.response.body", "body": body})


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


def _bearer(scope: Scope) -> bytes | None:
    """Token of the Authorization header, None when there is no bearer token."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = bytes(value).partition(b" ")
            return token.strip() if scheme.lower() == b"bearer" and token else None
    return None
