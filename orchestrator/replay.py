"""`muster replay`: the core decides again what a journal says it decided, and tells the story.

    journal --events--> core --commands--> the same as recorded?   no: the first difference, exit 1
                                           yes: why each group was out, and what became of updates

Exit 2: a file that cannot be read, or a line of it, named with its number.
"""

from __future__ import annotations

import dataclasses
import datetime
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from orchestrator.drivers.journal import BadLine, Header, Line, read_segment, segments
from orchestrator.plane.commands import Command, Report, UpdateEnded
from orchestrator.plane.core import PlaneCore
from orchestrator.plane.events import Restarted
from orchestrator.plane.state import PlaneMemory
from orchestrator.recovery import core_of, first_difference


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the core decides otherwise than it did. `recorded` or `repeated` None: it has nothing
    in that place."""

    file: str
    line: int
    t: float
    event: str
    recorded: str | None
    repeated: str | None


@dataclass(slots=True)
class Outage:
    """One time that a group was not in service. `until` None: it never came back."""

    group: int
    since: float
    reason: str
    detail: str
    steps: list[str] = field(default_factory=list)
    until: float | None = None
    returned: str = ""


@dataclass(slots=True)
class Story:
    """What happened, by the wall clock (unix, s)."""

    run_id: str = ""
    num_events: int = 0
    began: float | None = None
    ended: float = 0.0
    divergence: Divergence | None = None
    outages: list[Outage] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    num_finished: int = 0
    num_returned: int = 0
    num_failed: int = 0
    num_regroups: int = 0
    last_version: int | None = None
    last_generation: int = 0
    failures: list[str] = field(default_factory=list)


def run(arguments: list[str]) -> int:
    """The command. `arguments`: a journal or a run's directory, --json, --group N."""
    try:
        path, is_json, group = _parse(arguments)
    except ValueError as error:
        print(f"muster replay: {error}", file=sys.stderr)
        return 2
    try:
        story = replay(_files(path))
    except (BadLine, OSError) as error:
        print(f"muster replay: {error}", file=sys.stderr)
        return 2
    if group is not None:
        story.outages = [outage for outage in story.outages if outage.group == group]
    print(msgspec.json.encode(story).decode() if is_json else render(story))
    return 1 if story.divergence else 0


def replay(files: list[Path]) -> Story:
    """Repeat these segments of a run, one after the other, up to the first difference. Raises
    OSError, BadLine."""
    story = Story()
    teller = _Teller(story)
    core: PlaneCore | None = None
    for path in files:
        header, lines = read_segment(path)
        if story.began is None:
            teller.begin(header)
        if core is not None and header.memory is not None:
            story.divergence = _gap(path, header, header.memory, core.memory())
        core, is_new = core_of(header), True
        for line in lines:
            if story.divergence is not None:
                return story
            repeated = tuple(core.handle(line.t, line.event))
            story.divergence = _difference(path, line, repeated)
            teller.tell(line)
            is_new = False
        if is_new:
            core = None  # nobody has asked it anything: it has not begun
    return story


def _difference(path: Path, line: Line, repeated: tuple[Command, ...]) -> Divergence | None:
    difference = first_difference(line.commands, repeated)
    if difference is None:
        return None
    recorded, other = (None if command is None else str(command) for command in difference)
    return Divergence(str(path), line.number, line.t, str(line.event), recorded, other)


def _gap(
    path: Path, header: Header, recorded: PlaneMemory, repeated: PlaneMemory
) -> Divergence | None:
    """What a segment begins with is what the core remembers at the end of the one before."""
    for name in (item.name for item in dataclasses.fields(PlaneMemory)):
        was, now = getattr(recorded, name), getattr(repeated, name)
        if was != now:
            event = f"a segment begins; {name} is remembered"
            return Divergence(str(path), 1, header.t, event, str(was), str(now))
    return None


