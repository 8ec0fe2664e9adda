"""The world round the real core: wiring, time, and the loop that feeds it.

    heap -> world events -> posted events -> core.handle -> checks -> commands -> heap

As in `drivers/runtime.py` the core has one writer, its commands are carried out in order, and
`Deadline` comes when nothing else is due.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from orchestrator.plane.commands import (
    Command,
    Fail,
    Op,
    Probe,
    Relaunch,
    Report,
    Route,
    UpdateEnded,
)
from orchestrator.plane.core import PlaneCore
from orchestrator.plane.events import BroadcastReady, Deadline, Event, Restarted
from orchestrator.plane.health import ProbeSettings
from orchestrator.plane.state import PlaneSettings
from protocol.ids import Slot
from tests.sim.checks import PHASE_OF, Checks
from tests.sim.client import Client
from tests.sim.coverage import Coverage
from tests.sim.engine import Engine
from tests.sim.faults import Faults
from tests.sim.launcher import ByHand, Launcher
from tests.sim.loop import Loop
from tests.sim.plan import Plan
from tests.sim.prober import Prober
from tests.sim.router import Router, Routing
from tests.sim.trainer import Trainer

_START = 100.0


class World:
    """One run of one plan. `trace` collects a line an event when it is a list."""

    def __init__(
        self, plan: Plan, coverage: Coverage | None = None, trace: list[str] | None = None
    ) -> None:
        self.plan = plan
        self.plane = plan.plane
        self.timing = plan.timing
        self.noise = random.Random(plan.noise)
        self.loop = Loop(_START)
        self.trace = trace
        self.coverage = coverage
        groups = plan.groups
        self.slots = [Slot(g, groups[:place].count(g)) for place, g in enumerate(groups)]
        self.in_order = sorted(self.slots)
        self.world_sizes = dict(zip(self.slots, plan.world_sizes, strict=True))
        self._of = {g: [slot for slot in self.slots if slot.group == g] for g in groups}
        self.engines: dict[Slot, Engine] = {}
        self.everyone: list[Engine] = []
        self.at_url: dict[str, Engine] = {}
        self.num_events = 0
        self.num_boots = 0
        self.updates: list[UpdateEnded] = []
        self.failed: str | None = None
        self.phase: str | None = None
        self.is_down = False
        self._kill_after: float | None = None
        self._posted: deque[Event] = deque()
        self._told_by_trainer: tuple[str, int] | None = None
        self._settings = PlaneSettings(**self.plane)
        self.core = PlaneCore(
            self._settings, [self.url(slot, 0) for slot in self.slots], groups, _START
        )
        self.core_deadline: float | None = None
        self.checks = Checks(self)
        self.faults = Faults(self, plan.faults)
        self.router = Router(self)
        self.trainer = Trainer(self, "trainer-1", 0)
        has_launcher = self.plane["has_launcher"]
        self.launcher: Launcher | ByHand = Launcher(self) if has_launcher else ByHand(self)
        self._make_drivers()

    def _make_drivers(self) -> None:
        self.client = Client(self)
        self.prober = Prober(self, ProbeSettings(**self.plan.probe), self.timing["probe_timeout_s"])
        self.routing = Routing(self)

    def start(self) -> None:
        """Everybody starts."""
        self.post(Deadline())
        self.launcher.start()
        self.routing.start()
        boot_s = self.timing["boot_s"]
        self.loop.at(self.loop.now + boot_s * self.noise.random(), self._publish)

    def _publish(self) -> None:
        self.trainer.publish()

    # -- the orchestrator's process

    def kill_orchestrator(self, seconds: float) -> None:
        """SIGKILL at its next event: that is in the journal, its commands may not be carried out."""  # noqa: E501
        self._kill_after = seconds

    def _killed(self, seconds: float) -> None:
        self._kill_after = None
        self.is_down = True
        self.note("the orchestrator is killed")
        for part in (self.client, self.prober, self.routing):
            part.close()
        self._posted.clear()
        self.loop.kill()
        self.core_deadline = None
        self._told_by_trainer = None
        self.checks.restarting()
        self.loop.at(self.loop.now + seconds, self._return)

    def _return(self) -> None:
        self.is_down = False
        self.core = PlaneCore.from_memory(self._settings, self.core.memory())
        self._make_drivers()
        self.post(Restarted())
        self.launcher.orchestrator_restarted()
        self.routing.start()
        self.tell_trainer()

    # -- what is where

    def of(self, group: int) -> list[Slot]:
        """The slots of a group, by index."""
        return self._of[group]

    def url(self, slot: Slot, life: int) -> str:
        """Where an engine of that life is."""
        return f"http://{slot.engine_id}-{life if self.timing['moves'] else 0}:8000"

    def latency(self) -> float:
        """One way, now and then longer."""
        noise = self.noise.random()
        return self.timing["latency_s"] * (0.5 + noise if noise < 0.98 else 4.0)

    def boot(self, slot: Slot, life: int) -> None:
        """A new process at the address of that life; it replaces what is still there."""
        self.num_boots += 1
        url = self.url(slot, life)
        old = self.at_url.get(url)
        if old is not None:
            old.die()
        engine = Engine(self, slot, url, f"b{self.num_boots}", life)
        self.engines[slot] = self.at_url[url] = engine
        self.everyone.append(engine)
        self.note(f"{engine} is up, life {life}")

    def restart_trainer(self) -> None:
        """A new process with the weights of the last checkpoint: what was published last, or what
        is served. One that is older than what is served ends the run, see docs/fault-model.md."""
        old = self.trainer
        if old.is_alive:
            return
        number = int(old.boot.split("-")[1]) + 1
        version = old.version
        if self.noise.random() < 0.5 and self.phase is None:
            version = max(version - 1, self.checks.policy or 0)
        self.trainer = Trainer(self, f"trainer-{number}", version)
        self.loop.at(self.loop.now + self.latency(), self._publish)

    def tell_trainer(self) -> None:
        """The trainer's status is on its way to the orchestrator."""
        trainer = self.trainer
        if self.is_down or trainer.published is None or not trainer.is_alive:
            return
        when = self.loop.now + self.latency()
        self.loop.ours(when, self._heard_trainer, trainer.boot, trainer.published)

    def _heard_trainer(self, boot: str, version: int) -> None:
        """The link tells news only."""
        if (boot, version) != self._told_by_trainer:
            self._told_by_trainer = (boot, version)
            self.post(BroadcastReady(version, boot))

    def makes_rollouts(self) -> bool:
        """Whether the router has somebody who answers."""
        if not self.router.is_up or self.is_down:
            return False
        engines = (self.at_url.get(url) for url in self.router.listed)
        return any(engine is not None and engine.serves() for engine in engines)

    # -- time

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until it holds (True), the run fails, or `limit_s` are over (False)."""
        loop = self.loop
        end = loop.now + limit_s
        while not until():
            if self._posted and not loop.is_burst() and loop.now >= loop.busy_until:
                self._feed(self._posted.popleft())
                continue
            due = self.core_deadline
            upcoming = loop.next_at()
            if due is not None and max(due, loop.busy_until) <= upcoming and not self._posted:
                if max(due, loop.busy_until) > end:
                    return False
                loop.now = max(due, loop.busy_until, loop.now)
                self._feed(Deadline())
            elif upcoming > end:
                loop.now = end
                return False
            else:
                loop.step()
                self.checks.look()
            if self.failed is not None:
                return False
        return True

    def is_idle(self) -> bool:
        """Whether the core has heard everything."""
        return not self._posted and not self.is_down

    def post(self, event: Event) -> None:
        """Queue an event for the core."""
        if not self.is_down:
            self._posted.append(event)

    def _feed(self, event: Event) -> None:
        self.num_events += 1
        checks = self.checks
        if self.coverage is not None:
            self.coverage.event(self, event)
        checks.before(event)
        commands = self.core.handle(self.loop.now, event)
        self.core_deadline = self.core.next_deadline()
        if self.trace is not None:
            self.trace.append(f"{self.loop.now:.4f} {event} -> {commands}")
        for command in commands:
            checks.command(command)
        checks.event(event, commands)
        if self._kill_after is None:
            for command in commands:
                self._act(command)
        else:
            # A process ends between any two commands.
            for command in commands[: self.noise.randrange(len(commands) + 1)]:
                self._act(command)
            self._killed(self._kill_after)
        checks.look()

    def _act(self, command: Command) -> None:
        if isinstance(command, Op):
            self.client.start(command)
            phase = PHASE_OF.get(type(command).__name__)
            if phase is not None and phase != self.phase:
                self.phase = phase
                self.faults.entered(phase)
        elif isinstance(command, Probe):
            self.prober.watch(command)
        elif isinstance(command, Route):
            self.prober.serve(command.entries)
            self.routing.want(tuple(entry.url for entry in command.entries))
        elif isinstance(command, Relaunch):
            self.launcher.wish(command)
        elif isinstance(command, UpdateEnded):
            self.phase = None
            self.updates.append(command)
        elif isinstance(command, Fail):
            self.failed = command.reason
        else:
            assert isinstance(command, Report)

    def note(self, text: str) -> None:
        """A line for the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.loop.now:.4f} -- {text}")
