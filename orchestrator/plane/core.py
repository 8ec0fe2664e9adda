"""The AdminPlane's decisions: `handle(now, event) -> commands`. Pure and deterministic.

Rules: one writer calls `handle`; the core never blocks, logs, reads a clock or makes an id that is
not a counter. A group state lives in `fleet.py`, an update in `update.py`, the health of one engine
in `health.py` (fed by the prober, which tells the core only news).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import assert_never

from orchestrator.plane.commands import Command, Fail, GroupState
from orchestrator.plane.events import (
    BroadcastReady,
    Deadline,
    EngineAnswered,
    EngineSilent,
    EngineStuck,
    Event,
    GroupLaunched,
    MembersListed,
    OpFailed,
    OpSucceeded,
    OpUnknown,
    Restarted,
)
from orchestrator.plane.fleet import Fleet
from orchestrator.plane.state import Group, Phase, PlaneMemory, PlaneSettings, Update, members_of
from orchestrator.plane.update import Updates
from protocol.ids import Slot


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    """One engine as the core sees it."""

    engine_id: str
    url: str
    boot_id: str
    is_ready: bool
    weight_version: int | None


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """One group as the core sees it. `since` is on the core's clock."""

    number: int
    state: GroupState
    since: float
    reason: str
    detail: str
    life: int
    version: int | None
    num_evictions: int
    members: tuple[MemberSnapshot, ...]


@dataclass(frozen=True, slots=True)
class PlaneSnapshot:
    """Everything that people and the other rooms may know."""

    policy_version: int | None
    generation: int
    has_capacity: bool
    router_error: str
    update_version: int | None
    update_phase: Phase | None
    groups: tuple[GroupSnapshot, ...]

    @property
    def num_admitted(self) -> int:
        """Groups that serve."""
        return sum(group.state == "admitted" for group in self.groups)


