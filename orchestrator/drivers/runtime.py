"""The loop round the plane: events in, journal, commands out. The only writer of the core.

    prober, router, trainer, launcher, ops --post--> queue --> core.handle --> journal --> drivers

Rules: a line is in the journal before its commands are carried out; every op gets exactly one
terminal event, no later than its deadline; observers see commands after they were handed out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.drivers.admin_http import NoAnswer, Refused
from orchestrator.drivers.engines import EngineDriver
from orchestrator.drivers.journal import Journal
from orchestrator.drivers.launcher import LauncherDesk
from orchestrator.drivers.prober import Prober
from orchestrator.drivers.router import Routing
from orchestrator.drivers.trainer import TrainerLink
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
from orchestrator.plane.core import PlaneCore
from orchestrator.plane.events import Deadline, Event, OpFailed, OpSucceeded, OpUnknown

log = logging.getLogger(__name__)

Notice = Report | Route | UpdateEnded | Fail
# An op that its driver does not end by its deadline is ended here, this much later.
_GRACE_S = 1.0
_START = Deadline()


@dataclass(frozen=True, slots=True)
class Drivers:
    """Everybody that carries out commands. `router` None: a fleet without a router."""

    engines: EngineDriver
    prober: Prober
    trainer: TrainerLink
    router: Routing | None
    launcher: LauncherDesk | None


class Runtime:
    """`post` events from anywhere in the loop's thread; `run` until cancelled."""

    def __init__(
        self,
        core: PlaneCore,
        journal: Journal,
        clock: Callable[[], float],
        on_notice: Callable[[Notice], None],
    ) -> None:
        self.core = core
        self._journal = journal
        self._clock = clock
        self._on_notice = on_notice
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ops: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def post(self, event: Event) -> None:
        """Queue an event for the core."""
        self._events.put_nowait(event)

    async def run(self, drivers: Drivers, first: Event = _START) -> None:
        """Feed the core, `first` to begin with, until cancelled; then end what still runs."""
        try:
            self._step(first, drivers)
            while True:
                event = await self._next_event()
                if self._failure is not None:
                    raise self._failure
                self._step(event, drivers)
        finally:
            for task in self._ops:
                task.cancel()

    async def _next_event(self) -> Event:
        if not self._events.empty():
            return self._events.get_nowait()
        deadline = self.core.next_deadline()
        if deadline is None:
            return await self._events.get()
        try:
            async with asyncio.timeout(max(deadline - self._clock(), 0.0)):
                return await self._events.get()
        except TimeoutError:
            return Deadline()

    def _step(self, event: Event, drivers: Drivers) -> None:
        now = self._clock()
        commands = self.core.handle(now, event)
        # Also when nothing follows: a replay must hear all that the core has heard.
        self._journal.append(now, event, commands)
        if self._journal.is_full:
            self._journal.rotate(self.core.memory())
        for command in commands:
            self._act(command, drivers)

    def _act(self, command: Command, drivers: Drivers) -> None:
        match command:
            case Probe():
                drivers.prober.watch(command)
            case Relaunch():
                if drivers.launcher is not None:
                    drivers.launcher.wish(command)
            case Route():
                drivers.prober.serve(command.entries)
                if drivers.router is not None:
                    drivers.router.want(entry.url for entry in command.entries)
                self._on_notice(command)
            case Report() | UpdateEnded() | Fail():
                self._on_notice(command)
            case _:
                task = asyncio.create_task(self._run_op(command, drivers))
                self._ops.add(task)
                task.add_done_callback(self._op_ended)

    def _op_ended(self, task: asyncio.Task[None]) -> None:
        self._ops.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A programming error in a driver ends the loop; it is never swallowed.
            self._failure = error
            self.post(Deadline())

    async def _run_op(self, command: Op, drivers: Drivers) -> None:
        op_id = command.op_id
        left = command.deadline - self._clock() + _GRACE_S
        try:
            async with asyncio.timeout(max(left, 0.0)):
                match command:
                    case Open() | Send() | Finish() | Join(slot=None) | AbortGeneration(slot=None):
                        result = await drivers.trainer.run(command)
                    case (
                        Join() | Stage() | Pause() | Commit() | ReadVersion() | Resume() | Admit()
                        | Fence() | AbortGeneration()
                    ):  # fmt: skip
                        result = await drivers.engines.run(command)
                    case _:
                        raise AssertionError(f"no driver for {command}")
        except Refused as error:
            self.post(OpFailed(op_id, str(error)))
        except (NoAnswer, TimeoutError) as error:
            self.post(OpUnknown(op_id, str(error) or "no answer by the deadline"))
        else:
            self.post(OpSucceeded(op_id, result))
