"""The invariants of protocol.md section 7, asserted after each event that the core handles.

The checks know only what the core was told and what it commanded, and what is true in the world.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.plane.commands import (
    Admit,
    Command,
    Commit,
    Finish,
    Join,
    Op,
    Open,
    Report,
    Route,
    Send,
    Stage,
    UpdateEnded,
)
from orchestrator.plane.events import OpFailed, OpSucceeded, OpUnknown, Restarted
from protocol.ids import Slot

if TYPE_CHECKING:
    from tests.helpers.plane_world import World

_MOVES = {
    "starting": {"candidate", "evicted", "quarantined"},
    "candidate": {"admitted", "evicted", "quarantined"},
    "admitted": {"evicted", "quarantined"},
    "evicted": {"candidate", "starting"},
    "quarantined": {"evicted", "starting"},
}


@dataclass(slots=True)
class Checks:
    """`check` after every `handle`."""

    op_ids: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    ops: dict[int, Op] = field(default_factory=dict)
    last_generation: int = 0
    members: dict[int, dict[Slot, str]] = field(default_factory=dict)
    proven: dict[Slot, tuple[str, int]] = field(default_factory=dict)
    proven_by: dict[Slot, int] = field(default_factory=dict)
    tainted: set[Slot] = field(default_factory=set)
    routed: tuple[Any, ...] = ()
    policy_version: int | None = None

    def check(self, world: World, commands: list[Command]) -> None:
        """Raises AssertionError with the end of the log."""
        try:
            self._completion(world)
            for command in commands:
                self._command(world, command)
            self._fleet(world)
            self._deadlines(world)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{world.history(30)}") from None

    def is_whole(self, world: World, generation: int) -> bool:
        """Whether every engine of a generation still is the one that was told to join."""
        boots = self.members.get(generation, {})
        return all(
            world.engines[slot].boot_id == boot and world.engines[slot].is_alive
            for slot, boot in boots.items()
        )

    def orphaned(self, ops: Iterable[Op]) -> None:
        """Nobody will hear how these end."""
        self.tainted.update(op.slot for op in ops if isinstance(op, Commit))

    def _completion(self, world: World) -> None:
        _, event, _ = world.log[-1]
        if not isinstance(event, OpSucceeded | OpFailed | OpUnknown):
            return
        assert event.op_id not in self.ended, "I6: a second terminal event"
        self.ended.add(event.op_id)
        op = self.ops[event.op_id]
        slot = getattr(op, "slot", None)
        if isinstance(op, Commit) and not isinstance(event, OpSucceeded):
            # A later update may have been proven before this one's silence is told.
            if op.op_id > self.proven_by.get(op.slot, 0):
                self.tainted.add(op.slot)
        elif isinstance(op, Commit):
            self.tainted.discard(op.slot)
        if isinstance(event, OpSucceeded) and event.result.version is not None and slot:
            self.proven[slot] = (event.result.boot_id, event.result.version)
            self.proven_by[slot] = op.op_id

    def _command(self, world: World, command: Command) -> None:
        if isinstance(command, Op):
            assert command.op_id not in self.op_ids, "I6: an op id twice"
            self.op_ids.add(command.op_id)
            self.ops[command.op_id] = command
            assert math.isfinite(command.deadline), "I6: no deadline"
            limit = world.now + world.settings.update_timeout_s
            assert command.deadline <= limit, "deadlines nest"
        match command:
            case Open():
                assert command.generation > self.last_generation, "I3: generation must grow"
                self.last_generation = command.generation
                self.members[command.generation] = {}
            case Join(slot=Slot() as slot):
                boots = {
                    m.engine_id: m.boot_id for g in world.core.snapshot().groups for m in g.members
                }
                self.members[command.generation][slot] = boots[slot.engine_id]
            case Stage() | Send():
                assert command.generation == self.last_generation, "I3: a dead generation is used"
                if isinstance(command, Stage):
                    assert command.slot in self.members[command.generation], "I3: not a member"
            case Admit():
                said = self.proven.get(command.slot)
                assert said == (command.boot_id, command.version), f"I1: admits {said}: {command}"
            case Report():
                moves = _MOVES[command.old]
                if isinstance(world.log[-1][1], Restarted):
                    moves = {*moves, "starting"}
                assert command.new in moves, f"{command.old} -> {command.new}"
            case Route():
                self.routed = command.entries
            case UpdateEnded():
                self._update_ended(world, command)
            case Finish():
                assert command.version == world.core.snapshot().policy_version
            case _:
                pass

    def _update_ended(self, world: World, update: UpdateEnded) -> None:
        if update.outcome == "finished":
            assert update.version == world.core.snapshot().policy_version, "an old version ended"
        for slot in (entry.slot for entry in self.routed):
            engine = world.engines[slot]
            is_known = self.proven[slot][0] == engine.boot_id and engine.is_alive
            assert not (is_known and engine.paused), f"I4: {slot.engine_id} stays paused"

    def _fleet(self, world: World) -> None:
        snapshot = world.core.snapshot()
        version = snapshot.policy_version
        if self.policy_version is not None:
            assert version is not None, "the policy version is lost"
            assert version >= self.policy_version, "the policy version went back"
        self.policy_version = version
        expected = []
        for group in snapshot.groups:
            if group.state != "admitted":
                assert group.version is None, f"g{group.number} is out and has a version"
                continue
            assert group.version == version, f"I1: g{group.number} serves {group.version}"
            for member in group.members:
                slot = Slot.parse(member.engine_id)
                expected.append((slot, member.url, member.boot_id, version))
                said = self.proven.get(slot)
                in_swap = snapshot.update_phase in ("commit", "verify", "admit")
                versions = (version, snapshot.update_version) if in_swap else (version,)
                assert said is not None, f"I1: {slot.engine_id} never reported"
                assert said[0] == member.boot_id, f"I1: {slot.engine_id} is another boot"
                assert said[1] in versions, f"I1: {slot.engine_id} reported {said}"
                assert slot not in self.tainted, f"I5: {slot.engine_id} serves after a bad commit"
        routed = [(e.slot, e.url, e.boot_id, e.version) for e in self.routed]
        assert routed == expected, f"I2: routed {routed}, admitted {expected}"

    def _deadlines(self, world: World) -> None:
        deadline = world.core.next_deadline()
        assert deadline is None or deadline > world.now, "a busy loop"
        if world.core.snapshot().update_phase is not None:
            ends = [self.ops[i].deadline for i in self.op_ids - self.ended if i in self.ops]
            assert deadline is not None or ends, "I6: an update waits without a deadline"
