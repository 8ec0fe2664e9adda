"""The orchestrator's end of the launcher: takes its view of the groups, answers with wishes.

Level-triggered, see protocol/launcher_api.py. A wish stays until the launcher reports a newer life.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.config import canonical_url
from orchestrator.plane.commands import Relaunch
from orchestrator.plane.events import GroupLaunched
from protocol.launcher_api import GroupsView, GroupView, LauncherReply, RelaunchWish


class ForeignRun(ValueError):
    """The view belongs to another run."""


class LauncherDesk:
    """Turns posted views into events (news only), relaunch commands into replies."""

    def __init__(self, run_id: str, on_launched: Callable[[GroupLaunched], None]) -> None:
        self._run_id = run_id
        self._on_launched = on_launched
        self._wishes: dict[int, RelaunchWish] = {}
        self._told: dict[int, GroupLaunched] = {}
        self.is_finished = False

    def wish(self, command: Relaunch) -> None:
        """Ask for the end of a life."""
        self._wishes[command.group] = RelaunchWish(
            group=command.group, life=command.life, reason=command.reason
        )

    def exchange(self, view: GroupsView) -> LauncherReply:
        """Take a view, answer with what is wanted. Raises ForeignRun, ValueError for URLs that are
        none; then nothing is taken."""
        if view.run_id != self._run_id:
            raise ForeignRun(f"view of run {view.run_id!r}, this is {self._run_id!r}")
        events = [_launched(group) for group in view.groups]
        for group, event in zip(view.groups, events, strict=True):
            wish = self._wishes.get(group.group)
            if wish is not None and group.life > wish.life:
                del self._wishes[group.group]
            if self._told.get(group.group) != event:
                self._told[group.group] = event
                self._on_launched(event)
        wishes = [self._wishes[number] for number in sorted(self._wishes)]
        return LauncherReply(relaunch=wishes, finished=self.is_finished)


def _launched(group: GroupView) -> GroupLaunched:
    exits = [
        f"g{group.group}e{exit_.index} ended "
        + (f"by signal {exit_.signal}" if exit_.signal is not None else f"with {exit_.exit_code}")
        for exit_ in group.exits
    ]
    try:
        urls = tuple(canonical_url(url) for url in group.urls)
    except ValueError as error:
        raise ValueError(f"groups[{group.group}].urls = {group.urls}: {error}") from None
    detail = "; ".join(exits) or group.state
    return GroupLaunched(group.group, group.life, group.state, urls, detail)
