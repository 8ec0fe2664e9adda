"""HTTP to engines' admin routes, and to the router.

aiohttp, not httpx: an update over 128 engines is about 900 requests, and httpx alone needs twice
the time that the whole update may take. Idle connections are dropped before a server would drop
them (uvicorn: 5 s), so that a request is never lost to a closing connection and never sent twice.
"""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp

from protocol.engine_api import Body

BodyT = TypeVar("BodyT", bound=Body)

_KEEPALIVE_S = 4.0
_MAX_ERROR_TEXT = 800


class Refused(Exception):
    """The server answered, and not with success. The text is its own."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


class NoAnswer(Exception):
    """No answer: not reached, broken off, or too late. It may have been carried out."""


class AdminHttp:
    """Requests with the admin token (None: to somebody who must not have it) and a deadline. Use
    as an async context manager."""

    def __init__(self, token: str | None, connect_timeout_s: float) -> None:
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        self._session = aiohttp.ClientSession(
            headers=self._headers, connector=connector, trust_env=False
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def call(
        self, method: str, url: str, body: dict[str, Any] | None = None, *, timeout_s: float
    ) -> bytes:
        """The answer's body. Raises Refused or NoAnswer."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_timeout_s)
        try:
            async with self._session.request(
                method, url, json=body, timeout=timeout, allow_redirects=False
            ) as answer:
                content = await answer.read()
        except TimeoutError:
            raise NoAnswer(f"{method} {url}: no answer within {timeout_s:.1f} s") from None
        except aiohttp.ClientError as error:
            raise NoAnswer(f"{method} {url}: {type(error).__name__}: {error}") from None
        if not 200 <= answer.status < 300:
            raise Refused(answer.status, _error_text(content))
        return content


def parse_body(kind: type[BodyT], content: bytes) -> BodyT:
    """Raises Refused for an answer that breaks the contract: it is no better than an error."""
    try:
        return kind.model_validate_json(content)
    except ValueError as error:
        raise Refused(200, f"answer is no {kind.__name__}: {error}") from None


def _error_text(content: bytes) -> str:
    """What the server says went wrong, short."""
    text = content.decode(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        return text[:_MAX_ERROR_TEXT]
    if isinstance(body, dict):
        text = str(body.get("error", body.get("detail", text)))
    return text[:_MAX_ERROR_TEXT]
