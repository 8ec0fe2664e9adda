"""What must hold, checked after every event: `protocol.md` section 7 and the rules of the core.

Two kinds of facts. The books: what the core was told and what it commanded (`Books`). The world:
what engines really hold and serve. A check that reads the world never asks what the core believes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from orchestrator.plane.commands import (
    AbortGeneration,
    Admit,
    Command,
    Commit,
    Fail,
    Fence,
    Finish,
    Join,
    Op,
    Open,
    Pause,
    ReadVersion,
    Relaunch,
    Report,
    Resume,
    Route,
    RouteEntry,
    Send,
    Stage,
    UpdateEnded,
)
from orchestrator.plane.events import (
    BroadcastReady,
    EngineAnswered,
    EngineSilent,
    EngineStuck,
    Event,
    GroupLaunched,
    OpFailed,
    OpSucceeded,
    OpUnknown,
    Restarted,
)
from protocol.ids import Slot
from tests.sim.client import GRACE_S
from tests.sim.engine import Engine

if TYPE_CHECKING:
    from tests.sim.world import World

IN_SERVICE = ("candidate", "admitted")
MOVES = {
    "starting": ("candidate", "evicted", "quarantined"),
    "candidate": ("admitted", "evicted", "quarantined"),
    "admitted": ("evicted", "quarantined"),
    "evicted": ("candidate", "starting"),
    "quarantined": ("evicted", "starting"),
}
_SWAP = (Pause, Commit, ReadVersion, Admit, Resume)
PHASE_OF = {
    "Open": "open", "Join": "join", "Send": "stage", "Stage": "stage", "Pause": "pause",
    "Commit": "commit", "ReadVersion": "verify", "Admit": "admit", "Resume": "resume",
    "Finish": "finish", "AbortGeneration": "abort",
}  # fmt: skip
_TRANSFER = ("open", "join", "stage", "abort")
# Probe interval, its time-out, and a retry.
_NOTICE_S = 3.0
# Enough for an update that fails once and is begun again, when all is well.
_CONFIRM_S = 4.5
_ENDED = ("exited", "waiting", "failed", "stopped")


class Violation(AssertionError):
    """`invariant` names what was broken."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Checks:
    """`command` for each command, in order; `event` after each `handle`; `touch` for each engine
    that changed, looked at when the step is over."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.num_checks = 0
        self.state: dict[int, str] = {}
        self.epoch: dict[int, int] = {}
        self.life: dict[int, int] = {}
        self.routed: dict[Slot, RouteEntry] = {}
        self.policy: int | None = None
        self.ops: dict[int, tuple[Op, int, int]] = {}
        self.verified: dict[Slot, tuple[str, int, int]] = {}
        self.tainted: dict[Slot, int] = {}
        self.told: dict[Slot, EngineAnswered] = {}
        self.update = 0
        self.update_version: int | None = None
        self.update_since: float | None = None
        self.generation = 0
        self.members: tuple[Slot, ...] = ()
        self.dead = ""
        self.evicted_at: dict[int, float] = {}
        self.asked_life: dict[int, int] = {}
        self.quiet_since: float | None = None
        self.stalled_s = 0.0
        self.is_restart = False
        self.is_return = False
        self._touched: dict[Engine, None] = {}
        self._before: dict[int, int] = {}
        self._last_op = 0
        self.late: dict[Engine, None] = {}
        self.ended: set[int] = set()
        self.trainer_boot = ""
        for group in sorted({slot.group for slot in world.slots}):
            self.state[group], self.epoch[group], self.life[group] = "starting", 0, 0

    def violated(self, invariant: str, text: str) -> None:
        """Ends the run."""
        raise Violation(invariant, text)

    # -- the world

    def touch(self, engine: Engine) -> None:
        """Something about the engine changed."""
        self._touched[engine] = None

    def look(self) -> None:
        """What the engines that changed serve now."""
        touched, self._touched = self._touched, {}
        for engine in touched:
            if engine.serves():
                self._serving(engine)

    def _serving(self, engine: Engine) -> None:
        self.num_checks += 1
        if engine.is_loading or engine.is_torn:
            self.violated("I5", f"{engine} makes tokens with half of its weights")
        entry = self.routed.get(engine.slot)
        is_meddled = engine.meddled_at is not None
        if is_meddled:
            return
        if entry is None and self.world.phase == "admit" and self._is_verified(engine.slot):
            # A resume that came after its deadline woke it between its admission and the route:
            # nobody sends to it yet, and what it holds is about to be the policy.
            return
        if engine.version is None or self.policy is None or engine.version > self.policy:
            self.violated("I1", f"{engine} serves v{engine.version}, the policy is v{self.policy}")
        if entry is not None and entry.boot_id == engine.boot_id:
            if engine.version != self.policy:
                text = f"{engine} is routed and serves v{engine.version}, not v{self.policy}"
                self.violated("I1", text)
        tainted = self.tainted.get(engine.slot)
        if tainted is not None and entry is not None and entry.boot_id == engine.boot_id:
            self.violated("I5", f"{engine} serves after a commit that failed or is unknown")

    # -- the books

    def before(self, event: Event) -> None:
        """Just before the core gets `event`."""
        self._before = self.epoch.copy()
        self.is_restart = isinstance(event, Restarted)
        if isinstance(event, EngineAnswered):
            if event.life >= self.life[event.slot.group]:
                self.life[event.slot.group] = event.life
            self.told[event.slot] = event
        elif isinstance(event, OpSucceeded | OpFailed | OpUnknown):
            self._completed(event)
        elif isinstance(event, BroadcastReady):
            self.trainer_boot = event.trainer_boot

    def is_awaited(self, op_id: int) -> bool:
        """Whether the update still waits for the outcome of an op."""
        op, update, epoch = self.ops[op_id]
        if update != self.update or self.update_since is None or op_id in self.ended:
            return False
        slot: Slot | None = getattr(op, "slot", None)
        if slot is not None and epoch != self.epoch[slot.group]:
            return False
        return PHASE_OF.get(type(op).__name__) == self.world.phase

    def _completed(self, event: OpSucceeded | OpFailed | OpUnknown) -> None:
        op, update, epoch = self.ops[event.op_id]
        self.ended.add(event.op_id)
        slot = getattr(op, "slot", None)
        is_good = isinstance(event, OpSucceeded)
        if isinstance(op, Open | Join | Stage | Send) and not is_good:
            if op.generation == self.generation:
                self.dead = f"{type(op).__name__} failed"
        if slot is None or update != self.update or epoch != self.epoch[slot.group]:
            return
        if isinstance(op, Commit) and not is_good:
            self.tainted[slot] = update
        elif isinstance(op, ReadVersion) and isinstance(event, OpSucceeded):
            result = event.result
            if result.version is not None:
                self.verified[slot] = (result.boot_id, result.version, update)

    def command(self, command: Command) -> None:
        """The core wants this."""
        if isinstance(command, Op):
            self._op(command)
        elif isinstance(command, Report):
            self._report(command)
        elif isinstance(command, Route):
            self._route(command)
        elif isinstance(command, Relaunch):
            self.asked_life[command.group] = command.life
        elif isinstance(command, UpdateEnded):
            self._update_ended(command)
        elif isinstance(command, Fail):
            self._fail()

    def _op(self, op: Op) -> None:
        now = self.world.loop.now
        if op.op_id <= self._last_op:
            self.violated("I6", f"op id {op.op_id} after {self._last_op}")
        self._last_op = op.op_id
        if not math.isfinite(op.deadline):
            self.violated("I6", f"no deadline: {op}")
        slot: Slot | None = getattr(op, "slot", None)
        if isinstance(op, Open):
            self._opened(op)
        if self.update_since is None and isinstance(op, Open | Stage | Send | ReadVersion):
            self.update += 1
            self.update_since, self.update_version = now, None
            self.is_return = isinstance(op, ReadVersion)
            self.stalled_s = 0.0
        if isinstance(op, Stage | Send):
            self.update_version = op.version
        if self.update_since is not None and not isinstance(op, Fence | Finish):
            is_waited_for = not (isinstance(op, AbortGeneration) and op.reason.endswith("failed"))
            if (
                is_waited_for
                and op.deadline > self.update_since + self.world.plane["update_timeout_s"] + 1e-6
            ):
                self.violated("I6", f"{op} may outlast its update")
        epoch = self.epoch[slot.group] if slot is not None else 0
        self.ops[op.op_id] = (op, self.update, epoch)
        if isinstance(op, Join | Stage | Send):
            if op.generation != self.generation:
                self.violated("I3", f"{op}: the generation is {self.generation}")
            if self.dead:
                self.violated("I3", f"{op}: a collective is used again after: {self.dead}")
        if isinstance(op, AbortGeneration) and op.generation == self.generation:
            self.dead = self.dead or "aborted"
        if slot is not None and not isinstance(op, Fence | AbortGeneration):
            if self.state[slot.group] not in IN_SERVICE:
                self.violated("block", f"g{slot.group} is {self.state[slot.group]}: {op}")
        if isinstance(op, Commit | Pause | Resume | Admit | ReadVersion | Finish):
            self._swap_op(op)

    def _opened(self, op: Open) -> None:
        if op.generation <= self.generation:
            self.violated("I3", f"generation {op.generation} after {self.generation}")
        self.generation, self.dead, self.members = op.generation, "", ()

    def _swap_op(self, op: Op) -> None:
        if isinstance(op, Finish):
            if op.version != self.policy:
                self.violated("I1", f"{op}, but v{self.policy} is in service")
            return
        if self.update_since is None:
            self.violated("I6", f"{op} outside an update")
        slot = getattr(op, "slot", None)
        assert slot is not None
        if isinstance(op, Resume) and slot in self.tainted:
            self.violated("I5", f"{op} after a commit that failed or is unknown")
        if isinstance(op, Resume | Admit):
            said = self.verified.get(slot)
            if not self._is_verified(slot):
                self.violated("I5", f"{op}: v{self.update_version} was not verified: {said}")
        if isinstance(op, Admit) and said is not None and op.boot_id != said[0]:
            self.violated("I1", f"{op}, but {said[0]} was verified")

    def _is_verified(self, slot: Slot) -> bool:
        """Whether the engine reported, in this update, the version that goes into service."""
        said = self.verified.get(slot)
        if said is None or said[2] != self.update:
            return False
        return self.is_return or said[1] == self.update_version

    def restarting(self) -> None:
        """The orchestrator's process ended: no op has an outcome any more."""
        self.ops = {op_id: (op, -1, -1) for op_id, (op, _, _) in self.ops.items()}
        self.told.clear()
        if self.world.phase in _TRANSFER:
            self.dead = self.dead or "the orchestrator restarted"

    def _report(self, report: Report) -> None:
        group = report.group
        is_move = report.new in MOVES[report.old] or (
            self.is_restart and report.old in IN_SERVICE and report.new == "starting"
        )
        if report.old != self.state[group] or not is_move:
            self.violated("states", f"{self.state[group]}: {report}")
        self.state[group] = report.new
        if report.new in ("evicted", "quarantined") and report.old != "quarantined":
            self.epoch[group] += 1
            self.evicted_at[group] = self.world.loop.now
            # Who was the first to report a failed transfer twice may be the wrong one.
            is_blamed = report.reason == "op_failed" and self.world.phase in _TRANSFER
            touched = self.world.faults.touched
            if group not in touched and not (is_blamed and touched):
                self.violated("innocent", f"nothing ever happened to it: {report}")
            if self.quiet_since is not None and not self.world.launcher.is_given_up(group):
                self.violated("I9", f"a healthy group is evicted: {report}")
        elif report.new == "candidate":
            self._candidate(group)
        elif report.new == "admitted":
            self._admitted(group)

    def _candidate(self, group: int) -> None:
        for slot in self.world.of(group):
            said = self.told.get(slot)
            if said is None:
                self.violated("states", f"{slot.engine_id} is a candidate and never answered")
                return
            wanted = self.asked_life.get(group, -1) + 1
            if said.life < wanted:
                text = f"{slot.engine_id} of life {said.life} is believed, {wanted} was asked for"
                self.violated("life", text)
            since = self.evicted_at.get(group, -math.inf)
            is_next = group in self.asked_life and said.life >= wanted
            if not is_next and said.asked_at < since - 1e-9:
                self.violated("states", f"{slot.engine_id} has not answered since its eviction")

    def _admitted(self, group: int) -> None:
        for slot in self.world.of(group):
            said = self.verified.get(slot)
            if said is None or not self._is_verified(slot):
                self.violated("I1", f"{slot.engine_id} is admitted and reported {said}")
                return
            engine = self.world.engines.get(slot)
            is_same = engine is not None and engine.boot_id == said[0] and engine.is_alive
            if engine is not None and is_same and engine.meddled_at is None:
                if engine.version != said[1] or engine.is_torn:
                    self.violated("I1", f"{engine} is admitted and holds v{engine.version}")

    def _route(self, route: Route) -> None:
        before = self.routed
        self.routed = {entry.slot: entry for entry in route.entries}
        expected = [slot for slot in self.world.in_order if self.state[slot.group] == "admitted"]
        if [entry.slot for entry in route.entries] != expected:
            rows = [entry.slot.engine_id for entry in route.entries]
            self.violated("I2", f"routed {rows}, admitted {[s.engine_id for s in expected]}")
        versions = {entry.version for entry in route.entries}
        if len(versions) > 1:
            self.violated("I1", f"several versions are routed: {sorted(versions)}")
        for version in versions:
            if self.policy is not None and version < self.policy:
                self.violated("I1", f"the policy went from v{self.policy} to v{version}")
            self.policy = version
        for entry in route.entries:
            said = self.verified.get(entry.slot)
            # During a swap an engine may hold the next version already; it is paused then.
            is_swapped = (
                said is not None and self.update_since is not None and said[2] == self.update
            )
            if (
                said is None
                or said[0] != entry.boot_id
                or not (is_swapped or said[1] == entry.version)
            ):
                self.violated("I1", f"{entry.slot.engine_id} is routed and reported {said}")
        for slot in [*before, *self.routed]:
            engine = self.world.engines.get(slot)
            if engine is not None:
                self.touch(engine)

    def paused_late(self, engine: Engine) -> None:
        """A pause that was given up long ago is carried out."""
        self.late[engine] = None
        loop = self.world.loop
        loop.at(loop.now + _NOTICE_S, self._still_paused, engine, self.update)

    def _still_paused(self, engine: Engine, update: int) -> None:
        entry = self.routed.get(engine.slot)
        is_routed = entry is not None and entry.boot_id == engine.boot_id
        is_between = self.update_since is None and self.update == update
        if engine.is_alive and engine.is_paused and is_routed and is_between:
            if not (engine.is_frozen or engine.is_cut):
                self.violated("I4", f"{engine} stays paused, and nobody notices")

    def trainer_waited(self, version: int) -> None:
        """The trainer's own patience ended: nobody confirmed what it published."""
        since = self.quiet_since
        if since is not None and self.world.loop.now > since + _CONFIRM_S:
            self.violated("I10", f"nobody confirmed v{version} to the trainer")

    def _update_ended(self, ended: UpdateEnded) -> None:
        if self.update_since is None:
            self.violated("I6", "an update ends that did not begin")
        self.update_since = None
        if ended.outcome == "finished" and ended.version != self.policy:
            self.violated("I1", f"v{ended.version} is finished, v{self.policy} is in service")
        for slot, entry in self.routed.items():
            engine = self.world.engines.get(slot)
            if engine is None or engine.boot_id != entry.boot_id or not engine.is_alive:
                continue
            if engine.is_paused and engine not in self.late:
                self.violated("I4", f"{engine} stays paused")

    def _fail(self) -> None:
        num_admitted = sum(state == "admitted" for state in self.state.values())
        if num_admitted >= self.world.plane["min_serving_groups"]:
            self.violated("capacity", f"the run fails with {num_admitted} groups in service")
        given_up = sum(self.world.launcher.is_given_up(group) for group in self.state)
        can_serve = len(self.state) - given_up >= self.world.plane["min_serving_groups"]
        patience_s = self.world.plane["no_capacity_timeout_s"]
        since = self.quiet_since
        if since is not None and can_serve and self.world.loop.now > since + patience_s:
            self.violated("I9", "the run fails although all has been well for long")

    # -- after the step

    def event(self, event: Event, commands: list[Command]) -> None:
        """The core has handled `event`."""
        self.num_checks += 1
        if any(isinstance(command, Stage) for command in commands):
            self._membership(commands)
        elif any(isinstance(command, Join) for command in commands):
            self._layout(commands)
        if self.epoch != self._before:
            self._evictions(commands)
            self._members_left()
        self._acted(event)
        since = self.update_since
        if since is not None:
            limit = self.world.plane["update_timeout_s"] + self.world.plane["admin_timeout_s"]
            spare = GRACE_S + self.stalled_s + 1.0
            if self.world.loop.now > since + limit + spare:
                self.violated("I10", f"an update takes {self.world.loop.now - since:.1f} s")
            if self.world.core_deadline is None and self.world.client.num_open == 0:
                self.violated("I6", "an update waits without a deadline")

    def _layout(self, commands: list[Command]) -> None:
        joins = [command for command in commands if isinstance(command, Join)]
        rank = 0
        for join in joins:
            if join.rank_offset != rank:
                self.violated("I3", f"ranks are not laid out in a row: {join}")
            if join.slot is None:
                rank += 1
            else:
                said = self.told[join.slot]
                rank += said.world_size
        if rank != joins[0].world_size or joins[0].slot is not None:
            self.violated("I3", f"{rank} ranks for a world of {joins[0].world_size}")
        self.members = tuple(join.slot for join in joins if join.slot is not None)

    def _membership(self, commands: list[Command]) -> None:
        staged = tuple(command.slot for command in commands if isinstance(command, Stage))
        if staged != self.members:
            rows = [slot.engine_id for slot in staged]
            self.violated("I3", f"{rows} are asked to receive, joined are {self.members}")
        if not any(isinstance(command, Send) for command in commands):
            self.violated("I3", "engines receive and nobody sends")

    def _members_left(self) -> None:
        if self.update_since is None or self.is_return:
            return
        for slot in self.members:
            if self.epoch[slot.group] != self._before[slot.group]:
                self.dead = self.dead or f"{slot.engine_id} left"

    def _evictions(self, commands: list[Command]) -> None:
        """The whole group goes: out of the router, fenced, asked to start anew."""
        fenced = {command.slot for command in commands if isinstance(command, Fence)}
        relaunched = {command.group for command in commands if isinstance(command, Relaunch)}
        for group, epoch in self.epoch.items():
            if epoch == self._before[group]:
                continue
            for slot in self.world.of(group):
                self.tainted.pop(slot, None)
                if slot not in fenced:
                    self.violated("fence", f"{slot.engine_id} is evicted and not fenced")
                if slot in self.routed:
                    self.violated("I2", f"{slot.engine_id} is evicted and routed")
            if self.world.plane["has_launcher"] and group not in relaunched:
                self.violated("relaunch", f"g{group} is evicted and not relaunched")

    def _acted(self, event: Event) -> None:
        """Who is told to have failed leaves service at once."""
        group: int | None = None
        if isinstance(event, EngineSilent):
            if event.life >= self.life[event.slot.group]:
                group = event.slot.group
        elif isinstance(event, EngineStuck):
            entry = self.routed.get(event.slot)
            if entry is not None and entry.boot_id == event.boot_id:
                group = event.slot.group
        elif isinstance(event, EngineAnswered):
            entry = self.routed.get(event.slot)
            if entry is not None and event.boot_id != entry.boot_id:
                if event.life >= self.life[event.slot.group]:
                    group = event.slot.group
        elif isinstance(event, GroupLaunched):
            if event.group in self.life and event.life >= self.life[event.group]:
                self.life[event.group] = event.life
                if event.state in _ENDED and event.life > self.asked_life.get(event.group, -1):
                    group = event.group
        elif isinstance(event, OpFailed | OpUnknown):
            op, update, epoch = self.ops[event.op_id]
            if isinstance(op, _SWAP) and update == self.update:
                number = op.slot.group
                if epoch == self._before[number] and self.update_since is not None:
                    group = number
        if group is None or self._before[group] != self.epoch[group]:
            return
        if self.state[group] in IN_SERVICE:
            self.violated("evict", f"g{group} stays {self.state[group]} after {event}")
