"""Reconciles the router to the set of engines that should serve, for ever.

Rules: at every look the whole wish is compared with the router's own listing, so a router that
forgot everything, one that lies, and an add that comes late are all put right the same way. Each
engine is asked for by itself, beside the loop: one that blocks holds up nobody. A router that
cannot be reached evicts nobody.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from orchestrator.config import ClientConfig
from orchestrator.drivers.admin_http import AdminHttp
from orchestrator.drivers.router_port import (
    Ensured,
    Router,
    RouterSilent,
    VllmPdRouter,
    VllmRouter,
)
from orchestrator.plane.events import MembersListed

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
# While the listing differs from the wish, or may soon, it is looked at more often.
_BUSY_INTERVAL_S = 0.1
_REMOVE_TIMEOUT_S = 2.0
# An add is 10 ms of a router's processor: a hundred at once would all end at the end. One that is
# not done soon waits for its engine, and counts no more.
_MAX_YOUNG_ADDS = 16
_YOUNG_S = 0.1


class Routing(Protocol):
    """Takes the wish of the plane."""

    def want(self, urls: Iterable[str]) -> None:
        """The engines that should serve, by canonical URL."""
        ...

    async def run(self) -> None:
        """Make it so until cancelled."""
        ...


@dataclass(slots=True)
class _Job:
    """What was asked of the router for one engine."""

    wish: Literal["present", "absent"]
    asked_at: float
    task: asyncio.Task[Ensured]
    is_over: bool = False

    def is_young(self, now: float) -> bool:
        """Whether it is an add that the router may still be busy with."""
        is_busy = not self.is_over and self.wish == "present"
        return is_busy and now < self.asked_at + _YOUNG_S


class RouterDriver:
    """`want` sets the wish, `run` makes it so until cancelled."""

    def __init__(
        self,
        router: Router,
        *,
        add_timeout_s: float,
        on_listed: Callable[[MembersListed], None],
    ) -> None:
        self._router = router
        self._add_timeout_s = add_timeout_s
        self._on_listed = on_listed
        self._wish: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._jobs: dict[str, _Job] = {}
        self._problems: dict[str, str] = {}
        self._late_until = 0.0
        self._last: tuple[tuple[str, ...] | None, str] | None = None

    def want(self, urls: Iterable[str]) -> None:
        """The engines that should serve, by canonical URL."""
        wish = frozenset(urls)
        for url in wish ^ self._wish:
            self._drop(url)
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
            for job in self._jobs.values():
                job.task.cancel()

    async def _reconcile(self) -> bool:
        """One look. Whether there is nothing to do and nothing to wait for."""
        try:
            listed = await self._router.listed()
        except RouterSilent as error:
            self._tell(None, str(error))
            # What was asked is lost with it: when it is back it is asked again, and at once.
            for url in list(self._jobs):
                self._drop(url)
            return False
        self._tell(tuple(sorted(listed)), "")
        self._read_results()
        surplus, missing = listed - self._wish, self._wish - listed
        now = _now()
        for url in sorted(surplus):
            self._ask("absent", url, now)
        num_young = sum(job.is_young(now) for job in self._jobs.values())
        for url in sorted(missing):
            if num_young < _MAX_YOUNG_ADDS:
                num_young += self._ask("present", url, now)
        for url in self._jobs.keys() - surplus - missing:
            if self._jobs[url].is_over:
                self._drop(url)
        return not surplus and not missing and now >= self._late_until

    def _ask(self, wish: Literal["present", "absent"], url: str, now: float) -> bool:
        """Whether a job was begun. One an engine at a time, and one in an interval: who is refused
        at once is not asked at every look."""
        old = self._jobs.get(url)  # with the same wish: `want` drops the others
        if old is not None and (not old.is_over or now < old.asked_at + _INTERVAL_S):
            return False
        job = (
            self._router.ensure_present(url, self._add_timeout_s)
            if wish == "present"
            else self._router.ensure_absent(url, _REMOVE_TIMEOUT_S)
        )
        task = asyncio.ensure_future(job)
        task.add_done_callback(lambda _: self._changed.set())
        self._jobs[url] = _Job(wish, now, task)
        return True

    def _read_results(self) -> None:
        for url, job in self._jobs.items():
            if job.is_over or not job.task.done():
                continue
            job.is_over = True
            ended = job.task.result()
            if ended.outcome == "succeeded":
                self._problems.pop(url, None)
            elif self._problems.get(url) != ended.detail:
                self._problems[url] = ended.detail
                log.warning("router: %s not %s: %s", url, job.wish, ended.detail)
            if job.wish == "present" and ended.outcome == "unknown":
                self._expect_late()

    def _drop(self, url: str) -> None:
        job = self._jobs.pop(url, None)
        if job is None or job.is_over:
            return
        job.task.cancel()
        if job.wish == "present":
            self._expect_late()

    def _expect_late(self) -> None:
        """The router may still carry out an add that nobody waits for any more."""
        self._late_until = _now() + self._add_timeout_s

    def _tell(self, urls: tuple[str, ...] | None, error: str) -> None:
        """Only news. The text of one outage may vary; it is told once."""
        if self._last is not None and self._last[0] == urls:
            return
        self._last = (urls, error)
        self._on_listed(MembersListed(urls, error))


class DirectRouting:
    """No router: clients send to the engines themselves, and what is wanted is so at once."""

    def __init__(self) -> None:
        self._urls: tuple[str, ...] = ()

    def want(self, urls: Iterable[str]) -> None:
        """The engines that should serve, by canonical URL."""
        self._urls = tuple(sorted(urls))

    async def run(self) -> None:
        """Nothing to reconcile."""
        await asyncio.Event().wait()

    def url_for(self, session: str) -> str | None:
        """Engine for a session; None while nobody serves."""
        if not self._urls:
            return None
        return self._urls[zlib.crc32(session.encode()) % len(self._urls)]


def make_routing(
    client: ClientConfig, http: AdminHttp, on_listed: Callable[[MembersListed], None]
) -> RouterDriver | DirectRouting:
    """As the config says. `http` sends no token: the router has no business with it."""
    if client.router == "none":
        return DirectRouting()
    kind = VllmPdRouter if client.router == "vllm_pd" else VllmRouter
    return RouterDriver(
        kind(http, client.base_url), add_timeout_s=client.router_timeout_s, on_listed=on_listed
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
