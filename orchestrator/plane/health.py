"""Health of one engine, from its probes. Pure.

    unknown --success_threshold answers--> ready --first miss--> not_ready
    not_ready --answers--> ready;  not_ready --failure_threshold misses in a row--> failed
    failed --success_threshold answers--> ready

Rules: a failed engine is probed for ever, with growing waits, since a restart on the same address
must be noticed. Only news is told: becoming ready, failing, being stuck, and changes of what the
engine says of itself; a pause that lasts is told again, each time after twice the wait, since it
may outlive the update that it was heard in. An engine that was never ready does not fail: its
launch has a deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.plane.events import EngineAnswered, EngineSilent, EngineStuck
from protocol.ids import Slot

Health = Literal["unknown", "ready", "not_ready", "failed"]
News = EngineAnswered | EngineSilent | EngineStuck


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Thresholds count probes in a row; times are seconds."""

    interval_s: float = 1.0
    retry_s: float = 0.1
    backoff_max_s: float = 10.0
    success_threshold: int = 1
    failure_threshold: int = 3
    stall_timeout_s: float = 60.0
    core_hung_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """What one probe saw. `answer` is the engine's view of itself; the rest tells whether it
    moves: seconds since its core answered, requests it runs, tokens it has made since boot."""

    answer: EngineAnswered
    core_age_s: float
    running_requests: int
    generated_tokens: int


class EngineHealth:
    """One probe slot. Feed it each probe's outcome; `next_probe_at` says when to ask again."""

    def __init__(self, settings: ProbeSettings, slot: Slot, life: int, now: float) -> None:
        self.health: Health = "unknown"
        self.next_probe_at = now
        self.life = life
        self.last_error = ""
        self.last_sighting: Sighting | None = None
        self.num_misses = 0
        self._settings = settings
        self._slot = slot
        self._num_answers = 0
        self._told: tuple[object, ...] | None = None
        self._moved_at = now
        self._told_at = now
        self._pause_wait_s = settings.interval_s
        self._stuck_boot: str | None = None

    def answered(self, now: float, sighting: Sighting) -> News | None:
        """The engine answered as one of ours, of this life or a later one."""
        settings = self._settings
        self.num_misses = 0
        self._num_answers += 1
        self.next_probe_at = now + settings.interval_s
        if self.health != "ready":
            if self._num_answers < settings.success_threshold:
                self.next_probe_at = now + settings.retry_s
                return None
            self.health = "ready"
        previous, self.last_sighting = self.last_sighting, sighting
        answer = sighting.answer
        facts = (answer.boot_id, answer.life, answer.weight_version, answer.paused)
        is_again = facts == self._told
        if not is_again or (answer.paused and now >= self._told_at + self._pause_wait_s):
            self._pause_wait_s = 2 * self._pause_wait_s if is_again else self._settings.interval_s
            self._told_at = now
            if self._told is None or self._told[0] != answer.boot_id:
                self._moved_at = now
            self._told = facts
            return answer
        return self._stuck(now, sighting, previous)

    def missed(self, now: float, error: str) -> News | None:
        """No answer, a wrong answer, or an answer of somebody else."""
        settings = self._settings
        self.last_error = error
        self._num_answers = 0
        self.num_misses += 1
        if self.health in ("unknown", "failed"):
            doublings = min(max(self.num_misses - settings.failure_threshold, 0), 16)
            wait_s = settings.interval_s * 2.0**doublings if self.health == "failed" else 0.0
            self.next_probe_at = now + min(max(wait_s, settings.retry_s), settings.backoff_max_s)
            return None
        self.next_probe_at = now + settings.retry_s
        if self.num_misses < settings.failure_threshold:
            self.health = "not_ready"
            return None
        self.health = "failed"
        self._told = None
        return EngineSilent(self._slot, self.life, error)

    def _stuck(self, now: float, sighting: Sighting, previous: Sighting | None) -> News | None:
        answer = sighting.answer
        moves = (
            previous is None
            or sighting.generated_tokens != previous.generated_tokens
            or sighting.running_requests == 0
            or answer.paused
        )
        if moves:
            self._moved_at = now
        if self._stuck_boot == answer.boot_id:
            return None
        if sighting.core_age_s > self._settings.core_hung_s:
            self._stuck_boot = answer.boot_id
            detail = f"engine core silent for {sighting.core_age_s:.1f} s"
            return EngineStuck(self._slot, answer.boot_id, "core_hung", detail)
        idle_s = now - self._moved_at
        if idle_s > self._settings.stall_timeout_s:
            self._stuck_boot = answer.boot_id
            detail = f"{sighting.running_requests} requests and no token for {idle_s:.1f} s"
            return EngineStuck(self._slot, answer.boot_id, "engine_stalled", detail)
        return None
