"""One status out of many ranks' statuses. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.engine_api import TransferState, TransferStatus

# The first that any rank is in counts: failures before progress, little progress before much.
_ORDER: tuple[TransferState, ...] = (
    "failed",
    "aborted",
    "idle",
    "joining",
    "joined",
    "receiving",
    "staged",
)
_OVER: frozenset[TransferState] = frozenset({"idle", "failed", "aborted"})
_REACHED: dict[str, frozenset[TransferState]] = {
    "joined": frozenset({"joined", "receiving", "staged"}),
    "staged": frozenset({"staged"}),
}


def combine(statuses: Sequence[TransferStatus]) -> TransferStatus:
    """The least advanced rank's status; ranks that staged different bytes have failed."""
    least = min(statuses, key=lambda status: _ORDER.index(status.state))
    staged = {(status.staged_version, status.digest) for status in statuses}
    if least.state == "staged" and len(staged) > 1:
        return TransferStatus(
            generation=least.generation,
            state="failed",
            error=f"ranks staged different bytes: {sorted(map(str, staged))}",
        )
    return least


def is_settled(status: TransferStatus, stage: str) -> bool:
    """True once `stage` is reached or, as things stand, never will be."""
    return status.state in _REACHED[stage] or status.state in _OVER
