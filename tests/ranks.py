"""Several ranks of one generation as threads of the test process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from transfer.group import TransferGroup
from transfer.join import join
from transfer.rendezvous import Rendezvous, listen

TIMEOUT_S = 10.0


def start_join(
    pool: ThreadPoolExecutor,
    rendezvous: Rendezvous,
    rank: int,
    world_size: int,
    *,
    generation: int = 1,
    timeout_s: float = TIMEOUT_S,
    cancel: threading.Event | None = None,
) -> Future[TransferGroup]:
    """`join` in a thread of `pool`."""
    return pool.submit(
        join,
        rendezvous.host,
        rendezvous.port,
        generation=generation,
        rank=rank,
        world_size=world_size,
        backend="gloo",
        device="cpu",
        timeout_s=timeout_s,
        store=rendezvous.store if rank == 0 else None,
        cancel=cancel,
    )


def joined(
    pool: ThreadPoolExecutor, world_size: int, *, generation: int = 1
) -> list[TransferGroup]:
    """All ranks of a fresh generation, by rank."""
    rendezvous = listen("127.0.0.1")
    futures = [
        start_join(pool, rendezvous, rank, world_size, generation=generation)
        for rank in range(world_size)
    ]
    groups = [future.result(TIMEOUT_S) for future in futures]
    rendezvous.close()
    return groups


def outcomes(pool: ThreadPoolExecutor, calls: list[Callable[[], Any]]) -> list[Any]:
    """Run all calls at once; each result is the return value or the exception."""
    futures = [pool.submit(call) for call in calls]
    wait(futures, TIMEOUT_S * 3)
    return [future.exception(0) or future.result(0) for future in futures]
