"""What `drivers/prober.py` does: asks every engine through the real EngineHealth, renews leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.plane.commands import Probe, RouteEntry
from orchestrator.plane.events import EngineAnswered
from orchestrator.plane.health import EngineHealth, ProbeSettings, Sighting
from protocol.ids import Slot
from tests.sim.engine import Engine

if TYPE_CHECKING:
    from tests.sim.world import World


class Watch:
    """The probing of one slot since the last Probe command."""

    __slots__ = ("health", "holds_gate", "is_over", "is_waiting", "slot", "turn", "url")

    def __init__(self, slot: Slot, url: str, health: EngineHealth) -> None:
        self.slot = slot
        self.url = url
        self.health = health
        self.is_over = False
        self.holds_gate = False
        self.turn = 0
        self.is_waiting = False


class Prober:
    """One watch a slot."""

    def __init__(self, world: World, settings: ProbeSettings, timeout_s: float) -> None:
        self.world = world
        self._settings = settings
        self._timeout_s = timeout_s
        self._watches: dict[Slot, Watch] = {}
        self._serving: dict[Slot, RouteEntry] = {}
        self._refused: dict[Slot, RouteEntry] = {}

    def watch(self, command: Probe) -> None:
        """Start over with this slot."""
        self._end(command.slot)
        health = EngineHealth(self._settings, command.slot, command.life, self.world.loop.now)
        watch = self._watches[command.slot] = Watch(command.slot, command.url, health)
        self._schedule(watch, watch.health.next_probe_at)

    def serve(self, entries: tuple[RouteEntry, ...]) -> None:
        """Whose leases are renewed from now on; who refused the last renewal is asked at once."""
        self._serving = {entry.slot: entry for entry in entries}
        self._ask_anew()

    def close(self) -> None:
        """Nobody is asked any more."""
        for watch in self._watches.values():
            watch.is_over = True

    def _end(self, slot: Slot) -> None:
        old = self._watches.get(slot)
        if old is not None:
            old.is_over = True
            self._release(old)

    def _release(self, watch: Watch) -> None:
        if watch.holds_gate:
            watch.holds_gate = False
            self.world.client.gates.release(watch.slot)

    def _schedule(self, watch: Watch, at: float) -> None:
        """The question leaves at that time; only its arrival is an event."""
        world = self.world
        asked_at = max(at, world.loop.now)
        engine = world.at_url.get(watch.url)
        slow_s = engine.slow_s if engine is not None else 0.0
        watch.turn += 1
        watch.is_waiting = True
        arrives_at = asked_at + world.latency() + slow_s
        world.loop.ours(arrives_at, self._arrived, watch, watch.turn, asked_at)

    def _arrived(self, watch: Watch, turn: int, asked_at: float) -> None:
        if watch.is_over or turn != watch.turn:
            return
        watch.is_waiting = False
        world = self.world
        loop = world.loop
        engine = world.at_url.get(watch.url)
        limit = max(asked_at + self._timeout_s, loop.now)
        if engine is None or not engine.is_alive:
            loop.ours(loop.now + world.latency(), self._heard, watch, None, "connection refused")
        elif engine.is_frozen or engine.is_cut:
            loop.timer(limit, self._heard, watch, None, "no answer in time")
        elif engine.life < watch.health.life:
            error = f"it is of life {engine.life}, expected {watch.health.life} or later"
            loop.ours(loop.now + world.latency(), self._heard, watch, None, error)
        else:
            back_at = loop.now + world.latency() + engine.slow_s
            if back_at > asked_at + self._timeout_s:
                loop.timer(limit, self._heard, watch, None, "no answer in time")
            else:
                sighting = _sighting(engine, asked_at, loop.now)
                loop.ours(back_at, self._heard, watch, sighting, "")

    def _heard(self, watch: Watch, sighting: Sighting | None, error: str) -> None:
        if watch.is_over:
            return
        world = self.world
        health = watch.health
        if sighting is None:
            news = health.missed(world.loop.now, error)
        else:
            news = health.answered(world.loop.now, sighting)
        if news is not None:
            world.post(news)
        entry = self._serving.get(watch.slot)
        if sighting is not None and health.health == "ready" and entry is not None:
            world.client.gates.acquire(watch.slot, lambda: self._renew(watch, entry))
        else:
            self._schedule(watch, health.next_probe_at)

    def _renew(self, watch: Watch, entry: RouteEntry) -> None:
        world = self.world
        watch.holds_gate = True
        if watch.is_over:
            self._release(watch)
        elif self._serving.get(watch.slot) != entry:
            self._renewed(watch, entry, True)
        else:
            engine = world.at_url.get(world.core.url_of(watch.slot))
            now = world.loop.now
            arrives_at = now + world.latency() + (engine.slow_s if engine is not None else 0.0)
            world.loop.at(arrives_at, self._renewal_arrived, watch, entry, engine, now)

    def _renewal_arrived(
        self, watch: Watch, entry: RouteEntry, engine: Engine | None, sent_at: float
    ) -> None:
        """Also when the watch is over: what was sent is not called back."""
        loop = self.world.loop
        is_reached = engine is not None and engine.is_alive and not engine.is_cut
        is_taken = True
        if is_reached:
            assert engine is not None
            is_taken = engine.renew(entry)
        is_silent = engine is not None and engine.is_alive and (engine.is_frozen or engine.is_cut)
        if is_silent:
            loop.timer(
                max(sent_at + self._timeout_s, loop.now), self._renewed, watch, entry, is_taken
            )
        else:
            loop.ours(loop.now + self.world.latency(), self._renewed, watch, entry, is_taken)

    def _renewed(self, watch: Watch, entry: RouteEntry, is_taken: bool) -> None:
        if watch.is_over:
            return
        self._release(watch)
        self._schedule(watch, watch.health.next_probe_at)
        if not is_taken:
            self._refused[watch.slot] = entry
            self._ask_anew()

    def _ask_anew(self) -> None:
        for slot, refused in list(self._refused.items()):
            if self._serving.get(slot) != refused:
                del self._refused[slot]
                watch = self._watches[slot]
                if watch.is_waiting:
                    self._schedule(watch, self.world.loop.now)


def _sighting(engine: Engine, asked_at: float, now: float) -> Sighting:
    answer = EngineAnswered(
        slot=engine.slot,
        asked_at=asked_at,
        boot_id=engine.boot_id,
        life=engine.life,
        world_size=engine.world_size,
        weight_version=engine.version,
        paused=engine.is_paused,
    )
    return Sighting(answer, engine.core_age_s(now), engine.num_running(), engine.num_tokens(now))
