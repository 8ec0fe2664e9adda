"""Groups and their states. Pure.

| from | to | when |
|---|---|---|
| starting, evicted | candidate | every member answers, of a life that is believed, after back-off |
| candidate | admitted | every member reported the version just committed (`update.py` decides) |
| starting, candidate, admitted | evicted | any member failed; the group goes as a block |
| evicted | quarantined | evicted `max_evictions` times within `eviction_window_s` |
| quarantined | evicted, starting | its time is over; starting if a newer life runs by then |
| evicted | starting | the launcher reports a newer life |
| candidate, admitted | starting | the orchestrator restarted (`restarted`) |

`evicted -> admitted` does not exist. What an eviction does: route without the group, fence what
still answers, ask for a relaunch, and believe no member until it has answered anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.plane.commands import (
    Command,
    EvictReason,
    Fence,
    GroupState,
    Probe,
    Relaunch,
    Report,
    Route,
    RouteEntry,
)
from orchestrator.plane.events import EngineAnswered, EngineSilent, EngineStuck, GroupLaunched
from orchestrator.plane.state import Group, Member, Phase, PlaneSettings, members_of
from protocol.ids import Slot

_IN_SERVICE: tuple[GroupState, ...] = ("candidate", "admitted")
# While weights are swapped an engine may report the old or the new version.
_SWAPPING: tuple[Phase, ...] = ("commit", "verify", "admit")
_PAUSING: tuple[Phase, ...] = ("pause", *_SWAPPING, "resume")


class Fleet:
    """All groups of a run. `out` collects commands until the core hands them over."""

    def __init__(self, settings: PlaneSettings, urls: list[str], groups: list[int], now: float):
        self.settings = settings
        self.out: list[Command] = []
        self.groups: dict[int, Group] = {}
        self.phase: Phase | None = None  # of the update under way
        self.last_op_id = 0
        for number in sorted(set(groups)):
            own = [url for url, group in zip(urls, groups, strict=True) if group == number]
            members = [Member(Slot(number, index), url) for index, url in enumerate(own)]
            self.groups[number] = Group(number, members, since=now)
        self.route("start")
        for group in self.groups.values():
            self._probe(group)

    def next_op_id(self) -> int:
        """Op ids are a counter."""
        self.last_op_id += 1
        return self.last_op_id

    def member(self, slot: Slot) -> Member:
        """The member at `slot`."""
        return self.groups[slot.group].members[slot.index]

    def in_service(self) -> list[Group]:
        """Candidates and admitted groups: the targets of the next update."""
        return [group for group in self.groups.values() if group.state in _IN_SERVICE]

    def admitted(self) -> list[Group]:
        """Groups that serve."""
        return [group for group in self.groups.values() if group.state == "admitted"]

    def answered(self, now: float, event: EngineAnswered) -> None:
        """A member said something new of itself."""
        group = self.groups[event.slot.group]
        is_old = event.life < max(group.min_life, group.life)
        if is_old or event.asked_at < group.believed_from:
            return
        if event.life > group.life:
            # Faster than the launcher's own report; the same thing.
            self._new_life(now, group, event.life, "an engine of the next life answered")
        member = group.members[event.slot.index]
        has_rebooted = member.boot_id not in ("", event.boot_id)
        old_boot, member.boot_id = member.boot_id, event.boot_id
        member.world_size = event.world_size
        member.weight_version = event.weight_version
        if has_rebooted and group.state in _IN_SERVICE:
            detail = f"{event.slot.engine_id} boot {old_boot} is now {event.boot_id}"
            self.evict(now, group, "boot_changed", detail)
            return
        member.ready = True
        is_other = has_rebooted or event.weight_version != group.kept
        if group.kept is not None and group.state == "starting" and is_other:
            # Asked after a restart, it is not what it was: only an update brings it back.
            group.kept = None
            self._fence(now, group, "changed")
        if group.is_routed:
            self._check_service(now, group, event)

    def silent(self, now: float, event: EngineSilent) -> None:
        """A member stopped to answer."""
        group = self.groups[event.slot.group]
        if event.life < group.life:
            return
        group.members[event.slot.index].ready = False
        if group.state in _IN_SERVICE:
            self.evict(now, group, "probe_failed", f"{event.slot.engine_id}: {event.error}")

    def stuck(self, now: float, event: EngineStuck) -> None:
        """A member answers and does no work."""
        group = self.groups[event.slot.group]
        if group.state in _IN_SERVICE and self.member(event.slot).boot_id == event.boot_id:
            self.evict(now, group, event.reason, f"{event.slot.engine_id}: {event.detail}")

    def launched(self, now: float, event: GroupLaunched) -> None:
        """The launcher's view of a group changed."""
        group = self.groups.get(event.group)
        if group is None or event.life < group.life:
            return
        if event.life > group.life:
            self._new_life(now, group, event.life, "relaunched")
        if len(event.urls) == len(group.members):
            for member, url in zip(group.members, event.urls, strict=True):
                if member.url != url:
                    member.url = url
                    member.ready = False
                    self.out.append(Probe(member.slot, url, group.life))
        group.given_up = event.state == "failed"
        has_ended = event.state in ("exited", "waiting", "failed", "stopped")
        if has_ended and group.state in ("starting", *_IN_SERVICE) and group.min_life <= event.life:
            self.evict(now, group, "engine_exited", event.detail)

    def evict(self, now: float, group: Group, reason: EvictReason, detail: str) -> None:
        """Take the whole group out."""
        settings = self.settings
        group.evictions = [t for t in group.evictions if t > now - settings.eviction_window_s]
        group.evictions.append(now)
        group.num_evictions += 1
        is_flapping = len(group.evictions) >= settings.max_evictions
        self._set(now, group, "quarantined" if is_flapping else "evicted", reason, detail)
        if is_flapping:
            group.num_quarantines += 1
            stay_s = settings.quarantine_s * 2 ** min(group.num_quarantines - 1, 3)
        else:
            doublings = min(len(group.evictions) - 1, 16)
            stay_s = min(settings.retry_wait_s * 2**doublings, settings.retry_wait_max_s)
        group.not_before = now + stay_s
        group.believed_from = now
        group.version = None
        group.kept = None
        if settings.has_launcher:
            group.min_life = group.life + 1
        self.route(f"evict g{group.number}: {reason}")
        self._fence(now, group, reason)
        for member in group.members:
            member.ready = False
        if settings.has_launcher:
            self.out.append(Relaunch(group.number, group.life, f"{reason}: {detail}"))
        self._probe(group)

    def admit(self, now: float, group: Group, version: int) -> None:
        """Every member of the group reported `version`."""
        group.version = version
        group.version_since = now
        still = "" if group.kept is None else "still "
        group.kept = None
        if group.state != "admitted":
            self._set(now, group, "admitted", "", f"all members {still}report v{version}")

    def settle(self, now: float) -> None:
        """Transitions that need no event but time, and candidates that are complete."""
        for group in self.groups.values():
            if group.state == "quarantined" and now >= group.not_before:
                group.evictions.clear()
                # A life that came meanwhile has its start-up time from now on.
                is_new = self.settings.has_launcher and group.life >= group.min_life
                state: GroupState = "starting" if is_new else "evicted"
                self._set(now, group, state, group.reason, "quarantine is over")
            is_waiting = group.state in ("starting", "evicted") and now >= group.not_before
            missing = [m.slot.engine_id for m in group.members if not m.ready]
            if is_waiting and not missing:
                self._set(now, group, "candidate", "", "all members answer")
            is_late = now >= self._answer_by(group)
            if group.state == "starting" and missing and is_late:
                since = "the restart" if group.awaited else "its start"
                detail = f"no answer since {since}: {', '.join(missing)}"
                self.evict(now, group, "probe_failed", detail)

    def restarted(self, now: float, kept: dict[int, int], urls: Sequence[str]) -> None:
        """Nobody serves, and nobody is believed, before it has answered anew. `kept` is what may
        return without a reload; all others are fenced, and relaunched if that was the wish."""
        self.phase = None
        for member, url in zip(members_of(self.groups.values()), urls, strict=False):
            member.url = url
        for group in self.groups.values():
            was_in_service = group.state in _IN_SERVICE or group.awaited
            if group.state in _IN_SERVICE:
                self._set(now, group, "starting", "restart", "the orchestrator restarted")
            elif group.state == "starting":
                group.since = now
            group.awaited = was_in_service
            group.believed_from = now
            group.kept = kept.get(group.number)
            group.version = None
            for member in group.members:
                member.ready = False
            if group.kept is None:
                self._fence(now, group, "restart")
            if self.settings.has_launcher and group.life < group.min_life:
                self.out.append(
                    Relaunch(group.number, group.life, f"{group.reason}: {group.detail}")
                )
            self._probe(group)
        self.route("restart")

    def next_deadline(self) -> list[float]:
        """When `settle` has something to do."""
        deadlines: list[float] = []
        for group in self.groups.values():
            is_complete = all(member.ready for member in group.members)
            if group.state == "quarantined" or (
                group.state in ("starting", "evicted") and is_complete
            ):
                deadlines.append(group.not_before)
            elif group.state == "starting":
                deadlines.append(self._answer_by(group))
        return deadlines

    def route(self, reason: str) -> None:
        """Say which engines should serve."""
        entries = tuple(
            RouteEntry(member.slot, member.url, member.boot_id, group.version)
            for group in self.admitted()
            if group.version is not None
            for member in group.members
        )
        self.out.append(Route(entries, reason))

    def _check_service(self, now: float, group: Group, event: EngineAnswered) -> None:
        """Who serves holds the group's version and works. Answers to questions that are older than
        the last swap prove nothing."""
        who = event.slot.engine_id
        is_new = event.asked_at >= group.version_since and self.phase not in _SWAPPING
        if is_new and event.weight_version != group.version:
            says = "no version" if event.weight_version is None else f"v{event.weight_version}"
            detail = f"{who} reports {says}, expected v{group.version}"
            self.evict(now, group, "version_mismatch", detail)
        elif event.paused and event.asked_at > group.resumed_at and self.phase not in _PAUSING:
            # A pause that was delayed on its way: nobody would ever resume it.
            self.evict(now, group, "engine_stalled", f"{who} is paused outside an update")

    def _answer_by(self, group: Group) -> float:
        """A group that served a moment ago answers soon, or is gone; another may still load."""
        settings = self.settings
        return group.since + (
            settings.admin_timeout_s if group.awaited else settings.startup_timeout_s
        )

    def _new_life(self, now: float, group: Group, life: int, detail: str) -> None:
        if group.state in _IN_SERVICE:
            self.evict(now, group, "step_exited", f"life {group.life} was replaced by {life}")
        group.life = life
        group.min_life = max(group.min_life, life)
        group.kept = None
        if group.awaited:
            group.awaited = False
            group.since = now
        for member in group.members:
            member.boot_id = ""
            member.ready = False
            member.weight_version = None
        if group.state == "evicted":
            self._set(now, group, "starting", group.reason, f"life {life}: {detail}")
        self._probe(group)

    def _fence(self, now: float, group: Group, reason: str) -> None:
        """Nobody waits for the answers; who does not hear it closes itself when its lease ends."""
        for member in group.members:
            deadline = now + self.settings.admin_timeout_s
            self.out.append(Fence(self.next_op_id(), deadline, reason, member.slot))

    def _probe(self, group: Group) -> None:
        life = max(group.life, group.min_life)
        self.out.extend(Probe(member.slot, member.url, life) for member in group.members)

    def _set(self, now: float, group: Group, state: GroupState, reason: str, detail: str) -> None:
        self.out.append(Report(group.number, group.state, state, reason, detail))
        group.state = state
        group.since = now
        group.reason = reason
        group.detail = detail
        group.awaited = False
