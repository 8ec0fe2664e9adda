from __future__ import annotations

import pytest

from engine.transfer_status import combine, is_settled
from protocol.engine_api import TransferState, TransferStatus


def status(state: TransferState, *, digest: str | None = None) -> TransferStatus:
    version = 4 if state == "staged" else None
    return TransferStatus(generation=2, state=state, staged_version=version, digest=digest)


@pytest.mark.parametrize(
    ("states", "least"),
    [
        (["joined", "joining"], "joining"),
        (["staged", "receiving"], "receiving"),
        (["staged", "joined"], "joined"),
        (["joined", "idle"], "idle"),
        (["staged", "aborted"], "aborted"),
        (["aborted", "failed"], "failed"),
        (["staged"], "staged"),
    ],
)
def test_the_least_advanced_rank_counts(states: list[TransferState], least: str) -> None:
    assert combine([status(state) for state in states]).state == least


def test_equal_bytes_are_staged() -> None:
    combined = combine([status("staged", digest="a"), status("staged", digest="a")])
    assert (combined.state, combined.digest) == ("staged", "a")


def test_different_bytes_are_a_failure() -> None:
    combined = combine([status("staged", digest="a"), status("staged", digest="b")])
    assert combined.state == "failed"
    assert "different bytes" in (combined.error or "")


@pytest.mark.parametrize(
    ("state", "joined", "staged"),
    [
        ("idle", True, True),
        ("joining", False, False),
        ("joined", True, False),
        ("receiving", True, False),
        ("staged", True, True),
        ("failed", True, True),
        ("aborted", True, True),
    ],
)
def test_settled(state: TransferState, joined: bool, staged: bool) -> None:
    assert is_settled(status(state), "joined") is joined
    assert is_settled(status(state), "staged") is staged
