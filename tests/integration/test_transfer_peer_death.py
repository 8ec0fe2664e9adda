"""A receiver process is killed in the middle of a transfer; everybody else is free at once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.ranks import start_join
from transfer.bucket import ParamMeta
from transfer.errors import JoinTimeout, TransferError
from transfer.receive import receive
from transfer.rendezvous import listen
from transfer.send import send

ROOT = Path(__file__).resolve().parents[2]
PROMPT_S = 5.0
JOIN_S = 60.0
# Joins as rank 2 and receives one header, then stops reading: the sender blocks in the payload.
RECEIVER = """
import sys, time
from transfer.join import join
from transfer.wire import empty_header
group = join("127.0.0.1", int(sys.argv[1]), generation=1, rank=2, world_size=3, backend="gloo",
             device="cpu", timeout_s=60)
group.broadcast(empty_header(), timeout_s=60)
print("receiving", flush=True)
time.sleep(600)
"""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def test_killed_receiver_frees_sender_and_survivor(pool: ThreadPoolExecutor) -> None:
    rendezvous = listen("127.0.0.1")
    with subprocess.Popen(
        [sys.executable, "-c", RECEIVER, str(rendezvous.port)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            joins = [start_join(pool, rendezvous, rank, 3, timeout_s=JOIN_S) for rank in range(2)]
            sender, survivor = (future.result(JOIN_S) for future in joins)
            params = [("big", torch.zeros(16 << 20))]
            receiving = pool.submit(receive, survivor, version=1, timeout_s=600)
            sending = pool.submit(
                send,
                sender,
                iter(params),
                [ParamMeta.of(*params[0])],
                version=1,
                bucket_bytes=8 << 20,
                timeout_s=600,
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "receiving\n"
            assert not sending.done()
            process.kill()
            start = time.monotonic()
            assert isinstance(sending.exception(PROMPT_S), TransferError)
            assert isinstance(receiving.exception(PROMPT_S), TransferError | None)
            assert time.monotonic() - start < PROMPT_S
        finally:
            process.kill()
    sender.close()
    survivor.close()
    rendezvous.close()


def test_receiver_killed_before_the_join_is_missing(pool: ThreadPoolExecutor) -> None:
    rendezvous = listen("127.0.0.1")
    joins = [start_join(pool, rendezvous, rank, 3, timeout_s=1.0 + rank) for rank in range(2)]
    error = joins[0].exception(JOIN_S)
    assert isinstance(error, JoinTimeout)
    assert error.missing == (2,)
    assert isinstance(joins[1].exception(JOIN_S), TransferError)
    rendezvous.close()
