"""When a group of engines is started, stopped and given up. Pure: events in, commands out.

A group starts as a whole and ends as a whole. One exit ends the life of all its members, but the
others are left running until the relaunch moment: the orchestrator fences them meanwhile, and
operators can look at them.

| state | event | next state | commands |
|---|---|---|---|
| (none) | `start` | starting | StartGroup life 0 |
| starting | all members up | running | |
| starting | startup deadline | waiting | (relaunch is due after the back-off) |
| starting, running | MemberExited | exited | (relaunch is due after the back-off) |
| starting, running | RelaunchAsked for this life | waiting | (relaunch is due after the back-off) |
| exited, waiting | MemberExited | same | |
| exited, waiting | back-off over | same | StopGroup |
| exited, waiting | GroupStopped | starting | StartGroup life + 1 |
| starting, running | any end, budget used up | failed | StopGroup, GiveUp |
| any | `stop` | stopped | StopGroup for what may still run |

Rules: events of another life than the current one change nothing; every exit is a failure, code 0
included (an engine has no reason to end before the run does). Two budgets: lives that ended before
all members were up count in a row towards `max_never_healthy`, all relaunches count towards
`max_restarts`; a life that stayed up for `healthy_after_s` clears both and the back-off.
Time is an argument: seconds on any clock that does not go back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from protocol.launcher_api import GroupStepState, GroupView, MemberExit, Role

_ALIVE: tuple[GroupStepState, ...] = ("starting", "running")
_DUE: tuple[GroupStepState, ...] = ("exited", "waiting")
# 2 ** 30 initial back-offs are longer than any cap: keeps the power finite.
_MAX_DOUBLINGS = 30


@dataclass(frozen=True, slots=True)
class RelaunchPolicy:
    """Numbers of the policy; times in seconds."""

    backoff_initial_s: float
    backoff_max_s: float
    max_restarts: int
    max_never_healthy: int
    healthy_after_s: float
    startup_timeout_s: float

    def backoff_s(self, num_restarts: int) -> float:
        """Wait before relaunch number `num_restarts` (0-based, in a row)."""
        doublings = min(num_restarts, _MAX_DOUBLINGS)
        return min(self.backoff_max_s, self.backoff_initial_s * 2.0**doublings)


@dataclass(frozen=True, slots=True)
class MemberUp:
    """A member's server answered for the first time in this life."""

    group: int
    life: int
    index: int


@dataclass(frozen=True, slots=True)
class MemberExited:
    """A member's process ended, or could not be started."""

    group: int
    life: int
    exit: MemberExit


@dataclass(frozen=True, slots=True)
class RelaunchAsked:
    """The orchestrator wants the next life of a group."""

    group: int
    life: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupStopped:
    """No process of this life is left; answers StopGroup."""

    group: int
    life: int


@dataclass(frozen=True, slots=True)
class Deadline:
    """`next_deadline` has passed."""


Event = MemberUp | MemberExited | RelaunchAsked | GroupStopped | Deadline


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Start all members of a group as `life`."""

    group: int
    life: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopGroup:
    """End every member of this life that still runs; GroupStopped answers."""

    group: int
    life: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The group stays down: tell the user why."""

    group: int
    life: int
    reason: str


Command = StartGroup | StopGroup | GiveUp


@dataclass(slots=True)
class _Group:
    urls: tuple[str, ...]
    role: Role
    life: int = 0
    state: GroupStepState = "starting"
    started_at: float = 0.0
    up: set[int] = field(default_factory=set)
    up_since: float | None = None
    exits: dict[int, MemberExit] = field(default_factory=dict)
    reason: str = ""
    relaunch_at: float | None = None
    num_restarts: int = 0
    num_never_healthy: int = 0


