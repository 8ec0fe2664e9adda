"""Which cells of (state, event) were hit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.plane.events import Event

if TYPE_CHECKING:
    from tests.sim.world import World


class Coverage:
    """Counts."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str, str], int] = {}

    def event(self, world: World, event: Event) -> None:
        """Just before the core gets it."""
