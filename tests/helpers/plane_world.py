"""A scripted world around the plane's core: engines, a trainer, a launcher. No I/O.

    world = World([0, 0, 1, 1])
    world.fault(Stage, "fail", slot=Slot(1, 0))
    world.run(lambda: world.core.snapshot().policy_version == 0)

Time is simulated. Commands succeed after `latency_s` unless a fault says otherwise; probes go
through the real `EngineHealth`, so what the core hears is as old and as rare as in a real run.
After every event `plane_checks.check` asserts the invariants of protocol.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from orchestrator.drivers.journal import Header
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
    Probe,
    ReadVersion,
    Relaunch,
    Report,
    Resume,
    Route,
    Send,
    Stage,
    UpdateEnded,
)
from orchestrator.plane.core import GroupSnapshot, PlaneCore
from orchestrator.plane.events import (
    BroadcastReady,
    Deadline,
    EngineAnswered,
    Event,
    GroupLaunched,
    OpFailed,
    OpResult,
    OpSucceeded,
    OpUnknown,
    Restarted,
)
from orchestrator.plane.health import EngineHealth, ProbeSettings, Sighting
from orchestrator.plane.state import PlaneMemory, PlaneSettings
from orchestrator.recovery import core_of
from protocol.ids import Slot
from protocol.launcher_api import GroupStepState
from tests.helpers.plane_checks import Checks

Outcome = Literal["fail", "unknown", "lost_reply", "slow"]
ANY: Any = object()
TRAINER = None


@dataclass(slots=True)
class Engine:
    """What is true of an engine, whatever the core believes."""

    slot: Slot
    boot_id: str
    life: int = 0
    world_size: int = 1
    version: int | None = None
    paused: bool = False
    is_open: bool = False
    is_alive: bool = True
    generation: int = 0
    staged: int | None = None
    tokens: int = 0
    running: int = 0
    core_age_s: float = 0.0


@dataclass(slots=True)
class Trainer:
    """`published` None: nothing yet."""

    boot: str = "trainer-1"
    published: int | None = None
    generation: int = 0
    finished: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)


@dataclass(slots=True)
class Fault:
    """`fail`: refused, not done. `unknown`: silent, not done. `lost_reply`: done, silent.
    `slow`: done, `delay_s` later."""

    kind: type[Op]
    outcome: Outcome
    slot: Any
    after: int
    times: int
    delay_s: float
    fired: int = 0

    def hits(self, op: Op) -> bool:
        """Count the op; whether it is spoilt."""
        if not isinstance(op, self.kind):
            return False
        if self.slot is not ANY and getattr(op, "slot", TRAINER) != self.slot:
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.fired >= self.times:
            return False
        self.fired += 1
        return True


class World:
    """`groups` as in `admin_engine_groups`; other settings are fields of PlaneSettings."""

    def __init__(
        self,
        groups: Sequence[int] = (0, 0, 1, 1),
        *,
        world_sizes: dict[Slot, int] | None = None,
        probe: ProbeSettings | None = None,
        train_s: float | None = None,
        restart_s: float = 3.0,
        latency: Callable[[], float] = lambda: 0.01,
        **settings: Any,
    ) -> None:
        self.settings = PlaneSettings(**settings)
        self.now = 100.0
        self.slots = [Slot(g, list(groups)[:place].count(g)) for place, g in enumerate(groups)]
        self.urls = {slot: f"http://{slot.engine_id}.0" for slot in self.slots}
        self.lives = dict.fromkeys(sorted(set(groups)), 0)
        self.num_boots = 0
        self.engines = {slot: self._boot(slot, 0) for slot in self.slots}
        for slot, size in (world_sizes or {}).items():
            self.engines[slot].world_size = size
        self.trainer = Trainer()
        self.train_s = train_s
        self.restart_s = restart_s
        self.latency = latency
        self.log: list[tuple[float, Event, list[Command]]] = []
        self.routed: tuple[Slot, ...] = ()
        self.failed: str | None = None
        self.outstanding: dict[int, Op] = {}
        self.orphans: dict[int, Op] = {}  # what a former orchestrator has sent; still carried out
        self.dies_when: Callable[[], bool] | None = None  # after the core, before its commands
        self.mute: set[Slot] = set()  # these answer no probe
        self._probe_settings = probe or ProbeSettings()
        self._health: dict[Slot, tuple[int, EngineHealth]] = {}
        self._num_watches = 0
        self._faults: list[Fault] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._num_queued = 0
        self._checks = Checks()
        self._is_away = False
        self.header = Header(
            "run",
            0,
            self.settings,
            tuple(self.urls[slot] for slot in self.slots),
            tuple(groups),
            self.now,
        )
        self.core = core_of(self.header)
        self.feed(Deadline())

    # -- what tests drive

    def fault(
        self,
        kind: type[Op],
        outcome: Outcome,
        *,
        slot: Any = ANY,
        after: int = 0,
        times: int = 1,
        delay_s: float = 0.0,
    ) -> Fault:
        """Spoil `times` ops of this kind and slot (None: the trainer), after the first `after`."""
        rule = Fault(kind, outcome, slot, after, times, delay_s)
        self._faults.append(rule)
        return rule

    def clear_faults(self) -> None:
        """Everything works from now on."""
        self._faults.clear()

    def publish(self, version: int) -> None:
        """The trainer has new weights."""
        self.trainer.published = version
        self.feed(BroadcastReady(version, self.trainer.boot))

    def kill(self, *slots: Slot) -> None:
        """Like SIGKILL; with a launcher the whole step of the group ends, and it says so."""
        for slot in slots:
            self.engines[slot].is_alive = False
            if self.settings.has_launcher:
                for other in self.of(slot.group):
                    other.is_alive = False
                self.later(0.05, lambda g=slot.group: self._step_ended(g, self.lives[g]))  # type: ignore[misc]

    def restart(self, slot: Slot) -> None:
        """A new process of the same life at the same address."""
        self.engines[slot] = self._boot(slot, self.lives[slot.group])

    def relaunch(self, group: int, *, moves: bool = False) -> None:
        """The next life of a group, told by the launcher if there is one."""
        self.lives[group] += 1
        for engine in self.of(group):
            if moves:
                self.urls[engine.slot] = f"http://{engine.slot.engine_id}.{self.lives[group]}"
            self.engines[engine.slot] = self._boot(engine.slot, self.lives[group])
        if self.settings.has_launcher:
            self.launched(group, "running")

    def restart_orchestrator(self, away_s: float = 0.0) -> None:
        """SIGKILL now, and a new one that knows what is in the journal. What was sent is still
        carried out, and nobody hears of it."""
        self.orphans.update(self.outstanding)
        self._checks.orphaned(self.outstanding.values())
        self.outstanding.clear()
        self._health.clear()
        self.routed = ()
        if away_s:
            self._away(away_s)
        raw = msgspec.json.encode(self.core.memory())
        self.core = PlaneCore.from_memory(self.settings, msgspec.json.decode(raw, type=PlaneMemory))
        self.feed(Restarted())
        if self.trainer.published is not None:
            said = BroadcastReady(self.trainer.published, self.trainer.boot)
            self.later(self.latency(), lambda: self.feed(said))
        if self.settings.has_launcher:
            for group in self.lives:
                self.later(self.latency(), lambda g=group: self._tell_life(g))  # type: ignore[misc]

    def launched(self, group: int, state: GroupStepState) -> None:
        """The launcher posts its view of a group."""
        urls = tuple(self.urls[engine.slot] for engine in self.of(group))
        self.feed(GroupLaunched(group, self.lives[group], state, urls, state))

    def of(self, group: int) -> list[Engine]:
        """The engines of a group."""
        return [engine for slot, engine in self.engines.items() if slot.group == group]

    def state(self, group: int) -> str:
        """What the core says of a group."""
        return self.group(group).state

    def group(self, number: int) -> GroupSnapshot:
        """What the core knows of a group."""
        return next(g for g in self.core.snapshot().groups if g.number == number)

    def run(self, until: Callable[[], bool], limit_s: float = 1000.0) -> None:
        """Let time pass until it holds; AssertionError when it does not within `limit_s`."""
        end = self.now + limit_s
        while not until():
            assert self.now <= end, f"not within {limit_s} s:\n{self.history(40)}"
            self._next()

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._next_at() <= end:
            self._next()
        self.now = end

    def serve(self, version: int = 0) -> None:
        """Publish `version` and wait until its update has ended well."""
        self.publish(version)
        self.run(lambda: self.ended("finished", version) is not None)

    def feed(self, event: Event) -> list[Command]:
        """Hand the core an event now, carry out what it wants."""
        if self._is_away:
            return []
        commands = self.core.handle(self.now, event)
        self.log.append((self.now, event, commands))
        self._checks.check(self, commands)
        if self.dies_when is not None and self.dies_when():
            self.dies_when = None
            self._checks.orphaned(c for c in commands if isinstance(c, Commit))
            self.restart_orchestrator()
            return commands
        for command in commands:
            self._act(command)
        return commands

    def commands(self, *kinds: type[Any]) -> list[Any]:
        """All commands of these kinds so far, in order."""
        return [c for _, _, commands in self.log for c in commands if isinstance(c, kinds)]

    def ended(self, outcome: str, version: int | None = None) -> UpdateEnded | None:
        """The last update with this outcome."""
        for update in reversed(self.commands(UpdateEnded)):
            if update.outcome == outcome and version in (None, update.version):
                assert isinstance(update, UpdateEnded)
                return update
        return None

    def reports(self, group: int) -> list[tuple[str, str]]:
        """(new state, reason) of a group, in order."""
        return [(r.new, r.reason) for r in self.commands(Report) if r.group == group]

    def history(self, last: int) -> str:
        """The end of the log, for messages."""
        return "\n".join(f"{t:9.2f} {event} -> {cs}" for t, event, cs in self.log[-last:])

    def later(self, delay_s: float, action: Callable[[], Any]) -> None:
        """Do something `delay_s` from now."""
        self._num_queued += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._num_queued, action))

    # -- time

    def _next_at(self) -> float:
        deadline = self.core.next_deadline()
        queued = self._queue[0][0] if self._queue else float("inf")
        return min(queued, float("inf") if deadline is None else deadline)

    def _next(self) -> None:
        deadline = self.core.next_deadline()
        if self._queue and (deadline is None or self._queue[0][0] <= deadline):
            at, _, action = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            action()
        else:
            assert deadline is not None, f"nothing will ever happen:\n{self.history(40)}"
            self.now = deadline
            self.feed(Deadline())

    def _away(self, seconds: float) -> None:
        """Time passes without an orchestrator: the world goes on, nobody is told."""
        end = self.now + seconds
        self._is_away = True
        while self._queue and self._queue[0][0] <= end:
            at, _, action = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            action()
        self.now = end
        self._is_away = False

    # -- commands

    def _act(self, command: Command) -> None:
        match command:
            case Probe():
                self._watch(command)
            case Relaunch():
                if self.settings.has_launcher and command.life == self.lives[command.group]:
                    for engine in self.of(command.group):
                        engine.is_alive = False
                    self.later(0.05, lambda: self._step_ended(command.group, command.life))
            case Route():
                self.routed = tuple(entry.slot for entry in command.entries)
            case Fail():
                self.failed = command.reason
            case Report() | UpdateEnded():
                pass
            case _:
                self._start(command)

    def _step_ended(self, group: int, life: int) -> None:
        if life == self.lives[group] and not any(e.is_alive for e in self.of(group)):
            self.launched(group, "exited")
            self.later(self.restart_s, lambda: self._next_life(group, life))

    def _next_life(self, group: int, life: int) -> None:
        if life == self.lives[group]:
            self.relaunch(group)

    def _start(self, op: Op) -> None:
        self.outstanding[op.op_id] = op
        fault = next((rule for rule in self._faults if rule.hits(op)), None)
        outcome = fault.outcome if fault is not None else None
        wait_s = self.latency() + (fault.delay_s if fault is not None else 0.0)
        if outcome == "fail":
            self.later(wait_s, lambda: self._end(op, OpFailed(op.op_id, "injected")))
        elif outcome == "unknown" or self.now + wait_s > op.deadline:
            left_s = op.deadline - self.now
            self.later(left_s, lambda: self._end(op, OpUnknown(op.op_id, "no answer in time")))
        else:
            self.later(wait_s, lambda: self._carry_out(op, outcome == "lost_reply"))

    def _carry_out(self, op: Op, is_lost: bool) -> None:
        is_orphan = self.orphans.pop(op.op_id, None) is not None
        if op.op_id not in self.outstanding and not is_orphan:
            return
        slot = getattr(op, "slot", TRAINER)
        done = self._on_trainer(op) if slot is TRAINER else self._on_engine(self.engines[slot], op)
        if is_lost:
            done = OpUnknown(op.op_id, "the answer was lost")
        self._end(op, done)

    def _end(self, op: Op, event: OpSucceeded | OpFailed | OpUnknown) -> None:
        if self.outstanding.pop(op.op_id, None) is not None:
            self.feed(event)

    def _on_trainer(self, op: Op) -> OpSucceeded | OpFailed | OpUnknown:
        trainer, op_id = self.trainer, op.op_id
        result = OpResult()
        match op:
            case Open():
                if op.generation <= trainer.generation:
                    return OpFailed(op_id, "generation is not above the last one")
                trainer.generation = op.generation
                result = OpResult(host="trainer", port=1000 + op.generation)
            case Join() | Send():
                if op.generation != trainer.generation:
                    return OpFailed(op_id, "foreign generation")
                if isinstance(op, Send) and op.version != trainer.published:
                    return OpFailed(op_id, f"version {op.version} is not published")
                if not self._checks.is_whole(self, op.generation):
                    return OpFailed(op_id, "a peer is gone")
                result = OpResult(num_bytes=64, digest="d") if isinstance(op, Send) else result
            case Finish():
                if trainer.published is None or op.version > trainer.published:
                    return OpFailed(op_id, "not published")
                trainer.finished.append((op.version, op.members))
                if self.train_s is not None:
                    self.later(self.train_s, lambda: self._trained(op.version))
            case AbortGeneration():
                pass
            case _:
                raise AssertionError(f"not for the trainer: {op}")
        return OpSucceeded(op_id, result)

    def _trained(self, version: int) -> None:
        if self.trainer.published == version:
            self.publish(version + 1)

    def _on_engine(self, engine: Engine, op: Op) -> OpSucceeded | OpFailed | OpUnknown:
        op_id = op.op_id
        if not engine.is_alive:
            return OpUnknown(op_id, "connection refused")
        result = OpResult()
        match op:
            case Join():
                if op.generation <= engine.generation:
                    return OpFailed(op_id, "generation is not above the last one")
                engine.generation, engine.staged = op.generation, None
            case Stage():
                if op.generation != engine.generation:
                    return OpFailed(op_id, "foreign generation")
                if not self._checks.is_whole(self, op.generation):
                    return OpFailed(op_id, "a peer is gone")
                engine.staged = op.version
            case Pause():
                engine.paused = True
            case Commit():
                if (op.generation, op.version) != (engine.generation, engine.staged):
                    return OpFailed(op_id, f"staged is {engine.staged}")
                engine.version, engine.staged = op.version, None
            case ReadVersion():
                result = OpResult(version=engine.version, boot_id=engine.boot_id)
            case Resume():
                engine.paused = False
            case Admit():
                if (op.boot_id, op.version) != (engine.boot_id, engine.version):
                    return OpFailed(op_id, "foreign boot or version")
                engine.is_open = True
            case Fence():
                engine.is_open = False
            case AbortGeneration():
                engine.staged = None
            case _:
                raise AssertionError(f"not for an engine: {op}")
        return OpSucceeded(op_id, result)

    # -- probes

    def _boot(self, slot: Slot, life: int) -> Engine:
        self.num_boots += 1
        return Engine(slot, f"boot-{self.num_boots}", life)

    def _tell_life(self, group: int) -> None:
        is_alive = any(engine.is_alive for engine in self.of(group))
        self.launched(group, "running" if is_alive else "exited")

    def _watch(self, command: Probe) -> None:
        self._num_watches += 1
        health = EngineHealth(self._probe_settings, command.slot, command.life, self.now)
        self._health[command.slot] = (self._num_watches, health)
        self._schedule_probe(command, self._num_watches, health)

    def _schedule_probe(self, command: Probe, watch: int, health: EngineHealth) -> None:
        wait_s = max(health.next_probe_at - self.now, 0.0)
        self.later(wait_s, lambda: self._ask(command, watch, health))

    def _ask(self, command: Probe, watch: int, health: EngineHealth) -> None:
        if self._health.get(command.slot, (None,))[0] != watch:
            return
        engine = self.engines[command.slot]
        is_ours = self.urls[command.slot] == command.url and engine.life >= command.life
        sighting = None
        if command.slot not in self.mute and engine.is_alive and is_ours:
            answer = EngineAnswered(
                slot=command.slot,
                asked_at=self.now,
                boot_id=engine.boot_id,
                life=engine.life,
                world_size=engine.world_size,
                weight_version=engine.version,
                paused=engine.paused,
            )
            sighting = Sighting(answer, engine.core_age_s, engine.running, engine.tokens)
        self.later(self.latency(), lambda: self._heard(command, watch, health, sighting))

    def _heard(
        self, command: Probe, watch: int, health: EngineHealth, sighting: Sighting | None
    ) -> None:
        if self._health.get(command.slot, (None,))[0] != watch:
            return
        if sighting is None:
            news = health.missed(self.now, "connection refused")
        else:
            news = health.answered(self.now, sighting)
        self._schedule_probe(command, watch, health)
        if news is not None:
            self.feed(news)