class GroupKeeper:
    """Decides for all groups of a run. One writer: only the launcher's loop calls `handle`."""

    def __init__(
        self,
        groups: Mapping[int, Sequence[str]],
        policy: RelaunchPolicy,
        *,
        role: Role = "regular",
    ) -> None:
        """`groups` maps a group to the admin URL of each of its members, by index."""
        self._policy = policy
        self._groups = {
            group: _Group(urls=tuple(urls), role=role) for group, urls in sorted(groups.items())
        }

    def start(self, now: float) -> list[Command]:
        """First launch of every group."""
        commands: list[Command] = []
        for number, group in self._groups.items():
            group.started_at = now
            commands.append(StartGroup(number, group.life, "start of the run"))
        return commands

    def handle(self, now: float, event: Event) -> list[Command]:
        """Take in what happened; returns what to do, in order."""
        match event:
            case Deadline():
                return self._deadline(now)
            case MemberUp():
                self._member_up(now, event)
                return []
            case MemberExited():
                return self._member_exited(now, event)
            case RelaunchAsked():
                group = self._current(event.group, event.life)
                if group is None or group.state not in _ALIVE:
                    return []
                return self._end_life(now, event.group, "waiting", f"asked for: {event.reason}")
            case GroupStopped():
                return self._stopped(now, event)
            case _:
                assert_never(event)

    def stop(self, reason: str) -> list[Command]:
        """End of the run: every group ends on purpose, nothing is relaunched afterwards."""
        commands: list[Command] = []
        for number, group in self._groups.items():
            if group.state != "stopped":
                commands.append(StopGroup(number, group.life, reason))
            group.state = "stopped"
            group.relaunch_at = None
        return commands

    def next_deadline(self) -> float | None:
        """When `Deadline` is due next; None while nothing is timed."""
        times = [self._deadline_of(group) for group in self._groups.values()]
        return min((time for time in times if time is not None), default=None)

    def relaunch_at(self, group: int) -> float | None:
        """When the back-off of `group` is over; None while none is running."""
        return self._groups[group].relaunch_at

    def view(self) -> list[GroupView]:
        """What the orchestrator is told, by group."""
        return [
            GroupView(
                group=number,
                life=group.life,
                state=group.state,
                role=group.role,
                urls=list(group.urls),
                exits=[group.exits[index] for index in sorted(group.exits)],
                restarts_left=max(0, self._policy.max_restarts - group.num_restarts),
            )
            for number, group in self._groups.items()
        ]

    def _current(self, number: int, life: int) -> _Group | None:
        group = self._groups.get(number)
        return group if group is not None and group.life == life else None

    def _deadline_of(self, group: _Group) -> float | None:
        if group.state == "starting":
            return group.started_at + self._policy.startup_timeout_s
        return group.relaunch_at

    def _deadline(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for number, group in self._groups.items():
            due = self._deadline_of(group)
            if due is None or due > now:
                continue
            if group.state == "starting":
                silent = sorted(set(range(len(group.urls))) - group.up)
                reason = f"not up after {self._policy.startup_timeout_s:g} s: " + ", ".join(
                    f"g{number}e{index}" for index in silent
                )
                commands += self._end_life(now, number, "waiting", reason)
            else:
                group.relaunch_at = None
                commands.append(StopGroup(number, group.life, group.reason))
        return commands

    def _member_up(self, now: float, event: MemberUp) -> None:
        group = self._current(event.group, event.life)
        if group is None or group.state != "starting":
            return
        group.up.add(event.index)
        if len(group.up) == len(group.urls):
            group.state = "running"
            group.up_since = now

    def _member_exited(self, now: float, event: MemberExited) -> list[Command]:
        group = self._current(event.group, event.life)
        if group is None or group.state in ("stopped", "failed"):
            return []
        was_alive = group.state in _ALIVE
        group.exits[event.exit.index] = event.exit
        if not was_alive:
            return []
        reason = f"g{event.group}e{event.exit.index} {describe_exit(event.exit)}"
        return self._end_life(now, event.group, "exited", reason)

    def _end_life(
        self, now: float, number: int, state: GroupStepState, reason: str
    ) -> list[Command]:
        """The current life is over: schedule the next one, or give the group up."""
        group, policy = self._groups[number], self._policy
        group.reason = reason
        if group.up_since is None:
            group.num_never_healthy += 1
        else:
            group.num_never_healthy = 0
            if now - group.up_since >= policy.healthy_after_s:
                group.num_restarts = 0
        cause = None
        if group.num_never_healthy > policy.max_never_healthy:
            cause = f"{group.num_never_healthy} lives in a row ended before all members were up"
        elif group.num_restarts >= policy.max_restarts:
            cause = f"{policy.max_restarts} relaunches used up"
        if cause is not None:
            group.state = "failed"
            reason = f"{cause}; last: {reason}"
            return [
                StopGroup(number, group.life, reason),
                GiveUp(number, group.life, reason),
            ]
        group.state = state
        group.relaunch_at = now + policy.backoff_s(group.num_restarts)
        group.num_restarts += 1
        return []

    def _stopped(self, now: float, event: GroupStopped) -> list[Command]:
        group = self._current(event.group, event.life)
        if group is None or group.state not in _DUE:
            return []
        group.life += 1
        group.state = "starting"
        group.started_at = now
        group.up = set()
        group.up_since = None
        group.exits = {}
        group.relaunch_at = None
        return [StartGroup(event.group, group.life, group.reason)]


def describe_exit(exit_: MemberExit) -> str:
    """`was killed by signal 9` or `exited with code 1`."""
    if exit_.signal is not None:
        return f"was killed by signal {exit_.signal}"
    return f"exited with code {exit_.exit_code}"
