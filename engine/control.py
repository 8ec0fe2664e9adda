"""What an engine must be able to do for its admin routes: the seam between real and fake.

`engine/routes.py` checks bodies, generations and versions and owns the gate; an implementation
only acts. The order in which the routes call it:

    init_transfer -> (wait_transfer joined) -> receive -> (wait_transfer staged) -> commit
    abort_transfer at any time, also while a wait is under way
"""

from __future__ import annotations

from typing import Literal, Protocol

from engine.gate import Gatekeeper
from protocol.engine_api import Identity, InitInfo, TransferStatus, UpdateInfo

Stage = Literal["joined", "staged"]


class Conflict(Exception):
    """The call does not fit the engine's state: 409 with this text; nothing changed."""


class EngineFailure(Exception):
    """The engine tried and failed: 500 with this text."""


class EngineControl(Protocol):
    """One engine. Nothing here blocks the event loop."""

    @property
    def keeper(self) -> Gatekeeper:
        """The engine's gate; its `weight_version` is set by the routes alone."""

    @property
    def generation(self) -> int:
        """Highest generation given to `init_transfer`, 0 before the first."""

    def identity(self) -> Identity:
        """From memory, without asking the engine core."""

    def liveness_problem(self) -> str | None:
        """Why this engine should be taken for dead; None while it is alive."""

    async def init_transfer(self, info: InitInfo) -> None:
        """Drop any older generation, start to join `info.generation`, return at once."""

    async def start_update(self) -> None:
        """Forget what is staged. The membership stays."""

    async def receive(self, info: UpdateInfo) -> None:
        """Start to receive into staging buffers, return at once. Raises Conflict when the state is
        not one to receive in."""

    async def transfer_status(self) -> TransferStatus:
        """State of the receiver; with several ranks the least advanced one."""

    async def wait_transfer(self, stage: Stage, timeout_s: float) -> TransferStatus:
        """Return once `stage` is reached, can no longer be reached, or time is over."""

    async def commit(self, version: int) -> None:
        """Load what is staged (it is `version`, the routes have asked) and forget old prefixes.
        The membership stays. Raises EngineFailure; the weights then belong to no version."""

    async def abort_transfer(self, generation: int, reason: str) -> TransferStatus:
        """Free a blocked receiver, drop staged bytes, leave the generation. Idempotent."""

    async def shutdown_transfer(self) -> None:
        """Leave the generation for good. Idempotent."""
