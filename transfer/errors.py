"""How a transfer can fail. Every error names the generation, the rank and the phase.

One base class, so that a caller can treat "the generation is gone" as one case; the subclasses say
why, because the culprit differs: an abort has none, a lost peer is a peer, a mismatch is a bug or
a process of an older generation.
"""

from __future__ import annotations


class TransferError(Exception):
    """Base. After it the generation is unusable: close the group and build a new one."""

    def __init__(self, detail: str, *, generation: int, rank: int, phase: str) -> None:
        super().__init__(f"generation {generation}, rank {rank}, {phase}: {detail}")
        self.detail = detail
        self.generation = generation
        self.rank = rank
        self.phase = phase


class TransferAborted(TransferError):
    """Somebody called `abort` (or set `cancel`), here or on another rank."""


class TransferTimeout(TransferError):
    """The deadline passed while bytes should have moved."""


class PeerLost(TransferError):
    """A connection to another rank broke."""


class JoinTimeout(TransferError):
    """Not every rank joined in time; `missing` holds the ranks that rank 0 did not see."""

    def __init__(
        self, detail: str, *, generation: int, rank: int, phase: str, missing: tuple[int, ...] = ()
    ) -> None:
        super().__init__(detail, generation=generation, rank=rank, phase=phase)
        self.missing = missing


class TransferMismatch(TransferError):
    """The other side speaks of another generation, version, layout or content."""
