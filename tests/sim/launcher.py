"""The launcher: the real GroupKeeper decides, the real LauncherDesk answers; processes are fake.

Without a launcher somebody restarts dead engines by hand, at the same address and life.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launch.relaunch import (
    Command,
    Deadline,
    Event,
    GiveUp,
    GroupKeeper,
    GroupStopped,
    MemberExited,
    MemberUp,
    RelaunchAsked,
    RelaunchPolicy,
    StartGroup,
)
from orchestrator.drivers.launcher import LauncherDesk
from orchestrator.plane.commands import Relaunch
from protocol.ids import Slot
from protocol.launcher_api import GroupsView, GroupView, MemberExit
from tests.sim.engine import Engine

if TYPE_CHECKING:
    from tests.sim.world import World

_RUN_ID = "sim"
_POST_S = 1.0
_STOP_S = 0.1


class Launcher:
    """Starts, watches and stops the engines of all groups."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_silent = False
        self._desk = LauncherDesk(_RUN_ID, world.post)
        numbers = sorted({slot.group for slot in world.slots})
        urls = {n: [world.url(slot, 0) for slot in world.of(n)] for n in numbers}
        self._keeper = GroupKeeper(urls, _policy(world))
        self._lives = dict.fromkeys(numbers, 0)
        self._turn = 0
        self._due: float | None = None

    def start(self) -> None:
        """First launch of all groups."""
        self._apply(self._keeper.start(self.world.loop.now))
        self._exchange(self._turn)

    def orchestrator_restarted(self) -> None:
        """Its desk remembers nothing; we post on."""
        self._desk = LauncherDesk(_RUN_ID, self.world.post)
        self._turn += 1
        self.world.loop.ours(self.world.loop.now + _POST_S / 2, self._exchange, self._turn)

    def wish(self, command: Relaunch) -> None:
        """The plane wants the end of a life."""
        self._desk.wish(command)

    def exited(self, engine: Engine) -> None:
        """A process ended by itself."""
        exit_ = MemberExit(index=engine.slot.index, signal=9)
        self._handle(MemberExited(engine.slot.group, engine.life, exit_))

    def new_life(self, group: int) -> None:
        """Somebody else asks for the next life."""
        self._handle(RelaunchAsked(group, self._lives[group], "by hand"))

    def is_given_up(self, group: int) -> bool:
        """Whether the group will never be started again."""
        return self._state(group) == "failed"

    def _handle(self, event: Event) -> None:
        """Tell the keeper, do what it says, post if something changed."""
        loop = self.world.loop
        before = self._keeper.view()
        self._apply(self._keeper.handle(loop.now, event))
        if self._keeper.view() != before:
            self._turn += 1
            loop.ours(loop.now + self.world.latency(), self._exchange, self._turn)
        due = self._keeper.next_deadline()
        if due is not None and due != self._due:
            self._due = due
            loop.at(max(due, loop.now), self._timer, due)

    def _timer(self, due: float) -> None:
        if due == self._due:
            self._due = None
            self._handle(Deadline())

    def _apply(self, commands: Sequence[Command]) -> None:
        loop = self.world.loop
        for command in commands:
            if isinstance(command, StartGroup):
                self._lives[command.group] = command.life
                for slot in self.world.of(command.group):
                    seconds = self.world.timing["boot_s"] * self.world.noise.uniform(0.8, 1.2)
                    loop.at(loop.now + seconds, self._up, slot, command.life)
            elif isinstance(command, GiveUp):
                self.world.note(f"g{command.group} is given up: {command.reason}")
            else:
                loop.at(loop.now + _STOP_S, self._stop_group, command.group, command.life)

    def _up(self, slot: Slot, life: int) -> None:
        if life == self._lives[slot.group] and self._state(slot.group) == "starting":
            self.world.boot(slot, life)
            self._handle(MemberUp(slot.group, life, slot.index))

    def _stop_group(self, group: int, life: int) -> None:
        for slot in self.world.of(group):
            engine = self.world.engines.get(slot)
            if engine is None:
                continue
            # A process on a lost node, or that ignores SIGKILL, stays; its lease is what ends it.
            is_lost = engine.is_cut and self.world.timing["moves"]
            if not engine.is_unkillable and not is_lost:
                engine.die()
        self._handle(GroupStopped(group, life))

    def _urls(self, view: GroupView) -> list[str]:
        """A spare node for each life."""
        return [self.world.url(slot, view.life) for slot in self.world.of(view.group)]

    def _state(self, group: int) -> str:
        return next(view.state for view in self._keeper.view() if view.group == group)

    def _exchange(self, turn: int) -> None:
        if turn != self._turn:
            return
        if not self.is_silent:
            world = self.world
            views = self._keeper.view()
            if world.timing["moves"]:
                views = [view.model_copy(update={"urls": self._urls(view)}) for view in views]
            reply = self._desk.exchange(GroupsView(run_id=_RUN_ID, groups=views))
            for wish in reply.relaunch:
                self._handle(RelaunchAsked(wish.group, wish.life, wish.reason))
        self._turn += 1
        self.world.loop.ours(self.world.loop.now + _POST_S, self._exchange, self._turn)


class ByHand:
    """No launcher: dead engines come back at their address, with the same life."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_silent = False

    def start(self) -> None:
        """First launch of all engines."""
        for slot in self.world.slots:
            self._later(slot)

    def orchestrator_restarted(self) -> None:
        """Nobody posts."""

    def wish(self, command: Relaunch) -> None:
        """Nobody takes wishes; the core must not make any."""
        self.world.checks.violated("relaunch", f"{command} without a launcher")

    def exited(self, engine: Engine) -> None:
        """It is noticed after a while."""
        self._later(engine.slot)

    def new_life(self, group: int) -> None:
        """All engines of the group are restarted."""
        for slot in self.world.of(group):
            engine = self.world.engines.get(slot)
            if engine is not None:
                engine.die()
            self._later(slot)

    def is_given_up(self, group: int) -> bool:
        """Never."""
        return False

    def _later(self, slot: Slot) -> None:
        seconds = self.world.timing["boot_s"] * self.world.noise.uniform(0.8, 1.2)
        self.world.loop.at(self.world.loop.now + seconds, self._boot, slot)

    def _boot(self, slot: Slot) -> None:
        engine = self.world.engines.get(slot)
        if engine is None or not engine.is_alive:
            self.world.boot(slot, 0)


def _policy(world: World) -> RelaunchPolicy:
    return RelaunchPolicy(
        backoff_initial_s=0.2,
        backoff_max_s=2.0,
        max_restarts=int(world.timing["max_restarts"]),
        max_never_healthy=10,
        healthy_after_s=5.0,
        startup_timeout_s=20.0,
    )
