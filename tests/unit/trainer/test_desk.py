from __future__ import annotations

import threading
from typing import cast

import pytest

from protocol.trainer_api import StepMetrics
from tests.batches import make_batch
from trainer.desk import Conflict, Desk, Full, SendCommand
from transfer.group import TransferGroup


def make_desk(*, first_step: int = 0, max_steps: int = 10, max_queued: int = 2) -> Desk:
    return Desk(
        run_id="test",
        boot="boot",
        first_step=first_step,
        max_steps=max_steps,
        max_queued=max_queued,
    )


def make_command(version: int) -> SendCommand:
    return SendCommand(cast(TransferGroup, None), version, deadline=0.0)


def test_batches_come_out_in_order() -> None:
    desk = make_desk()
    desk.offer(make_batch(0))
    desk.offer(make_batch(1))
    assert desk.status().next_step == 2
    taken = [desk.take(timeout_s=0), desk.take(timeout_s=0), desk.take(timeout_s=0)]
    assert taken == [make_batch(0), make_batch(1), None]


def test_batches_that_do_not_fit() -> None:
    desk = make_desk(first_step=3, max_steps=6)
    with pytest.raises(Conflict, match="batch of step 2, the next one is 3"):
        desk.offer(make_batch(2))
    with pytest.raises(Conflict, match="batch of run 'other', this is 'test'"):
        desk.offer(make_batch(3, run_id="other"))
    desk.offer(make_batch(3))
    with pytest.raises(Conflict, match="batch of step 3, the next one is 4"):
        desk.offer(make_batch(3))
    desk.offer(make_batch(4))
    with pytest.raises(Full, match="2 batches are waiting"):
        desk.offer(make_batch(5))
    desk.take(timeout_s=0)
    desk.offer(make_batch(5))
    with pytest.raises(Conflict, match="no step 6: the trainer is stopping"):
        desk.offer(make_batch(6))


def test_sends_come_before_batches_and_batches_wait_for_the_finish() -> None:
    desk = make_desk()
    desk.report("publishing", published=0)
    desk.offer(make_batch(0))
    desk.ask_send(make_command(0))
    assert isinstance(desk.take(timeout_s=0, for_version=0), SendCommand)
    assert desk.take(timeout_s=0, for_version=0) is None
    assert not desk.is_finished(0)
    desk.finish(0)
    assert desk.is_finished(0)
    assert desk.take(timeout_s=60, for_version=0) is None  # at once
    assert desk.take(timeout_s=0) == make_batch(0)


def test_send_that_was_cancelled_is_not_done() -> None:
    desk = make_desk()
    desk.report("publishing", published=0)
    command = make_command(0)
    desk.ask_send(command)
    command.future.cancel()
    assert desk.take(timeout_s=0) is None


def test_only_the_published_version_is_sent_or_finished() -> None:
    desk = make_desk()
    with pytest.raises(Conflict, match="version 0 is not the published one, None is"):
        desk.ask_send(make_command(0))
    with pytest.raises(Conflict, match="version 0 is not published, None is"):
        desk.finish(0)
    desk.report("publishing", published=2)
    for version in (1, 3):
        with pytest.raises(Conflict, match="not the published one, 2 is"):
            desk.check_published(version)
    desk.finish(1)
    desk.finish(2)
    desk.finish(1)  # late, and no news
    assert desk.status().finished_version == 2


def test_stop_ends_a_wait_and_refuses_batches() -> None:
    desk = make_desk()
    desk.offer(make_batch(0))
    desk.stop()
    assert desk.is_stopping
    assert desk.take(timeout_s=60) is None
    with pytest.raises(Conflict, match="stopping"):
        desk.offer(make_batch(1))


def test_take_wakes_up_for_what_comes_later() -> None:
    desk = make_desk()
    thread = threading.Thread(target=desk.offer, args=(make_batch(0),))
    thread.start()
    assert desk.take(timeout_s=60) == make_batch(0)
    thread.join()


def test_every_change_bumps_seq_and_calls_listeners() -> None:
    desk = make_desk()
    seen: list[int] = []

    def listener() -> None:
        seen.append(desk.status().seq)

    desk.listen(listener)
    desk.report("publishing", published=0, num_bytes=5, error="late")
    desk.opened(3)
    desk.offer(make_batch(0))
    desk.report("training", step=StepMetrics(step=0, values={"loss": 1.0}))
    desk.finish(0)
    desk.stop()
    assert seen == [1, 2, 3, 4, 5, 6]
    desk.unlisten(listener)
    desk.report("stopping")
    assert len(seen) == 6
    status = desk.status()
    assert (status.state, status.published_version, status.num_bytes) == ("stopping", 0, 5)
    assert (status.generation, status.error, status.seq) == (3, "late", 7)
    assert status.recent_steps == [StepMetrics(step=0, values={"loss": 1.0})]
