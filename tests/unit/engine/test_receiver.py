from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from engine.receiver import Receiver, ReceiverState
from protocol.engine_api import InitInfo, TransferStatus, UpdateInfo
from tests.contract.sender import Sender

DEADLINE_S = 10.0
WEIGHTS = {"a": torch.arange(1000, dtype=torch.float32), "b": torch.ones(3, 5)}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver(backend="gloo", device=torch.device("cpu"))
    yield made
    made.close()


def init_info(sender: Sender, timeout_s: float = DEADLINE_S) -> InitInfo:
    return InitInfo(
        host="127.0.0.1",
        port=sender.port,
        generation=sender.generation,
        rank_offset=1,
        world_size=sender.world_size,
        timeout_s=timeout_s,
    )


def update_info(generation: int, version: int, timeout_s: float = DEADLINE_S) -> UpdateInfo:
    return UpdateInfo(generation=generation, version=version, timeout_s=timeout_s)


def settled(receiver: Receiver, *busy: str) -> TransferStatus:
    """The status once it is none of `busy`."""
    deadline = time.monotonic() + DEADLINE_S
    while (status := receiver.status()).state in busy:
        assert time.monotonic() < deadline, status
        time.sleep(0.002)
    return status


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender(generation=1, world_size=2)
    yield made
    made.close()


def join(receiver: Receiver, sender: Sender) -> None:
    sender.start_join()
    receiver.join(init_info(sender), rank=1)
    assert settled(receiver, "joining").state == "joined"


def stage(receiver: Receiver, sender: Sender, version: int) -> TransferStatus:
    receiver.receive(update_info(sender.generation, version))
    sent = sender.start_send(version, WEIGHTS)
    status = settled(receiver, "receiving")
    assert sent.result(DEADLINE_S).digest == status.digest
    return status


def test_starts_idle(receiver: Receiver) -> None:
    assert receiver.status() == TransferStatus(generation=0, state="idle")


def test_stages_what_was_sent(receiver: Receiver, sender: Sender) -> None:
    join(receiver, sender)
    status = stage(receiver, sender, 5)
    assert (status.state, status.staged_version, status.generation) == ("staged", 5, 1)
    got = dict(receiver.staged(5).tensors())
    assert all(torch.equal(got[name], WEIGHTS[name]) for name in WEIGHTS)


def test_other_version_is_not_staged(receiver: Receiver, sender: Sender) -> None:
    join(receiver, sender)
    stage(receiver, sender, 5)
    with pytest.raises(ReceiverState, match="staged version is 5, not 6"):
        receiver.staged(6)


def test_membership_outlives_a_commit(receiver: Receiver, sender: Sender) -> None:
    join(receiver, sender)
    stage(receiver, sender, 5)
    receiver.forget()
    assert receiver.status() == TransferStatus(generation=1, state="joined")
    with pytest.raises(ReceiverState):
        receiver.staged(5)
    assert stage(receiver, sender, 6).staged_version == 6


def test_cannot_receive_before_it_has_joined(receiver: Receiver) -> None:
    with pytest.raises(ReceiverState, match="cannot receive while idle"):
        receiver.receive(update_info(1, 0))


def test_cannot_receive_for_another_generation(receiver: Receiver, sender: Sender) -> None:
    join(receiver, sender)
    with pytest.raises(ReceiverState, match="generation is 1, not 2"):
        receiver.receive(update_info(2, 0))


def test_abort_frees_a_blocked_receive(receiver: Receiver, sender: Sender) -> None:
    join(receiver, sender)
    receiver.receive(update_info(1, 5))
    assert receiver.abort(1, "enough") == TransferStatus(
        generation=1, state="aborted", error="enough"
    )
    assert receiver.abort(1, "again").error == "enough"
    with pytest.raises(ReceiverState, match="cannot receive while aborted"):
        receiver.receive(update_info(1, 5))


def test_abort_frees_a_blocked_join(receiver: Receiver, sender: Sender) -> None:
    receiver.join(init_info(sender), rank=1)
    receiver.abort(1, "enough")
    assert receiver.status().state == "aborted"


def test_abort_drops_what_is_staged(receiver: Receiver, sender: Sender) -> None:
    join(receiver, sender)
    stage(receiver, sender, 5)
    receiver.abort(1, "enough")
    with pytest.raises(ReceiverState, match="staged version is None"):
        receiver.staged(5)


def test_abort_of_another_generation_has_no_effect(receiver: Receiver, sender: Sender) -> None:
    join(receiver, sender)
    assert receiver.abort(7, "not ours").state == "joined"


def test_join_without_a_sender_fails_in_time(receiver: Receiver, sender: Sender) -> None:
    receiver.join(init_info(sender, timeout_s=0.2), rank=1)
    status = settled(receiver, "joining")
    assert status.state == "failed"
    assert "join" in (status.error or "")


def test_lost_sender_fails_the_receive(receiver: Receiver, sender: Sender) -> None:
    join(receiver, sender)
    receiver.receive(update_info(1, 5))
    sender.close()
    assert settled(receiver, "receiving").state == "failed"


def test_version_that_was_not_announced_fails(receiver: Receiver, sender: Sender) -> None:
    join(receiver, sender)
    receiver.receive(update_info(1, 5))
    sender.start_send(6, WEIGHTS)
    status = settled(receiver, "receiving")
    assert "version 6, expected 5" in (status.error or "")


def test_new_generation_replaces_an_aborted_one(receiver: Receiver, sender: Sender) -> None:
    join(receiver, sender)
    receiver.abort(1, "enough")
    second = Sender(generation=2, world_size=2)
    try:
        join(receiver, second)
        assert stage(receiver, second, 9).generation == 2
    finally:
        second.close()
