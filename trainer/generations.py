"""The trainer's side of transfer generations: at most one is alive, numbers only grow.

`open` returns as soon as the store listens; the join runs in a thread. A newer `open` ends the
older generation, whatever it is doing.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

import torch

from protocol.trainer_api import OpenReply, OpenRequest
from trainer.desk import Conflict
from transfer.errors import TransferError
from transfer.group import Backend, TransferGroup
from transfer.join import join
from transfer.rendezvous import Rendezvous, listen


@dataclass(slots=True)
class _Generation:
    number: int
    rendezvous: Rendezvous
    cancel: threading.Event = field(default_factory=threading.Event)
    joined: Future[TransferGroup] = field(default_factory=Future)
    reason: str = ""


class Generations:
    """Opens, joins, aborts. Methods may be called from any thread."""

    def __init__(self, *, host: str, backend: Backend, device: torch.device) -> None:
        self._host = host
        self._backend = backend
        self._device = device
        self._lock = threading.Lock()
        self._current: _Generation | None = None
        self._last = 0

    def open(self, request: OpenRequest) -> OpenReply:
        """Listen and start to join as rank 0. Raises Conflict for an old number, OSError."""
        with self._lock:
            if request.generation <= self._last:
                raise Conflict(
                    f"generation {request.generation} is not above the last one, {self._last}"
                )
            self._end(self._current, f"generation {request.generation} was opened")
            self._last = request.generation
            self._current = generation = _Generation(request.generation, listen(self._host))
            threading.Thread(
                target=self._join,
                args=(generation, request),
                name=f"open-g{request.generation}",
                daemon=True,
            ).start()
        return OpenReply(host=generation.rendezvous.host, port=generation.rendezvous.port)

    def wait_joined(self, number: int, timeout_s: float) -> TransferGroup:
        """The joined group. Raises Conflict, TimeoutError, or the join's TransferError."""
        generation = self._get(number)
        try:
            return generation.joined.result(timeout_s)
        except FutureTimeout:
            raise TimeoutError(f"generation {number} has not joined in {timeout_s:g} s") from None

    def abort(self, number: int, reason: str) -> None:
        """End generation `number`; an older one is over already. Raises Conflict for a newer."""
        with self._lock:
            if number > self._last:
                raise Conflict(f"generation {number} was never opened, the last is {self._last}")
            if self._current is not None and self._current.number == number:
                self._end(self._current, reason or "aborted")

    def close(self, reason: str) -> None:
        """End what is alive."""
        with self._lock:
            self._end(self._current, reason)

    def _get(self, number: int) -> _Generation:
        with self._lock:
            if self._current is None or self._current.number != number:
                raise Conflict(f"generation {number} is not the current one, {self._last}")
            return self._current

    def _end(self, generation: _Generation | None, reason: str) -> None:
        if generation is None:
            return
        generation.reason = reason
        generation.cancel.set()
        if generation.joined.done() and generation.joined.exception() is None:
            group = generation.joined.result()
            group.abort(reason)
            group.close()
        generation.rendezvous.close()

    def _join(self, generation: _Generation, request: OpenRequest) -> None:
        rendezvous = generation.rendezvous
        try:
            group = join(
                rendezvous.host,
                rendezvous.port,
                generation=request.generation,
                rank=0,
                world_size=request.world_size,
                backend=self._backend,
                device=self._device,
                timeout_s=request.timeout_s,
                store=rendezvous.store,
                cancel=generation.cancel,
            )
        except TransferError as exc:
            generation.joined.set_exception(exc)
            rendezvous.close()
            return
        with self._lock:
            generation.joined.set_result(group)
            if generation.cancel.is_set():
                group.abort(generation.reason)
                group.close()
