"""Carries out what a GroupKeeper decides: starts, watches and stops the processes of its groups.

`GroupKeeper` (pure) says what; this says how. Everything happens on one event loop, so there is
one writer and no lock. Two users: the engine groups, and the router as a group of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import assert_never

from launch.processes import ManagedProcess, ProcessSpec, ProcessTable
from launch.relaunch import (
    Command,
    Deadline,
    Event,
    GiveUp,
    GroupKeeper,
    GroupStopped,
    MemberExited,
    MemberUp,
    StartGroup,
    StopGroup,
)
from protocol.launcher_api import MemberExit

LOG_TAIL_LINES = 15
_UP_INTERVAL_S = 0.3
# What a shell reports for a program that it cannot run.
_CANNOT_RUN = 127


class Fleet:
    """Groups of processes that are relaunched as groups."""

    def __init__(
        self,
        keeper: GroupKeeper,
        members: Mapping[int, Sequence[ProcessSpec]],
        *,
        table: ProcessTable,
        is_up: Callable[[ProcessSpec], Awaitable[bool]],
        stop_grace_s: float,
        on_change: Callable[[], None],
        on_give_up: Callable[[GiveUp], None],
        say: Callable[[str], None],
        label: Callable[[int], str],
    ) -> None:
        """`members` maps each group of the keeper to its processes, by index.

        `say` takes messages for the user, `label` names a group in them.
        """
        self._keeper = keeper
        self._members = members
        self._table = table
        self._is_up = is_up
        self._stop_grace_s = stop_grace_s
        self._on_change = on_change
        self._on_give_up = on_give_up
        self._say = say
        self._label = label
        self._processes: dict[tuple[int, int], ManagedProcess] = {}
        self._timer = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def keeper(self) -> GroupKeeper:
        """State of the groups."""
        return self._keeper

    async def run(self) -> None:
        """Start all groups and keep them until cancelled; processes are left to `stop`."""
        async with asyncio.TaskGroup() as self._tasks:
            self._apply(self._keeper.start(self._now()))
            while True:
                await self._until_deadline()
                self.handle(Deadline())

    def handle(self, event: Event) -> None:
        """Tell the keeper what happened and do what it answers."""
        before = self._keeper.view()
        self._apply(self._keeper.handle(self._now(), event))
        self._timer.set()
        if self._keeper.view() != before:
            self._on_change()

    async def stop(self, reason: str) -> None:
        """End all groups for good, at the same time. Bounded: see ManagedProcess.stop."""
        for command in self._keeper.stop(reason):
            assert isinstance(command, StopGroup)
        self._on_change()
        await asyncio.gather(*(p.stop(self._stop_grace_s) for p in self._processes.values()))

    async def _until_deadline(self) -> None:
        """Wait for the keeper's next deadline, whatever it becomes meanwhile."""
        while True:
            self._timer.clear()
            due = self._keeper.next_deadline()
            if due is not None and due <= self._now():
                return
            try:
                async with asyncio.timeout_at(due):
                    await self._timer.wait()
            except TimeoutError:
                return

    def _apply(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case StartGroup():
                    self._start_group(command)
                case StopGroup():
                    self._spawn(self._stop_group(command))
                case GiveUp():
                    self._on_give_up(command)
                case _:
                    assert_never(command)

    def _start_group(self, command: StartGroup) -> None:
        if command.life > 0:
            self._say(f"{self._label(command.group)} starts again, life {command.life}")
        for index, spec in enumerate(self._members[command.group]):
            try:
                process = self._table.start(spec, command.life)
            except OSError as error:
                self._spawn(self._cannot_start(command, index, error))
                continue
            self._processes[command.group, index] = process
            self._spawn(self._watch(process, command, index))
            self._spawn(self._until_up(process, command, index))
        self._on_change()

    async def _cannot_start(self, command: StartGroup, index: int, error: OSError) -> None:
        exit_ = MemberExit(index=index, exit_code=_CANNOT_RUN, log_tail=[str(error)])
        self.handle(MemberExited(command.group, command.life, exit_))

    async def _watch(self, process: ManagedProcess, command: StartGroup, index: int) -> None:
        ended = await process.wait_exit()
        exit_ = MemberExit(
            index=index,
            exit_code=ended.code,
            signal=ended.signal,
            log_tail=process.log_tail(LOG_TAIL_LINES),
        )
        before = self._state(command)
        self.handle(MemberExited(command.group, command.life, exit_))
        if before in ("starting", "running"):
            due = self._keeper.relaunch_at(command.group)
            when = "" if due is None else f", relaunch in {max(0.0, due - self._now()):.1f} s"
            # A life that never came up says why itself, in its last line.
            last = exit_.log_tail[-1:] if before == "starting" else []
            lines = "".join(f"\n    {line}" for line in last)
            self._say(f"{process.spec.name} ended: {ended}{when}; log: {process.log_path}{lines}")

    async def _until_up(self, process: ManagedProcess, command: StartGroup, index: int) -> None:
        """Report the first answer of a member; the keeper bounds how long that may take."""
        while process.exit is None and self._state(command) == "starting":
            if await self._is_up(process.spec):
                self.handle(MemberUp(command.group, command.life, index))
                if self._state(command) == "running":
                    self._say(f"{self._label(command.group)} is up, life {command.life}")
                return
            await asyncio.sleep(_UP_INTERVAL_S)

    async def _stop_group(self, command: StopGroup) -> None:
        processes = [p for (group, _), p in self._processes.items() if group == command.group]
        await asyncio.gather(*(process.stop(self._stop_grace_s) for process in processes))
        self.handle(GroupStopped(command.group, command.life))

    def _state(self, command: StartGroup) -> str:
        """State of a group, empty when its life is not the command's any more."""
        for view in self._keeper.view():
            if view.group == command.group and view.life == command.life:
                return view.state
        return ""

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
