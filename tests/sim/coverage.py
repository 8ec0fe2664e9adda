"""Which cells of three tables were hit: (state of a group, its event), (phase of the update, event)
and (op, outcome). The axes come from the code, so a new state, phase, event or op is a new row that
must be hit, or be listed in `IMPOSSIBLE` with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from orchestrator.plane import commands
from orchestrator.plane.commands import GroupState, Op
from orchestrator.plane.events import (
    BroadcastReady,
    Deadline,
    EngineAnswered,
    EngineSilent,
    EngineStuck,
    Event,
    GroupLaunched,
    MembersListed,
    OpFailed,
    OpSucceeded,
    OpUnknown,
    Restarted,
)
from orchestrator.plane.state import Phase
from protocol.launcher_api import GroupStepState

if TYPE_CHECKING:
    from tests.sim.world import World

Cell = tuple[str, str, str]

IDLE = "idle"
_ANSWERS = ("answered", "answered: new boot", "answered: next life", "answered: older life")
_LAUNCHED = tuple(f"launched: {state}" for state in get_args(GroupStepState))
GROUP_EVENTS = (*_ANSWERS, "silent", "stuck", *_LAUNCHED, "restarted")
_OUTCOMES = {OpSucceeded: "succeeded", OpFailed: "failed", OpUnknown: "unknown"}
_LATE = tuple(f"late {outcome}" for outcome in _OUTCOMES.values())
_READY = ("ready: next version", "ready: new trainer")
_LISTED = ("listed", "listed: router is down")
UPDATE_EVENTS = (
    *("answered", "silent", "stuck", "launched", *_READY, *_LISTED, "deadline", "restarted"),
    *(*_OUTCOMES.values(), *_LATE),
)
OPS = tuple(sorted(kind.__name__ for kind in get_args(commands.Command) if issubclass(kind, Op)))

_NO_STOP = "the launcher stops groups on purpose only when the run is over"
_NO_OLD_LIFE = (
    "the prober asks for the life that is believed; an older answer was posted before the \
eviction that raised it, and all members must answer anew before the group is in service"
)
_NO_UPDATE = "an outcome is awaited by an update; between updates it is a late one"

IMPOSSIBLE: dict[Cell, str] = {
    **{("group", state, "launched: stopped"): _NO_STOP for state in get_args(GroupState)},
    **{("group", state, _ANSWERS[3]): _NO_OLD_LIFE for state in ("candidate", "admitted")},
    **{("update", IDLE, outcome): _NO_UPDATE for outcome in _OUTCOMES.values()},
}


def cells() -> set[Cell]:
    """All cells that can be hit."""
    found = {("group", state, event) for state in get_args(GroupState) for event in GROUP_EVENTS}
    found |= {
        ("update", phase, event) for phase in (IDLE, *get_args(Phase)) for event in UPDATE_EVENTS
    }
    found |= {("op", op, outcome) for op in OPS for outcome in _OUTCOMES.values()}
    return found - IMPOSSIBLE.keys()


class Coverage:
    """How often each cell was hit."""

    def __init__(self) -> None:
        self.hits: dict[Cell, int] = {}

    def missing(self) -> list[Cell]:
        """Cells that can be hit and were not."""
        return sorted(cells() - self.hits.keys())

    def surprising(self) -> list[Cell]:
        """Cells that were hit and are called impossible."""
        return sorted(self.hits.keys() - cells())

    def merge(self, hits: dict[Cell, int]) -> None:
        """Add what another run has hit."""
        for cell, count in hits.items():
            self.hits[cell] = self.hits.get(cell, 0) + count

    def event(self, world: World, event: Event) -> None:
        """Just before the core gets it."""
        checks = world.checks
        phase = world.phase or IDLE
        if isinstance(event, OpSucceeded | OpFailed | OpUnknown):
            outcome = _OUTCOMES[type(event)]
            if checks.is_awaited(event.op_id):
                self._hit("update", phase, outcome)
            else:
                self._hit("update", phase, f"late {outcome}")
            self._hit("op", type(checks.ops[event.op_id][0]).__name__, outcome)
            return
        name, group = _name(world, event)
        if group is not None:
            self._hit("group", checks.state[group], name)
        if isinstance(event, Restarted):
            for state in checks.state.values():
                self._hit("group", state, name)
        self._hit("update", phase, name.partition(":")[0] if group is not None else name)

    def _hit(self, table: str, row: str, column: str) -> None:
        cell = (table, row, column)
        self.hits[cell] = self.hits.get(cell, 0) + 1


def _name(world: World, event: Event) -> tuple[str, int | None]:
    """The event's column, and the group that it is about."""
    checks = world.checks
    if isinstance(event, EngineAnswered):
        group, known = event.slot.group, checks.told.get(event.slot)
        if event.life > checks.life[group]:
            return "answered: next life", group
        if event.life < max(checks.life[group], checks.asked_life.get(group, -1) + 1):
            return "answered: older life", group
        is_new = known is not None and known.boot_id != event.boot_id
        return "answered: new boot" if is_new else "answered", group
    if isinstance(event, EngineSilent):
        return "silent", event.slot.group
    if isinstance(event, EngineStuck):
        return "stuck", event.slot.group
    if isinstance(event, GroupLaunched):
        return f"launched: {event.state}", event.group
    if isinstance(event, BroadcastReady):
        is_new = event.trainer_boot != checks.trainer_boot
        return "ready: new trainer" if is_new else "ready: next version", None
    if isinstance(event, MembersListed):
        return "listed" if event.urls is not None else "listed: router is down", None
    assert isinstance(event, Deadline | Restarted)
    return "deadline" if isinstance(event, Deadline) else "restarted", None