class _Teller:
    """Makes the story of recorded lines."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._out: dict[int, Outage] = {}

    def begin(self, header: Header) -> None:
        """A run begins, or what is kept of one does: groups are out, as far as is known."""
        story = self._story
        story.run_id = header.run_id
        story.began = story.ended = header.time
        memory = header.memory
        for number in sorted(set(header.groups)):
            if memory is None:
                self._leave(number, header.time, "start", "the run begins")
            elif memory.groups[number].state != "admitted":
                group = memory.groups[number]
                since = header.time - (header.t - group.since)
                self._leave(number, since, group.reason, group.detail)

    def tell(self, line: Line) -> None:
        """What one line adds."""
        story = self._story
        story.num_events += 1
        story.ended = line.time
        if isinstance(line.event, Restarted):
            story.restarts.append(line.time)
        for command in line.commands:
            self._command(line.time, command)

    def _command(self, time: float, command: Command) -> None:
        match command:
            case Report(new="admitted"):
                outage = self._out.pop(command.group)
                outage.until, outage.returned = time, command.detail
            case Report():
                if command.group in self._out:
                    why = f": {command.reason}" if command.reason else ""
                    self._out[command.group].steps.append(
                        f"{_clock(time)} {command.new}{why} {command.detail}".rstrip()
                    )
                else:
                    self._leave(command.group, time, command.reason, command.detail)
            case UpdateEnded():
                self._update(time, command)
            case _:
                pass

    def _leave(self, group: int, time: float, reason: str, detail: str) -> None:
        outage = Outage(group, time, reason, detail)
        self._out[group] = outage
        self._story.outages.append(outage)

    def _update(self, time: float, update: UpdateEnded) -> None:
        story = self._story
        story.num_regroups += update.num_regroups
        story.last_generation = update.generation
        if update.outcome == "failed":
            story.num_failed += 1
            story.failures.append(f"{_clock(time)} v{update.version}: {update.reason}")
            return
        is_return = not {"stage", "commit"} & {name for name, _ in update.phase_s}
        story.num_returned += is_return
        story.num_finished += not is_return
        story.last_version = update.version


def render(story: Story) -> str:
    """For people."""
    if story.divergence is not None:
        found = story.divergence
        return (
            f"{found.file}:{found.line}: the core decides otherwise now\n"
            f"  event     {found.event}\n"
            f"  recorded  {found.recorded or 'nothing more'}\n"
            f"  repeated  {found.repeated or 'nothing more'}"
        )
    began = story.ended if story.began is None else story.began
    rows = [
        f"run {story.run_id}: {story.num_events} events in {story.ended - began:.1f} s from "
        f"{_clock(began)}; every decision is repeated"
    ]
    rows += [f"orchestrator restarted {_clock(time)}" for time in story.restarts]
    for outage in sorted(story.outages, key=lambda outage: (outage.group, outage.since)):
        rows += _outage_rows(outage, story.ended)
    version = "none" if story.last_version is None else f"v{story.last_version}"
    rows.append(
        f"updates: {story.num_finished} finished, {story.num_failed} failed, "
        f"{story.num_regroups} regroups; {story.num_returned} returns without a reload; "
        f"last version {version}, generation {story.last_generation}"
    )
    rows += [f"  failed {failure}" for failure in story.failures]
    return "\n".join(rows)


def _outage_rows(outage: Outage, ended: float) -> list[str]:
    out_s = (ended if outage.until is None else outage.until) - outage.since
    rows = [
        f"g{outage.group} out {_clock(outage.since)} for {out_s:.1f} s: {outage.reason} "
        f"({outage.detail})"
    ]
    rows += [f"    {step}" for step in outage.steps]
    end = "still out" if outage.until is None else f"{_clock(outage.until)} {outage.returned}"
    return [*rows, f"    {end}"]


def _clock(time: float) -> str:
    moment = datetime.datetime.fromtimestamp(time, datetime.UTC)
    return moment.isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00") + "Z"


def _files(path: Path) -> list[Path]:
    """The segments of the last run in a directory. Raises OSError, BadLine."""
    if not path.is_dir():
        return [path]
    found = segments(path)
    if not found:
        raise FileNotFoundError(f"{path}: no journal.jsonl here")
    begins = [index for index, file in enumerate(found) if read_segment(file)[0].memory is None]
    return found[begins[-1] :] if begins else found  # an earlier run may have left its own


def _parse(arguments: list[str]) -> tuple[Path, bool, int | None]:
    """Raises ValueError."""
    paths: list[str] = []
    is_json, group = False, None
    rest = iter(arguments)
    for argument in rest:
        if argument == "--json":
            is_json = True
        elif argument == "--group":
            text = next(rest, "nothing")
            if not text.isdecimal():
                raise ValueError(f"--group {text}: expected the number of a group")
            group = int(text)
        elif argument.startswith("-"):
            raise ValueError(f"no such flag: {argument} (there are --json, --group N)")
        else:
            paths.append(argument)
    if len(paths) != 1:
        raise ValueError(f"{len(paths)} paths given, expected one: a journal or a run's directory")
    return Path(paths[0]), is_json, group
