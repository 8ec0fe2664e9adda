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
import json
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import quote

from orchestrator.config import canonical_url
from orchestrator.drivers.admin_http import AdminHttp, NoAnswer, Refused

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


class VllmRouter:
    """vllm-router in regular mode: members come and go over its API."""

    def __init__(self, http: AdminHttp, url: str) -> None:
        self._http = http
        self._url = url
        self._listing = _Listing(http, f"{url}/list_workers")

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
                is_refused, last = await self._ask("/add_worker", url, timeout_s)
                while True:
                    try:
                        if url in await self.listed():
                            return Ensured("succeeded")
                        if is_refused:
                            return Ensured("failed", last)
                    except RouterSilent as error:
                        last = str(error)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            # It is not cancelled over there: it may still be listed later.
            return Ensured("unknown", last)
        except NoAnswer as error:
            return Ensured("unknown", str(error))

    async def ensure_absent(self, url: str, timeout_s: float) -> Ensured:
        """Remove it until it is not listed any more."""
        ended = Ensured("unknown", f"no answer within {timeout_s:g} s")
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        _, said = await self._ask("/remove_worker", url, timeout_s)
                        if url not in await self.listed():
                            return Ensured("succeeded")
                        ended = Ensured("failed", f"still listed; {said}")
                    except (NoAnswer, RouterSilent) as error:
                        ended = Ensured("unknown", str(error))
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return ended

    async def _ask(self, path: str, url: str, timeout_s: float) -> tuple[bool, str]:
        """Whether the router said no, and its words. Raises NoAnswer."""
        address = f"{self._url}{path}?url={quote(url, safe='')}"
        try:
            answer = await self._http.call("POST", address, timeout_s=timeout_s)
        except Refused as error:
            return True, f"the router said {error}"
        return False, f"the router said {answer.decode(errors='replace')[:_MAX_ERROR_TEXT]}"


class VllmPdRouter:
    """vllm-router with prefill and decode roles: its members are those of its command line, and the
    gate of an engine decides whether it is one of them. Nothing is asked of the router."""

    def __init__(self, http: AdminHttp, url: str) -> None:
        self._listing = _Listing(http, f"{url}/workers")

    async def listed(self) -> frozenset[str]:
        """The members that it holds for healthy."""
        return frozenset(url for url, is_healthy in (await self._members()).items() if is_healthy)

    async def ensure_present(self, url: str, timeout_s: float) -> Ensured:
        """Wait until the router has seen its gate open."""
        return await self._watch(url, is_wanted=True, timeout_s=timeout_s)

    async def ensure_absent(self, url: str, timeout_s: float) -> Ensured:
        """Wait until the router has seen its gate closed."""
        return await self._watch(url, is_wanted=False, timeout_s=timeout_s)

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

    def __init__(self, http: AdminHttp, url: str) -> None:
        self._http = http
        self._url = url
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
            return json.loads(await self._http.call("GET", self._url, timeout_s=_LIST_TIMEOUT_S))
        except (NoAnswer, Refused) as error:
            return RouterSilent(str(error))
        except ValueError as error:
            return RouterSilent(f"the listing does not parse: {error}")


def _canonical(url: str) -> str:
    try:
        return canonical_url(url)
    except ValueError:
        return url


def _unknown_listing(body: object) -> RouterSilent:
    return RouterSilent(f"unknown listing: {str(body)[:_MAX_ERROR_TEXT]}")
