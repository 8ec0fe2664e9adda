"""What the admin plane needs of a router, and the vllm-routers that it knows.

| router | who is listed | an engine is taken out | an engine is put in |
|---|---|---|---|
| `VllmRouter` | who was added over its API | removed there | added there |
| `VllmPdRouter` | its fixed members that pass its check of `/ready` | closes its gate | opens it |

Measured on vllm-router 0.1.17, hence the rules: only its listing is believed (a removal says 200
whatever happens; an add blocks until the engine's `/health` answers, and a second one says 400);
URLs are compared as strings; with prefill and decode roles it refuses every add, so nothing is ever
removed there. Each `ensure_*` ends by its time, in one of three ways, and may be asked twice.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal, Protocol

import httpx

from orchestrator.config import canonical_url

_LIST_TIMEOUT_S = 2.0
# Between two looks at a listing that is not yet as asked.
_POLL_S = 0.05
_MAX_ERROR_TEXT = 300


@dataclass(frozen=True, slots=True)
class Ensured:
    """`succeeded`: the listing says so. `failed`: the router said no, or its listing still does at
    the end. `unknown`: it could not be seen; it may have happened, or happen later."""

    outcome: Literal["succeeded", "failed", "unknown"]
    detail: str = ""


class RouterSilent(Exception):
    """No listing: the router cannot be reached, is too slow, or answers something else."""


class Router(Protocol):
    """A set of engines that requests are sent to, by canonical URL."""

    async def listed(self) -> frozenset[str]:
        """Who gets requests now. Raises RouterSilent."""
        ...

    async def ensure_present(self, url: str, timeout_s: float) -> Ensured:
        """Have `url` listed."""
        ...

    async def ensure_absent(self, url: str, timeout_s: float) -> Ensured:
        """Have `url` not listed."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class VllmRouter:
    """vllm-router in regular mode: members come and go over its API."""

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._http = _client(url, transport)
        self._listing = _Listing(self._http, "/list_workers")

    async def listed(self) -> frozenset[str]:
        """As the router spells them: another spelling of an engine is another member to it."""
        body = await self._listing.read()
        urls = body.get("urls") if isinstance(body, dict) else None
        if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
            raise _unknown_listing(body)
        return frozenset(urls)

    async def ensure_present(self, url: str, timeout_s: float) -> Ensured:
        """Add it once and watch the listing: who is refused may be there already."""
        last = f"no answer to the add within {timeout_s:g} s"
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._http.post("/add_worker", params={"url": url})
                last = _said(answer)
                while True:
                    try:
                        if url in await self.listed():
                            return Ensured("succeeded")
                        if not answer.is_success:
                            return Ensured("failed", last)
                    except RouterSilent as error:
                        last = str(error)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            # It is not cancelled over there: it may still be listed later.
            return Ensured("unknown", last)
        except httpx.HTTPError as error:
            return Ensured("unknown", _text(error))

    async def ensure_absent(self, url: str, timeout_s: float) -> Ensured:
        """Remove it until it is not listed any more."""
        ended = Ensured("unknown", f"no answer within {timeout_s:g} s")
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        answer = await self._http.post("/remove_worker", params={"url": url})
                        if url not in await self.listed():
                            return Ensured("succeeded")
                        ended = Ensured("failed", f"still listed; {_said(answer)}")
                    except (httpx.HTTPError, RouterSilent) as error:
                        ended = Ensured("unknown", _text(error))
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return ended

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()


class VllmPdRouter:
    """vllm-router with prefill and decode roles: its members are those of its command line, and the
    gate of an engine decides whether it is one of them. Nothing is asked of the router."""

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._http = _client(url, transport)
        self._listing = _Listing(self._http, "/workers")

    async def listed(self) -> frozenset[str]:
        """The members that it holds for healthy."""
        return frozenset(url for url, is_healthy in (await self._members()).items() if is_healthy)

    async def ensure_present(self, url: str, timeout_s: float) -> Ensured:
        """Wait until the router has seen its gate open."""
        return await self._watch(url, is_wanted=True, timeout_s=timeout_s)

    async def ensure_absent(self, url: str, timeout_s: float) -> Ensured:
        """Wait until the router has seen its gate closed."""
        return await self._watch(url, is_wanted=False, timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _members(self) -> dict[str, bool]:
        body = await self._listing.read()
        workers = body.get("workers") if isinstance(body, dict) else None
        if not isinstance(workers, list):
            raise _unknown_listing(body)
        try:
            return {_canonical(worker["url"]): bool(worker["is_healthy"]) for worker in workers}
        except (KeyError, TypeError, AttributeError):
            raise _unknown_listing(body) from None

    async def _watch(self, url: str, *, is_wanted: bool, timeout_s: float) -> Ensured:
        ended = Ensured("unknown", f"no listing within {timeout_s:g} s")
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        members = await self._members()
                        if members.get(url, False) is is_wanted:
                            return Ensured("succeeded")
                        if url not in members:
                            return Ensured("failed", "no member: the router was started without it")
                        ended = Ensured("failed", "its check of /ready has not seen it yet")
                    except RouterSilent as error:
                        ended = Ensured("unknown", str(error))
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return ended


class _Listing:
    """Reads a listing. Those who wait at the same time share an answer, never an older one."""

    def __init__(self, http: httpx.AsyncClient, path: str) -> None:
        self._http = http
        self._path = path
        self._lock = asyncio.Lock()
        self._num_asked = 0
        self._num_answered = 0
        self._last: object = None

    async def read(self) -> object:
        """An answer that was asked for after this call. Raises RouterSilent."""
        num_before = self._num_asked
        async with self._lock:
            if self._num_answered <= num_before:
                self._num_asked += 1
                number = self._num_asked
                self._last = await self._get()
                self._num_answered = number
            if isinstance(self._last, RouterSilent):
                raise RouterSilent(str(self._last))
            return self._last

    async def _get(self) -> object:
        try:
            answer = await self._http.get(self._path, timeout=_LIST_TIMEOUT_S)
            answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            return RouterSilent(_text(error))


def _client(url: str, transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
    # Adds may block by the hundred, and must never keep a listing waiting for a connection; each
    # caller has a deadline of its own.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    return httpx.AsyncClient(
        base_url=url, trust_env=False, transport=transport, limits=limits, timeout=None
    )


def _canonical(url: str) -> str:
    try:
        return canonical_url(url)
    except ValueError:
        return url


def _said(answer: httpx.Response) -> str:
    return f"the router said {answer.status_code}: {answer.text[:_MAX_ERROR_TEXT]}"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _unknown_listing(body: object) -> RouterSilent:
    return RouterSilent(f"unknown listing: {str(body)[:_MAX_ERROR_TEXT]}")
