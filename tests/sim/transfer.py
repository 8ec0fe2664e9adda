"""A weight-transfer process group: it forms when all ranks are in, and moves bytes when all take part.

A member that dies, leaves or aborts breaks it for all; a member that is stopped holds it up. What is
broken stays broken: only a new generation helps.
"""  # noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tests.sim.world import World


class Member(Protocol):
    """An engine or the trainer."""

    is_frozen: bool

    def joined(self) -> None:
        """All ranks are in."""

    def received(self, version: int) -> None:
        """All bytes are here."""

    def transfer_failed(self, reason: str) -> None:
        """The collective broke."""


class Collective:
    """One generation as it really is."""

    def __init__(self, world: World, number: int, world_size: int, trainer: Member) -> None:
        self.world = world
        self.number = number
        self.world_size = world_size
        self.is_joined = False
        self.broken = ""
        self._ranks: set[int] = {0}
        self._members: dict[Member, None] = {trainer: None}
        self._started: dict[Member, int] = {}

    def enter(self, member: Member, rank: int, width: int, world_size: int) -> None:
        """Ranks `rank` to `rank + width - 1` are in."""
        if self.broken or self.is_joined or world_size != self.world_size:
            member.transfer_failed(self.broken or "the ranks do not fit")
            return
        places = range(rank, rank + width)
        if rank + width > world_size or any(place in self._ranks for place in places):
            # An engine that is wider than the orchestrator thinks; a peer's error ends the join.
            self.leave(f"ranks {places} do not fit")
            member.transfer_failed(self.broken)
            return
        self._ranks.update(places)
        self._members[member] = None
        if len(self._ranks) == self.world_size:
            self.is_joined = True
            for other in self._members:
                other.joined()

    def start(self, member: Member, version: int) -> None:
        """`member` sends or receives `version` from now on."""
        if self.broken or not self.is_joined:
            member.transfer_failed(self.broken or "the collective has not joined")
            return
        self._started[member] = version
        if len(self._started) < len(self._members):
            return
        if len(set(self._started.values())) > 1:
            self.leave("ranks disagree on the version")
            return
        world = self.world
        seconds = world.timing["transfer_s"] * world.noise.uniform(0.5, 1.5)
        world.loop.at(world.loop.now + seconds, self._complete, version)

    def leave(self, reason: str) -> None:
        """Somebody is gone, or gave up."""
        if self.broken:
            return
        self.broken = reason
        for member in self._members:
            member.transfer_failed(reason)

    def _complete(self, version: int) -> None:
        if self.broken:
            return
        if any(member.is_frozen for member in self._members):
            self.world.loop.at(self.world.loop.now + 0.2, self._complete, version)
            return
        self._started.clear()
        for member in self._members:
            member.received(version)
