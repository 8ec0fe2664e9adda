"""Joins, aborts and leaks, with all ranks as threads of this process."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore

from tests.ranks import joined, outcomes, start_join
from transfer.errors import (
    JoinTimeout,
    PeerLost,
    TransferAborted,
    TransferError,
    TransferMismatch,
    TransferTimeout,
)
from transfer.rendezvous import listen

PROMPT_S = 5.0  # "at once", with room for a loaded machine; deadlines in the tests are far above


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def test_rank_0_sends_to_all(pool: ThreadPoolExecutor) -> None:
    groups = joined(pool, 3)
    tensors = [torch.full((1000,), float(group.rank + 5)) for group in groups]
    results = outcomes(
        pool,
        [
            lambda group=group, tensor=tensor: group.broadcast(tensor, timeout_s=10)
            for group, tensor in zip(groups, tensors, strict=True)
        ],
    )
    assert results == [None] * 3
    assert all(bool((tensor == 5).all()) for tensor in tensors)
    for group in groups:
        group.close()


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_missing_rank_is_named(pool: ThreadPoolExecutor, absent: int) -> None:
    rendezvous = listen("127.0.0.1")
    futures = [
        start_join(pool, rendezvous, rank, 3, timeout_s=0.5 if rank == 0 else 1.0)
        for rank in range(3)
        if rank != absent
    ]
    errors = [future.exception(PROMPT_S) for future in futures]
    if absent:
        assert isinstance(errors[0], JoinTimeout)
        assert errors[0].missing == (absent,)
        assert str(errors[0]) == (
            f"generation 1, rank 0, join (wait for ranks): ranks [{absent}] are missing"
        )
    else:
        assert all(isinstance(error, TransferError) for error in errors)
    rendezvous.close()


def test_rank_that_gave_up_is_named_as_missing(pool: ThreadPoolExecutor) -> None:
    rendezvous = listen("127.0.0.1")
    sender = start_join(pool, rendezvous, 0, 3, timeout_s=1.0)
    impatient = start_join(pool, rendezvous, 1, 3, timeout_s=0.3)
    assert isinstance(impatient.exception(PROMPT_S), JoinTimeout)
    error = sender.exception(PROMPT_S)
    assert isinstance(error, JoinTimeout)
    assert error.missing == (1, 2)
    rendezvous.close()


def test_cancel_frees_a_join_and_tells_the_others(pool: ThreadPoolExecutor) -> None:
    rendezvous = listen("127.0.0.1")
    cancel = threading.Event()
    first = start_join(pool, rendezvous, 0, 3, timeout_s=30)
    second = start_join(pool, rendezvous, 1, 3, timeout_s=30, cancel=cancel)
    assert rendezvous.store is not None
    # Not `wait`: it would hold the client that rank 0 needs to announce itself.
    store = PrefixStore("1", rendezvous.store)
    deadline = time.monotonic() + PROMPT_S
    while not store.check(["rank/1"]):
        assert time.monotonic() < deadline
        cancel.wait(0.005)
    cancel.set()
    assert isinstance(second.exception(PROMPT_S), TransferAborted)
    assert isinstance(first.exception(PROMPT_S), TransferAborted)
    rendezvous.close()


def test_foreign_generation_world_size_and_rank_are_refused(pool: ThreadPoolExecutor) -> None:
    rendezvous = listen("127.0.0.1")
    sender = start_join(pool, rendezvous, 0, 3, generation=5, timeout_s=30)
    for rank, world_size, generation in ((1, 3, 4), (1, 2, 5), (1, 3, 6)):
        error = start_join(
            pool, rendezvous, rank, world_size, generation=generation, timeout_s=30
        ).exception(PROMPT_S)
        assert isinstance(error, TransferMismatch)
        assert 'sender has [generation, world size, backend] [5, 3, "gloo"]' in str(error)
    first = start_join(pool, rendezvous, 1, 3, generation=5, timeout_s=30)
    again = start_join(pool, rendezvous, 1, 3, generation=5, timeout_s=30)
    done, _ = wait([first, again], PROMPT_S, FIRST_COMPLETED)
    refused = done.pop()
    assert isinstance(refused.exception(), TransferMismatch)
    assert "rank 1 is taken" in str(refused.exception())
    last = start_join(pool, rendezvous, 2, 3, generation=5, timeout_s=30)
    kept = again if refused is first else first
    for future in (sender, kept, last):  # the generation itself is not disturbed
        future.result(PROMPT_S).close()
    rendezvous.close()


def test_join_without_a_store_gives_up_in_time(pool: ThreadPoolExecutor) -> None:
    rendezvous = listen("127.0.0.1")
    rendezvous.close()
    future = start_join(pool, rendezvous, 1, 2, timeout_s=0.5)
    assert isinstance(future.exception(PROMPT_S), TransferError)


@pytest.mark.parametrize("aborting", [0, 1, 2])
@pytest.mark.parametrize("blocked", [(0, 1), (1, 2), (0,)])
def test_abort_frees_every_blocked_rank(
    pool: ThreadPoolExecutor, aborting: int, blocked: tuple[int, ...]
) -> None:
    groups = joined(pool, 3)
    # More than the sockets buffer, so that the sender blocks too.
    tensors = [torch.ones(4 << 20) for _ in groups]
    futures = [pool.submit(groups[rank].broadcast, tensors[rank], timeout_s=60) for rank in blocked]
    groups[aborting].abort("test says so")
    for rank, future in zip(blocked, futures, strict=True):
        error = future.exception(PROMPT_S)
        assert isinstance(error, TransferAborted if rank == aborting else TransferError | None)
        if rank == aborting:
            assert str(error) == f"generation 1, rank {rank}, broadcast: test says so"
    with pytest.raises(TransferAborted, match="test says so"):
        groups[aborting].broadcast(torch.ones(1), timeout_s=60)
    for group in groups:
        group.close()


def test_deadline_frees_a_blocked_rank(pool: ThreadPoolExecutor) -> None:
    groups = joined(pool, 2)
    with pytest.raises(TransferTimeout, match="generation 1, rank 1, broadcast"):
        groups[1].broadcast(torch.ones(10), timeout_s=0.2)
    groups[1].close()
    with pytest.raises(PeerLost):
        groups[0].broadcast(torch.ones(4 << 20), timeout_s=60)
    groups[0].close()


def test_close_ends_what_is_under_way_and_may_be_repeated(pool: ThreadPoolExecutor) -> None:
    groups = joined(pool, 2)
    future = pool.submit(groups[1].broadcast, torch.ones(10), timeout_s=60)
    groups[1].close()
    groups[1].close()
    assert isinstance(future.exception(PROMPT_S), TransferAborted)
    groups[0].close()


def test_fifty_generations_leave_no_thread_and_no_descriptor(pool: ThreadPoolExecutor) -> None:
    def regroup(generation: int) -> None:
        groups = joined(pool, 3, generation=generation)
        future = pool.submit(groups[1].broadcast, torch.ones(10), timeout_s=60)
        groups[generation % 3].abort("regroup")
        assert isinstance(future.exception(PROMPT_S), TransferError)
        for group in groups:
            group.close()

    for generation in range(1, 4):
        regroup(generation)
    before = _resources()
    for generation in range(4, 54):
        regroup(generation)
    deadline = time.monotonic() + PROMPT_S
    while _resources() > before and time.monotonic() < deadline:
        gc.collect()
    threads, descriptors = _resources()
    assert threads <= before[0]
    assert descriptors <= before[1]


def _resources() -> tuple[int, int]:
    tasks = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").is_dir() else 0
    return tasks, len(os.listdir("/proc/self/fd"))
