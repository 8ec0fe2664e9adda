"""What a restarted orchestrator knows: its journal, folded into what the core remembered last.

    newest segment: header + events --the core itself--> memory --Restarted--> the core goes on

Rules: the fold is the core fed with the recorded events, so it knows every state that the core
knows. Nothing is believed of a journal that the core does not repeat command for command (another
version of Muster wrote it): then states and counters are taken from the recorded commands, and no
group returns without a reload. The plane's clock goes on: the time away is measured by the wall
clock, and never negative, since the monotonic clock of a machine starts anew with its boot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.drivers.journal import (
    BadLine,
    Header,
    Journal,
    Line,
    read_segment,
    segments,
)
from orchestrator.errors import RunFailed
from orchestrator.plane.commands import Command, Op, Open, Report, Route
from orchestrator.plane.core import PlaneCore
from orchestrator.plane.events import Deadline, Event, Restarted
from orchestrator.plane.state import PlaneMemory, PlaneSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Past:
    """The end of a journal. `problem` says where the core did not repeat it."""

    header: Header
    memory: PlaneMemory
    t: float
    time: float
    problem: str = ""

    def now(self, time: float) -> float:
        """The plane's clock at the wall clock's `time`."""
        return self.t + max(time - self.time, 0.0)


def core_of(header: Header) -> PlaneCore:
    """The core as it was at the beginning of a segment."""
    if header.memory is None:
        return PlaneCore(header.settings, header.urls, header.groups, header.t)
    return PlaneCore.from_memory(header.settings, header.memory)


def first_difference(
    recorded: tuple[Command, ...], repeated: tuple[Command, ...]
) -> tuple[Command | None, Command | None] | None:
    """The first pair of commands that differ, None for one that is not there."""
    length = max(len(recorded), len(repeated))
    for index in range(length):
        left = recorded[index] if index < len(recorded) else None
        right = repeated[index] if index < len(repeated) else None
        if left != right:
            return left, right
    return None


def fold(header: Header, lines: Iterable[Line]) -> Past:
    """What was known at the end of a segment."""
    core = core_of(header)
    t, time, problem = header.t, header.time, ""
    recorded: list[tuple[float, Command]] = []
    line = None
    for line in lines:
        repeated = tuple(core.handle(line.t, line.event))
        t, time = line.t, line.time
        recorded += [(line.t, command) for command in line.commands]
        if not problem and first_difference(line.commands, repeated) is not None:
            problem = f"line {line.number} is not repeated by this version of Muster"
    if line is None and header.memory is None:
        core.handle(t, Deadline())  # the commands of a start that nobody has carried out
    memory = core.memory()
    if problem:
        _doubt(memory, recorded)
    return Past(header, memory, t, time, problem)


def recover(directory: Path, run_id: str) -> Past | None:
    """The past of the run in `directory`, or None when it begins now. Raises OSError, BadLine."""
    found = segments(directory) if directory.is_dir() else []
    if not found:
        return None
    header, lines = read_segment(found[-1])
    return fold(header, lines) if header.run_id == run_id else None


@dataclass(frozen=True, slots=True)
class Beginning:
    """A core, and the first event for it. `offset` plus the monotonic clock is the plane's."""

    core: PlaneCore
    first: Event
    start: int
    offset: float


def begin(
    journal: Journal,
    directory: Path,
    *,
    run_id: str,
    settings: PlaneSettings,
    urls: Sequence[str],
    groups: Sequence[int],
    monotonic: Callable[[], float],
    wall_clock: Callable[[], float],
) -> Beginning:
    """Begin the run, or go on with it, in a new segment. Raises RunFailed."""
    try:
        past = recover(directory, run_id)
    except (BadLine, OSError) as error:
        raise RunFailed(
            f"the journal cannot be read, and what was in flight is not known: {error}"
        ) from None
    now = monotonic()
    header = Header(run_id, 0, settings, tuple(urls), tuple(groups), now)
    if past is None:
        journal.begin(header)
        return Beginning(PlaneCore(settings, urls, groups, now), Deadline(), 0, 0.0)
    _check_shape(past, groups, directory)
    if past.problem:
        log.warning("%s: every group is loaded anew", past.problem)
    t = past.now(wall_clock())
    header = replace(header, start=past.header.start + 1, t=t, memory=past.memory)
    journal.begin(header)
    # A launcher may have moved the engines, and says so again; without one the config is right.
    by_group = sorted(zip(groups, urls, strict=True), key=lambda pair: pair[0])
    moved = () if settings.has_launcher else tuple(url for _, url in by_group)
    core = PlaneCore.from_memory(settings, past.memory)
    return Beginning(core, Restarted(moved), header.start, t - now)


def _check_shape(past: Past, groups: Sequence[int], directory: Path) -> None:
    was = [member.slot.group for group in past.memory.groups.values() for member in group.members]
    if was != sorted(groups):
        raise RunFailed(
            f"model.client.admin_engine_groups = {list(groups)}, but the journal in {directory} is "
            f"of groups {was}: expected the same groups, or another output_dir"
        )


def _doubt(memory: PlaneMemory, recorded: Iterable[tuple[float, Command]]) -> None:
    """Believe what was recorded, as far as it goes, and let nobody return without a reload."""
    memory.update = None
    for t, command in recorded:
        match command:
            case Open():
                number = max(memory.generation.number, command.generation)
                memory.generation = replace(memory.generation, number=number)
            case Route():
                versions = [entry.version for entry in command.entries]
                versions += [] if memory.policy_version is None else [memory.policy_version]
                memory.policy_version = max(versions, default=None)
            case Report():
                group = memory.groups[command.group]
                group.state, group.since = command.new, t
                group.reason, group.detail = command.reason, command.detail
            case _:
                pass
        if isinstance(command, Op):
            memory.last_op_id = max(memory.last_op_id, command.op_id)
    memory.generation = replace(memory.generation, is_dead=True)
    for group in memory.groups.values():
        group.version = group.kept = None
        if group.state == "admitted":
            group.state = "candidate"
