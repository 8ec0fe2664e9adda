"""Planted bugs: wrong cores that the simulator must catch, or it checks nothing.

Each is a patch of one decision of `orchestrator/plane`, as somebody could have written it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from orchestrator.plane import core as core_module
from orchestrator.plane.commands import Fence, Pause, Relaunch
from orchestrator.plane.events import BroadcastReady, EngineAnswered, OpSucceeded
from orchestrator.plane.fleet import Fleet
from orchestrator.plane.state import Group, Update, members_of
from orchestrator.plane.update import Updates

Patch = contextlib.AbstractContextManager[Any]

MUTANTS: dict[str, Callable[[], Patch]] = {}


def _mutant(make: Callable[[], Patch]) -> Callable[[], Patch]:
    MUTANTS[make.__name__] = make
    return make


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """The core has that bug within the block; None: it is as it is."""
    with MUTANTS[name]() if name is not None else contextlib.nullcontext():
        yield


def _after(owner: type, name: str, then: Callable[..., None]) -> Patch:
    """`then(self, *args)` after the method."""
    real = getattr(owner, name)

    def method(self: Any, *args: Any) -> Any:
        result = real(self, *args)
        then(self, *args)
        return result

    return mock.patch.object(owner, name, method)


def _before(owner: type, name: str, first: Callable[..., None]) -> Patch:
    """`first(self, *args)` before the method."""
    real = getattr(owner, name)

    def method(self: Any, *args: Any) -> Any:
        first(self, *args)
        return real(self, *args)

    return mock.patch.object(owner, name, method)


def _instead(owner: type, name: str, method: Callable[..., Any]) -> Patch:
    return mock.patch.object(owner, name, method)


def _drop_commands(fleet: Fleet, kind: type) -> None:
    fleet.out[:] = [command for command in fleet.out if not isinstance(command, kind)]


# -- the gate


@_mutant
def version_is_not_read_back() -> Patch:
    real = Updates._next_phase

    def method(self: Updates, now: float, update: Update) -> None:
        if update.phase == "commit":
            self._enter(now, update, "admit")
        else:
            real(self, now, update)

    return _instead(Updates, "_next_phase", method)


@_mutant
def any_version_is_good_enough() -> Patch:
    real = Updates._succeeded

    def method(self: Updates, now: float, update: Update, slot: Any, result: Any) -> None:
        if update.phase != "verify":
            real(self, now, update, slot, result)

    return _instead(Updates, "_succeeded", method)


@_mutant
def a_failed_commit_is_good_enough() -> Patch:
    real = Updates.completed

    def method(self: Updates, now: float, event: Any) -> None:
        if self.update is not None and self.update.phase == "commit":
            event = OpSucceeded(event.op_id)
        real(self, now, event)

    return _instead(Updates, "completed", method)


@_mutant
def policy_moves_before_the_commit() -> Patch:
    def early(self: Updates, now: float, update: Update, phase: str) -> None:
        if phase == "commit":
            self._put_in_service(now, update)

    return _before(Updates, "_enter", early)


@_mutant
def nobody_is_resumed() -> Patch:
    real = Updates._next_phase

    def method(self: Updates, now: float, update: Update) -> None:
        if update.phase == "admit":
            self._put_in_service(now, update)
            self._enter(now, update, "finish")
        else:
            real(self, now, update)

    return _instead(Updates, "_next_phase", method)


# -- evictions


@_mutant
def an_eviction_forgets_the_router() -> Patch:
    real = Fleet.route

    def method(self: Fleet, reason: str) -> None:
        if not reason.startswith("evict"):
            real(self, reason)

    return _instead(Fleet, "route", method)


@_mutant
def an_eviction_fences_nobody() -> Patch:
    return _after(Fleet, "evict", lambda self, *_: _drop_commands(self, Fence))


@_mutant
def an_eviction_fences_only_the_first_member() -> Patch:
    def first_only(self: Fleet, *_: Any) -> None:
        self.out[:] = [c for c in self.out if not (isinstance(c, Fence) and c.slot.index > 0)]

    return _after(Fleet, "evict", first_only)


@_mutant
def an_eviction_asks_for_no_relaunch() -> Patch:
    return _after(Fleet, "evict", lambda self, *_: _drop_commands(self, Relaunch))


@_mutant
def candidates_may_be_silent() -> Patch:
    real = Fleet.silent

    def method(self: Fleet, now: float, event: Any) -> None:
        if self.groups[event.slot.group].state == "admitted":
            real(self, now, event)

    return _instead(Fleet, "silent", method)


@_mutant
def stuck_engines_stay() -> Patch:
    return _instead(Fleet, "stuck", lambda *_: None)


@_mutant
def boot_ids_are_forgotten() -> Patch:
    def forget(self: Fleet, _now: float, event: EngineAnswered) -> None:
        self.member(event.slot).boot_id = event.boot_id

    return _before(Fleet, "answered", forget)


@_mutant
def old_answers_are_believed_after_an_eviction() -> Patch:
    def forget(_self: Fleet, _now: float, group: Group, *_: Any) -> None:
        group.believed_from = -math.inf

    return _after(Fleet, "evict", forget)


@_mutant
def a_pause_between_updates_is_overlooked() -> Patch:
    def forget(self: Fleet, _now: float, event: EngineAnswered) -> None:
        self.groups[event.slot.group].resumed_at = math.inf

    return _before(Fleet, "answered", forget)


@_mutant
def candidates_are_not_fenced_with_the_pause() -> Patch:
    def forget(self: Updates, *_: Any) -> None:
        if any(isinstance(command, Pause) for command in self.fleet.out):
            assert self.update is not None
            fences = {c.op_id for c in self.fleet.out if isinstance(c, Fence)}
            pending = self.update.pending
            _drop_commands(self.fleet, Fence)
            self.update.pending = {op: slot for op, slot in pending.items() if op not in fences}

    return _after(Updates, "_commands", forget)


# -- generations


@_mutant
def a_collective_is_repeated() -> Patch:
    def again(self: Updates, now: float, update: Update) -> None:
        self._enter(now, update, "stage")

    return _instead(Updates, "_regroup", again)


@_mutant
def a_dead_generation_is_used_again() -> Patch:
    return _instead(Updates, "_kill_generation", lambda _self: None)


@_mutant
def generation_numbers_repeat() -> Patch:
    real = Updates._open

    def method(self: Updates, now: float, update: Update) -> None:
        from dataclasses import replace

        number = max(self.generation.number - (self.generation.number > 1), 0)
        self.generation = replace(self.generation, number=number)
        real(self, now, update)

    return _instead(Updates, "_open", method)


@_mutant
def new_boots_need_not_join() -> Patch:
    def method(self: Updates, groups: list[Group]) -> bool:
        slots = tuple(member.slot for member in members_of(groups))
        return slots == tuple(slot for slot, _ in self.generation.members)

    return _instead(Updates, "_is_live", method)


@_mutant
def every_engine_is_one_rank() -> Patch:
    def narrow(self: Fleet, _now: float, event: EngineAnswered) -> None:
        self.member(event.slot).world_size = 1

    return _after(Fleet, "answered", narrow)


# -- the trainer, time, restarts


@_mutant
def a_new_trainer_at_the_same_version_is_ignored() -> Patch:
    def forget(self: Updates, _now: float, event: BroadcastReady) -> None:
        if self.ready_version == self.policy_version:
            self.ready_version = None

    return _after(Updates, "broadcast_ready", forget)


@_mutant
def nobody_watches_the_time_of_an_update() -> Patch:
    real = Updates._new

    def method(self: Updates, *args: Any) -> Update:
        update = real(self, *args)
        update.deadline = update.transfer_deadline = math.inf
        return update

    return _instead(Updates, "_new", method)


@_mutant
def op_ids_repeat_after_a_restart() -> Patch:
    def forget(self: Fleet, *_: Any) -> None:
        self.last_op_id = max(self.last_op_id - 5, 0)

    return _before(Fleet, "restarted", forget)


@_mutant
def a_commit_in_flight_is_assumed_after_a_restart() -> Patch:
    real = core_module._kept_versions

    def kept(update: Update | None, groups: Any) -> dict[int, int]:
        found = real(update, list(groups))
        if update is not None and update.phase == "commit":
            found |= dict.fromkeys(update.targets, update.version)
        return found

    return mock.patch.object(core_module, "_kept_versions", kept)