class PlaneCore:
    """Feed it what happened, carry out what it returns. `urls[i]` belongs to `groups[i]`."""

    def __init__(
        self, settings: PlaneSettings, urls: Sequence[str], groups: Sequence[int], now: float
    ) -> None:
        self._settings = settings
        self._fleet = Fleet(settings, list(urls), list(groups), now)
        self._updates = Updates(self._fleet, now)
        self._router_error = ""
        self._now = now
        self._short_since: float | None = now
        self._has_failed = False

    @classmethod
    def from_memory(cls, settings: PlaneSettings, memory: PlaneMemory) -> PlaneCore:
        """A core that goes on exactly where the one that had this memory stopped. `memory` is not
        copied. In another process, the first event is `Restarted`."""
        members = members_of(memory.groups.values())
        core = cls(settings, [m.url for m in members], [m.slot.group for m in members], memory.now)
        fleet, updates = core._fleet, core._updates
        fleet.out.clear()
        fleet.groups = memory.groups
        fleet.last_op_id = memory.last_op_id
        fleet.phase = memory.update.phase if memory.update is not None else None
        updates.update = memory.update
        updates.generation = memory.generation
        updates.policy_version = memory.policy_version
        updates.ready_version = memory.ready_version
        updates.trainer_boot = memory.trainer_boot
        updates.is_trainer_known = memory.is_trainer_known
        updates.num_failures = memory.num_failures
        updates.retry_at = memory.retry_at
        updates.first_candidate_at = memory.first_candidate_at
        core._router_error = memory.router_error
        core._short_since = memory.short_since
        core._has_failed = memory.has_failed
        return core

    def memory(self) -> PlaneMemory:
        """A copy of everything that is remembered."""
        fleet, updates = self._fleet, self._updates
        assert not fleet.out, "commands have not been handed over"
        return deepcopy(
            PlaneMemory(
                now=self._now,
                groups=fleet.groups,
                last_op_id=fleet.last_op_id,
                update=updates.update,
                generation=updates.generation,
                policy_version=updates.policy_version,
                ready_version=updates.ready_version,
                trainer_boot=updates.trainer_boot,
                is_trainer_known=updates.is_trainer_known,
                num_failures=updates.num_failures,
                retry_at=updates.retry_at,
                first_candidate_at=updates.first_candidate_at,
                router_error=self._router_error,
                short_since=self._short_since,
                has_failed=self._has_failed,
            )
        )

    def handle(self, now: float, event: Event) -> list[Command]:
        """Commands that follow from `event` at `now` (seconds, never going back)."""
        self._now = now
        self._dispatch(now, event)
        self._fleet.settle(now)
        self._updates.reconcile(now)
        self._check_capacity(now)
        commands, self._fleet.out = self._fleet.out, []
        return commands

    def next_deadline(self) -> float | None:
        """When to call `handle(now, Deadline())` if nothing happens before."""
        deadlines = [*self._fleet.next_deadline(), *self._updates.next_deadline()]
        if self._short_since is not None and not self._has_failed:
            deadlines.append(self._short_since + self._patience_s())
        # What was due by now is done, or waits for an event: asking again would be a busy loop.
        return min((deadline for deadline in deadlines if deadline > self._now), default=None)

    def url_of(self, slot: Slot) -> str:
        """Where the engine at `slot` is now."""
        return self._fleet.member(slot).url

    def snapshot(self) -> PlaneSnapshot:
        """The state, for people and for the rooms that follow it."""
        update = self._updates.update
        return PlaneSnapshot(
            policy_version=self._updates.policy_version,
            generation=self._updates.generation.number,
            has_capacity=self._short_since is None,
            router_error=self._router_error,
            update_version=update.version if update else None,
            update_phase=update.phase if update else None,
            groups=tuple(
                GroupSnapshot(
                    group.number,
                    group.state,
                    group.since,
                    group.reason,
                    group.detail,
                    group.life,
                    group.version,
                    group.num_evictions,
                    tuple(
                        MemberSnapshot(
                            m.slot.engine_id, m.url, m.boot_id, m.ready, m.weight_version
                        )
                        for m in group.members
                    ),
                )
                for group in self._fleet.groups.values()
            ),
        )

    def _dispatch(self, now: float, event: Event) -> None:
        match event:
            case EngineAnswered():
                self._fleet.answered(now, event)
            case EngineSilent():
                self._fleet.silent(now, event)
            case EngineStuck():
                self._fleet.stuck(now, event)
            case GroupLaunched():
                self._fleet.launched(now, event)
            case BroadcastReady():
                self._updates.broadcast_ready(now, event)
            case OpSucceeded() | OpFailed() | OpUnknown():
                self._updates.completed(now, event)
            case MembersListed():
                self._router_error = event.error if event.urls is None else ""
            case Restarted():
                self._restarted(now, event)
            case Deadline():
                pass
            case _:
                assert_never(event)

    def _restarted(self, now: float, event: Restarted) -> None:
        kept = _kept_versions(self._updates.update, self._fleet.groups.values())
        self._fleet.restarted(now, kept, event.urls)
        self._updates.restarted(now)
        self._router_error = ""
        self._short_since = now
        self._has_failed = False

    def _patience_s(self) -> float:
        settings = self._settings
        if self._updates.policy_version is None:
            return max(settings.startup_timeout_s, settings.no_capacity_timeout_s)
        return settings.no_capacity_timeout_s

    def _check_capacity(self, now: float) -> None:
        fleet = self._fleet
        if len(fleet.admitted()) >= self._settings.min_serving_groups:
            self._short_since = None
            return
        if self._short_since is None:
            self._short_since = now
        waited = now >= self._short_since + self._patience_s()
        is_hopeless = all(group.given_up for group in fleet.groups.values())
        if (waited or is_hopeless) and not self._has_failed:
            self._has_failed = True
            fleet.out.append(Fail(self._causes(now, is_hopeless)))

    def _causes(self, now: float, is_hopeless: bool) -> str:
        why = (
            "no group will be started again"
            if is_hopeless
            else f"fewer than {self._settings.min_serving_groups} groups have served for "
            f"{self._patience_s():g} s"
        )
        rows = [
            f"  g{group.number}  {group.state} for {now - group.since:.0f} s, life {group.life}, "
            f"evicted {group.num_evictions} times; last: {group.reason or '-'} {group.detail}"
            for group in self._fleet.groups.values()
        ]
        return "\n".join([f"no capacity: {why}", *rows])


def _kept_versions(update: Update | None, groups: Iterable[Group]) -> dict[int, int]:
    """By group, the version that it holds for certain, if the orchestrator restarts now."""
    kept: dict[int, int] = {}
    for group in groups:
        version = group.version if group.is_routed else group.kept
        if update is not None and group.number in update.targets:
            if update.phase == "commit":
                version = None
            elif update.phase in ("verify", "admit"):
                version = update.version
        if version is not None:
            kept[group.number] = version
    return kept
