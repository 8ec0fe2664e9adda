"""Carries out the schedule of a plan: what each kind of fault means. All of them end by `heal`.

| kind | what happens |
|---|---|
| op | the next `times` calls of one kind: refused, request lost, reply lost or doubled, slow |
| crash, group_crash | SIGKILL of one engine, of all engines of its group |
| restart | a new process at the same address, faster than a probe |
| hang | SIGSTOP, then SIGCONT; what piled up is done then |
| core_hang, stall | the engine core stops; it runs and makes no tokens |
| cut, slow | the admin link loses everything; it is slow |
| partial_write | the next commit leaves half of the weights |
| meddle | somebody loads other weights by hand |
| new_life | somebody relaunches the group |
| old_life_returns | the next SIGKILL by the launcher is in vain until its successor starts |
| trainer_crash, trainer_hang | the trainer dies and comes back from its checkpoint; it stops |
| router_restart, router_hang | the router loses its list; it cannot be reached |
| loop_stall | the orchestrator's loop stops: late deadlines, a pile of news (a jump of its clock) |
| orchestrator_restart | SIGKILL between the journal and the drivers; it comes back with its memory |
| launcher_silent | the launcher's posts are lost |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.plane.commands import AbortGeneration, Finish, Join, Op, Open, Send
from protocol.ids import Slot
from tests.sim.engine import Engine
from tests.sim.plan import Fault

if TYPE_CHECKING:
    from tests.sim.world import World


@dataclass(slots=True)
class _Spoilt:
    """The next `times` calls of this kind to this place (None: the trainer)."""

    name: str
    outcome: str
    slot: Slot | None
    times: int
    seconds: float


@dataclass(slots=True)
class _Armed:
    """A fault that waits for the `left`-th entry of its phase."""

    left: int
    fault: Fault


class Faults:
    """Starts what is due, ends what is over. `fired` counts what really happened."""

    def __init__(self, world: World, schedule: tuple[Fault, ...]) -> None:
        self.world = world
        self.is_over = False
        self.fired: dict[str, int] = {}
        self.touched: set[int] = set()
        self._armed: dict[str, list[_Armed]] = {}
        self._spoilt: list[_Spoilt] = []
        for fault in schedule:
            if fault.phase:
                self._armed.setdefault(fault.phase, []).append(_Armed(fault.nth, fault))
            else:
                world.loop.at(world.loop.now + fault.at, self._start, fault)

    def entered(self, phase: str) -> None:
        """The update entered a phase."""
        for armed in self._armed.get(phase, ()):
            armed.left -= 1
            if armed.left == 0:
                self.world.loop.at(self.world.loop.now + armed.fault.at, self._start, armed.fault)

    def hit(self, op: Op) -> tuple[str, float]:
        """What happens to the call that begins now, and how long it takes."""
        if not self._spoilt:
            return "", 0.0
        slot = None if _is_trainers(op) else getattr(op, "slot", None)
        name = type(op).__name__
        for spoilt in self._spoilt:
            if spoilt.name == name and spoilt.slot == slot:
                spoilt.times -= 1
                if spoilt.times == 0:
                    self._spoilt.remove(spoilt)
                self._count(f"op {name}:{spoilt.outcome}")
                if slot is not None:
                    self.touched.add(slot.group)
                return spoilt.outcome, spoilt.seconds
        return "", 0.0

    def heal(self) -> None:
        """Everything works from now on; who is dead is started again."""
        self.is_over = True
        self._spoilt.clear()
        world = self.world
        world.launcher.is_silent = False
        world.router.is_up = True
        for engine in world.everyone:
            engine.is_cut, engine.slow_s, engine.num_partial_writes = False, 0.0, 0
            engine.stalled_since = None
            if engine.is_alive:
                if engine.hung_since is not None:
                    engine.unhang()
                engine.thaw()
        world.trainer.is_cut = False
        world.trainer.thaw()
        world.restart_trainer()

    def _count(self, what: str) -> None:
        self.fired[what] = self.fired.get(what, 0) + 1

    def _start(self, fault: Fault) -> None:
        if self.is_over:
            return
        world = self.world
        slot = world.slots[fault.slot] if fault.slot >= 0 else None
        if fault.kind == "op":
            name, outcome = fault.what.split(":")
            self._spoilt.append(_Spoilt(name, outcome, slot, fault.times, fault.duration))
            return
        assert slot is not None
        if fault.kind not in _ON_NOBODY:
            self.touched.add(slot.group)
        if fault.kind in ("loop_stall", "orchestrator_restart"):
            self.touched.update(place.group for place in world.slots)
        if fault.kind in _ON_WORLD:
            world.note(f"fault {fault.kind} {slot.engine_id} {fault.duration}")
            self._count(fault.kind)
            _ON_WORLD[fault.kind](self, fault)
            return
        engine = world.engines.get(slot)
        if engine is not None and engine.is_alive:
            world.note(f"fault {fault.kind} {slot.engine_id} {fault.duration}")
            self._count(fault.kind)
            _ON_ENGINE[fault.kind](self, engine, fault.duration)
            world.checks.touch(engine)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self.world.loop.at(self.world.loop.now + seconds, action)

    # -- engines

    def _crash(self, engine: Engine, seconds: float) -> None:
        engine.die()
        self.world.launcher.exited(engine)

    def _group_crash(self, engine: Engine, seconds: float) -> None:
        for slot in self.world.of(engine.slot.group):
            other = self.world.engines.get(slot)
            if other is not None and other.is_alive:
                self._crash(other, seconds)

    def _restart(self, engine: Engine, seconds: float) -> None:
        engine.die()
        self.world.boot(engine.slot, engine.life)

    def _hang(self, engine: Engine, seconds: float) -> None:
        engine.freeze()
        self._later(seconds, engine.thaw)

    def _core_hang(self, engine: Engine, seconds: float) -> None:
        if engine.hung_since is None:
            engine.hang()
            self._later(seconds, engine.unhang)

    def _stall(self, engine: Engine, seconds: float) -> None:
        def end() -> None:
            engine.stalled_since = None

        engine.stalled_since = self.world.loop.now
        self._later(seconds, end)

    def _cut(self, engine: Engine, seconds: float) -> None:
        def end() -> None:
            engine.is_cut = False

        engine.is_cut = True
        self._later(seconds, end)

    def _slow(self, engine: Engine, seconds: float) -> None:
        def end() -> None:
            engine.slow_s = 0.0

        engine.slow_s = seconds / 10.0
        self._later(seconds, end)

    def _partial_write(self, engine: Engine, seconds: float) -> None:
        engine.num_partial_writes += 1

    def _meddle(self, engine: Engine, seconds: float) -> None:
        engine.meddle(0 if engine.version != 0 else 1)

    def _old_life_returns(self, engine: Engine, seconds: float) -> None:
        engine.is_unkillable = True

    # -- the rest

    def _new_life(self, fault: Fault) -> None:
        if fault.what == "silent":  # an engine of the next life is the first to tell
            self._launcher_silent(fault)
        self.world.launcher.new_life(self.world.slots[fault.slot].group)

    def _trainer_crash(self, fault: Fault) -> None:
        self.world.trainer.die()
        self._later(fault.duration, self.world.restart_trainer)

    def _trainer_hang(self, fault: Fault) -> None:
        trainer = self.world.trainer
        trainer.freeze()
        self._later(fault.duration, trainer.thaw)

    def _router_restart(self, fault: Fault) -> None:
        self.world.router.fail()
        self._later(fault.duration, self._router_is_back)

    def _router_hang(self, fault: Fault) -> None:
        self.world.router.is_up = False
        self._later(fault.duration, self._router_is_back)

    def _router_is_back(self) -> None:
        self.world.router.is_up = True

    def _loop_stall(self, fault: Fault) -> None:
        loop = self.world.loop
        loop.stall(loop.now + fault.duration, timers_first=self.world.noise.random() < 0.5)
        self.world.checks.stalled_s += fault.duration

    def _orchestrator_restart(self, fault: Fault) -> None:
        self.world.kill_orchestrator(fault.duration)

    def _launcher_silent(self, fault: Fault) -> None:
        def end() -> None:
            self.world.launcher.is_silent = False

        self.world.launcher.is_silent = True
        self._later(fault.duration, end)


def _is_trainers(op: Op) -> bool:
    return isinstance(op, Open | Send | Finish) or (
        isinstance(op, Join | AbortGeneration) and op.slot is None
    )


_ON_ENGINE: dict[str, Callable[[Faults, Engine, float], None]] = {
    "crash": Faults._crash,
    "group_crash": Faults._group_crash,
    "restart": Faults._restart,
    "hang": Faults._hang,
    "core_hang": Faults._core_hang,
    "stall": Faults._stall,
    "cut": Faults._cut,
    "slow": Faults._slow,
    "partial_write": Faults._partial_write,
    "meddle": Faults._meddle,
    "old_life_returns": Faults._old_life_returns,
}
_ON_WORLD: dict[str, Callable[[Faults, Fault], None]] = {
    "new_life": Faults._new_life,
    "trainer_crash": Faults._trainer_crash,
    "trainer_hang": Faults._trainer_hang,
    "router_restart": Faults._router_restart,
    "router_hang": Faults._router_hang,
    "loop_stall": Faults._loop_stall,
    "orchestrator_restart": Faults._orchestrator_restart,
    "launcher_silent": Faults._launcher_silent,
}
# These are no reason to evict anybody.
_ON_NOBODY = ("trainer_crash", "trainer_hang", "router_restart", "router_hang", "launcher_silent")
