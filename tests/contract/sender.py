"""Rank 0 of a generation for the contract test: the real transfer package, in threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from transfer.bucket import ParamMeta
from transfer.group import TransferGroup
from transfer.join import join
from transfer.rendezvous import listen
from transfer.send import SendResult, send

TIMEOUT_S = 30.0
BUCKET_BYTES = 1 << 20


class Sender:
    """One generation of `world_size` ranks, listening from the start; `close` frees everything."""

    def __init__(self, generation: int, world_size: int) -> None:
        self.generation = generation
        self.world_size = world_size
        self._rendezvous = listen("127.0.0.1")
        self.port = self._rendezvous.port
        self._pool = ThreadPoolExecutor(2)
        self._cancel = threading.Event()
        self._joining: Future[TransferGroup] | None = None

    def start_join(self) -> None:
        """Join in the background."""
        self._joining = self._pool.submit(
            join,
            self._rendezvous.host,
            self.port,
            generation=self.generation,
            rank=0,
            world_size=self.world_size,
            backend="gloo",
            device="cpu",
            timeout_s=TIMEOUT_S,
            store=self._rendezvous.store,
            cancel=self._cancel,
        )

    def start_send(self, version: int, weights: Mapping[str, torch.Tensor]) -> Future[SendResult]:
        """Send all of `weights` in the background, once joined."""
        assert self._joining is not None
        group = self._joining.result(TIMEOUT_S)
        return self._pool.submit(
            send,
            group,
            iter(weights.items()),
            [ParamMeta.of(name, tensor) for name, tensor in weights.items()],
            version=version,
            bucket_bytes=BUCKET_BYTES,
            timeout_s=TIMEOUT_S,
        )

    def close(self) -> None:
        """End the generation on this side. Idempotent."""
        self._cancel.set()
        if self._joining is not None and self._joining.exception(TIMEOUT_S) is None:
            self._joining.result().close()
        self._rendezvous.close()
        self._pool.shutdown(cancel_futures=True)
