"""Reconciles vllm-router to the set of engines that should serve, for ever.

Rules (measured on vllm-router 0.1.17): only its own listing is believed; an add blocks until the
worker's `/ready` answers, so adds run beside the loop and never hold up a removal; a removal always
says 200; URLs are compared as strings. Nothing survives its restart: the loop puts it back.
A router that cannot be reached evicts nobody.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable

import httpx

from orchestrator.plane.events import MembersListed

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
# While the listing differs from the wish it is looked at more often.
_BUSY_INTERVAL_S = 0.1
_LIST_TIMEOUT_S = 2.0


class RouterDriver:
    """`want` sets the wish, `run` makes it so until cancelled."""

    def __init__(
        self,
        url: str,
        *,
        add_timeout_s: float,
        on_listed: Callable[[MembersListed], None],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(base_url=url, trust_env=False, transport=transport)
        self._add_timeout_s = add_timeout_s
        self._on_listed = on_listed
        self._wish: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._adding: dict[str, asyncio.Task[None]] = {}
        self._asked_at: dict[str, float] = {}
        self._last: tuple[tuple[str, ...] | None, str] | None = None

    def want(self, urls: Iterable[str]) -> None:
        """The engines that should serve, by canonical URL."""
        wish = frozenset(urls)
        for url in wish - self._wish:
            self._asked_at.pop(url, None)
        self._wish = wish
        self._changed.set()

    async def run(self) -> None:
        """Reconcile until cancelled."""
        try:
            while True:
                self._changed.clear()
                is_settled = await self._reconcile()
                try:
                    async with asyncio.timeout(_INTERVAL_S if is_settled else _BUSY_INTERVAL_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            for task in self._adding.values():
                task.cancel()
            await self._http.aclose()

    async def _reconcile(self) -> bool:
        listed = await self._list()
        if listed is None:
            return True
        wish = self._wish
        surplus = sorted(listed - wish)
        missing = sorted(wish - listed)
        for url, task in list(self._adding.items()):
            if task.done():
                del self._adding[url]
            elif url not in wish:
                # The router itself may still add it; then the next listing shows a surplus.
                task.cancel()
        for url in surplus:
            await self._ask("/remove_worker", url, _LIST_TIMEOUT_S)
        now = asyncio.get_running_loop().time()
        for url in missing:
            # An add that was refused at once is asked for again, but not at every look.
            is_fresh = now >= self._asked_at.get(url, -math.inf) + _INTERVAL_S
            if url not in self._adding and is_fresh:
                self._asked_at[url] = now
                self._adding[url] = asyncio.create_task(
                    self._ask("/add_worker", url, self._add_timeout_s)
                )
        return not surplus and not missing

    async def _list(self) -> set[str] | None:
        try:
            answer = await self._http.get("/list_workers", timeout=_LIST_TIMEOUT_S)
            answer.raise_for_status()
            urls = set(_urls(answer.json()))
        except (httpx.HTTPError, ValueError) as error:
            self._tell(None, f"{type(error).__name__}: {error}")
            return None
        self._tell(tuple(sorted(urls)), "")
        return urls

    def _tell(self, urls: tuple[str, ...] | None, error: str) -> None:
        """Only news. The text of one outage may vary; it is told once."""
        if self._last is not None and self._last[0] == urls:
            return
        self._last = (urls, error)
        self._on_listed(MembersListed(urls, error))

    async def _ask(self, path: str, url: str, timeout_s: float) -> None:
        """The listing tells whether it worked; the answer is only worth a log line."""
        try:
            answer = await self._http.post(path, params={"url": url}, timeout=timeout_s)
        except httpx.HTTPError as error:
            log.info("router %s %s: %s %s", path, url, type(error).__name__, error)
            return
        if not answer.is_success:
            log.info("router %s %s: %d %s", path, url, answer.status_code, answer.text[:300])


def _urls(body: object) -> list[str]:
    """URLs in an answer of /list_workers. Raises ValueError for another shape."""
    urls = body.get("urls") if isinstance(body, dict) else None
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise ValueError(f"unknown answer of /list_workers: {str(body)[:200]}")
    return urls
