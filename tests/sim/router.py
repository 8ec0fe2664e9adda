"""vllm-router and what `drivers/router.py` makes of it: list, remove the surplus, add what is missing."""  # noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.plane.events import MembersListed

if TYPE_CHECKING:
    from tests.sim.world import World

_INTERVAL_S = 1.0
_BUSY_INTERVAL_S = 0.1
_ADD_TIMEOUT_S = 2.0


class Router:
    """The process: `listed` is what it has; it forgets all when it ends."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_up = True
        self.listed: dict[str, None] = {}

    def fail(self) -> None:
        """The router's process ends."""
        self.is_up = False
        self.listed.clear()

    def add(self, url: str, limit: float) -> None:
        """An add waits until the engine's `/ready` says yes."""
        world = self.world
        engine = world.at_url.get(url)
        if not self.is_up or world.loop.now > limit:
            return
        if engine is not None and engine.is_alive and engine.lease_until > world.loop.now:
            self.listed[url] = None
        else:
            world.loop.at(world.loop.now + 0.2, self.add, url, limit)

    def remove(self, url: str) -> None:
        """Always done."""
        self.listed.pop(url, None)


class Routing:
    """The orchestrator's end of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._wish: tuple[str, ...] = ()
        self._asked_until: dict[str, float] = {}
        self._last: tuple[str, ...] | None = ()
        self._turn = 0

    def start(self) -> None:
        """Reconcile from now on."""
        self._look(self._turn)

    def want(self, urls: tuple[str, ...]) -> None:
        """The engines that should serve."""
        if urls != self._wish:
            self._wish = urls
            self._turn += 1
            self.world.loop.ours(self.world.loop.now, self._look, self._turn)

    def close(self) -> None:
        """Nobody reconciles any more."""
        self._turn = -1

    def _look(self, turn: int) -> None:
        if turn != self._turn:
            return
        loop, router = self.world.loop, self.world.router
        self._tell(tuple(sorted(router.listed)) if router.is_up else None)
        wait_s = _BUSY_INTERVAL_S
        if router.is_up and not self._reconcile():
            wait_s = _INTERVAL_S
        self._turn += 1
        loop.ours(loop.now + wait_s, self._look, self._turn)

    def _reconcile(self) -> bool:
        """Whether the listing differs from the wish."""
        loop, router = self.world.loop, self.world.router
        surplus = sorted(url for url in router.listed if url not in self._wish)
        missing = [url for url in self._wish if url not in router.listed]
        for url in surplus:
            loop.at(loop.now + self.world.latency(), router.remove, url)
        for url in missing:
            if self._asked_until.get(url, -1.0) < loop.now:
                self._asked_until[url] = loop.now + _ADD_TIMEOUT_S
                router.add(url, loop.now + _ADD_TIMEOUT_S)
        return bool(surplus or missing)

    def _tell(self, urls: tuple[str, ...] | None) -> None:
        if urls != self._last:
            self._last = urls
            self.world.post(MembersListed(urls, "" if urls is not None else "connection refused"))
