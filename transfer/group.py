"""One generation's process group: rank 0 sends, the others receive, anybody may abort.

    group = join(host, port, generation=3, rank=1, world_size=3, backend="gloo", ...)
    group.broadcast(tensor, timeout_s=10)      # from rank 0 to all, blocks
    group.abort("engine g1e0 died")            # any thread; frees every blocked call, all ranks

Rules:
- The group lives outside torch's default group, so a process may have many, one after another.
- No wait without a deadline: every blocked call is polled against the deadline and against abort.
- After any error the group is finished; generations are never repaired, only replaced.
- NCCL: torch's own watchdog must not end the process; the owner starts it with
  TORCH_NCCL_ASYNC_ERROR_HANDLING=0. Deadlines here do its work.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo

from transfer import sockets
from transfer.errors import PeerLost, TransferAborted, TransferError, TransferTimeout

Backend = Literal["gloo", "nccl"]

# Broadcasts that both sides keep under way. Two leave the wire idle whenever a rank digests a
# bucket while its peers are ahead; more than four bring nothing and cost memory.
NUM_IN_FLIGHT = 4
_GLOO_THREADS = 3  # operations that move bytes at a time

_POLL_MIN_S = 0.00005
_POLL_MAX_S = 0.002
_SLICE_S = 0.1
# Gloo can lose the news of a broken connection: a send that its event loop has just picked up is
# told of no error and waits for its timeout. So blocked calls look at the connections themselves.
_LOOK_INTERVAL_S = 0.25
_DRAIN_S = 0.25  # cut operations end in milliseconds; more means the sockets could not be found
# Longest life of a generation's NCCL communicator as far as its watchdog is concerned.
_NCCL_WATCHDOG = timedelta(days=7)


def brief(exc: BaseException) -> str:
    """The backend's message without its source location and its advice."""
    text = str(exc).partition("This is typically")[0].partition("\n")[0]
    return re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] ", "", text).strip(" .")


class Pending:
    """A broadcast under way. Keeps its tensor alive until the backend has let go of it."""

    def __init__(self, group: TransferGroup, work: Any, tensor: torch.Tensor) -> None:
        self._group = group
        self._work = work
        self._tensor = tensor

    def is_completed(self) -> bool:
        """True once the backend is done with the tensor, successfully or not."""
        return bool(self._work.is_completed())

    def wait(self, deadline: float) -> None:
        """Block until done. `deadline` is a `time.monotonic()` instant. Raises TransferError."""
        pause_s = _POLL_MIN_S
        next_look = time.monotonic() + _LOOK_INTERVAL_S
        while not self._work.is_completed():
            self._group.raise_if_aborted("broadcast")
            now = time.monotonic()
            if now >= deadline:
                raise self._group.error(TransferTimeout, "deadline passed", "broadcast")
            if now >= next_look:
                next_look = now + _LOOK_INTERVAL_S
                self._group.check_connections()
            self._doze(pause_s, min(deadline, next_look) - now)
            pause_s = min(pause_s * 2, _POLL_MAX_S)
        self._group.raise_if_aborted("broadcast")
        try:
            self._work.wait()
        except RuntimeError as exc:
            self._group.raise_if_aborted("broadcast")
            # Gloo's own timer has the same length and may be the first.
            kind = TransferTimeout if "Timed out waiting" in str(exc) else PeerLost
            raise self._group.error(kind, brief(exc), "broadcast") from exc

    def _doze(self, pause_s: float, most_s: float) -> None:
        """Sleep a while, at most `most_s`; shorter when the operation ends or is aborted."""
        if self._group.backend != "gloo":
            self._group.wait_aborted(min(pause_s, most_s))  # NCCL's wait does not wait for the GPU
            return
        # Woken by the operation itself, which an abort ends; polling would cost CPU time that the
        # bytes need.
        with suppress(RuntimeError):  # not done yet, or failed: the caller looks
            self._work.wait(timedelta(seconds=max(min(_SLICE_S, most_s), 0.001)))


class TransferGroup:
    """A joined generation. Made by `join`; one user thread, `abort` from any thread."""

    def __init__(
        self,
        pg: Any,
        *,
        generation: int,
        rank: int,
        world_size: int,
        backend: Backend,
        device: torch.device,
        listeners: frozenset[sockets.Address],
    ) -> None:
        self.generation = generation
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.device = device
        self._pg = pg
        self._listeners = listeners
        self._aborted = threading.Event()
        self._reason = ""
        self._lock = threading.Lock()
        self._pending: list[Pending] = []
        self._num_connections = 0

    def error(self, kind: type[TransferError], detail: str, phase: str) -> TransferError:
        """An error that knows this group's generation and rank."""
        return kind(detail, generation=self.generation, rank=self.rank, phase=phase)

    @property
    def is_aborted(self) -> bool:
        """True after `abort` or `close`."""
        return self._aborted.is_set()

    def wait_aborted(self, timeout_s: float) -> bool:
        """Block up to `timeout_s`; True once the group is aborted."""
        return self._aborted.wait(timeout_s)

    def raise_if_aborted(self, phase: str) -> None:
        """Raises TransferAborted with the reason given to `abort`."""
        if self._aborted.is_set():
            raise self.error(TransferAborted, self._reason, phase)

    def watch_connections(self) -> None:
        """All ranks are connected now: fewer connections than now mean a lost peer."""
        self._num_connections = sockets.count(self._listeners)

    def check_connections(self) -> None:
        """Raises PeerLost when a connection that was there has gone."""
        left = sockets.count(self._listeners)
        if left < self._num_connections:
            detail = f"{self._num_connections - left} connections are gone"
            raise self.error(PeerLost, detail, "broadcast")

    def post(self, tensor: torch.Tensor, *, timeout_s: float) -> Pending:
        """Start a broadcast of a contiguous tensor on `device`; operations run in post order."""
        self.raise_if_aborted("broadcast")
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(timeout_s, 0.001))
        pg = self._pg
        if pg is None:  # closed by another thread since the check
            raise self.error(TransferAborted, "closed", "broadcast")
        try:
            work = pg.broadcast([tensor], options)
        except RuntimeError as exc:
            self.raise_if_aborted("broadcast")
            raise self.error(PeerLost, brief(exc), "broadcast") from exc
        pending = Pending(self, work, tensor)
        self._pending = [old for old in self._pending if not old.is_completed()] + [pending]
        return pending

    def broadcast(self, tensor: torch.Tensor, *, timeout_s: float) -> None:
        """Rank 0's bytes into everybody's `tensor`. TransferError ends the group."""
        deadline = time.monotonic() + timeout_s
        self.post(tensor, timeout_s=timeout_s).wait(deadline)

    def abort(self, reason: str) -> None:
        """End the generation now, on this rank and through broken connections on all others."""
        with self._lock:
            if self._aborted.is_set():
                return
            self._reason = reason
            self._aborted.set()
            pg = self._pg
        if self.backend == "nccl" and pg is not None:
            pg.abort()
        sockets.cut(self._listeners)

    def close(self) -> None:
        """Abort what is under way and free threads and sockets. Idempotent."""
        self.abort("closed")
        with self._lock:
            pg, self._pg = self._pg, None
            pending, self._pending = self._pending, []
        if pg is None:
            return
        deadline = time.monotonic() + _DRAIN_S
        while any(not item.is_completed() for item in pending) and time.monotonic() < deadline:
            time.sleep(_POLL_MAX_S)
        if any(not item.is_completed() for item in pending):
            # The destructor would join the blocked backend thread under the interpreter lock.
            threading.Thread(target=_bury, args=(pg, pending), daemon=True).start()


def _bury(pg: Any, pending: list[Pending]) -> None:
    """Hold a group whose operations did not end until their own timeout has ended them."""
    while any(not item.is_completed() for item in pending):
        time.sleep(0.1)
    del pg


def make_process_group(
    backend: Backend,
    store: PrefixStore,
    rank: int,
    world_size: int,
    *,
    gloo_device: Any,
    timeout_s: float,
) -> Any:
    """The backend's process group, outside the default one. Blocks until connected (Gloo)."""
    if backend == "gloo":
        options = ProcessGroupGloo._Options()
        options._devices = [gloo_device]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = _GLOO_THREADS
        return ProcessGroupGloo(store, rank, world_size, options)
    from torch.distributed import ProcessGroupNCCL  # missing in builds without CUDA

    nccl_options = ProcessGroupNCCL.Options()
    nccl_options._timeout = _NCCL_WATCHDOG
    return ProcessGroupNCCL(store, rank, world_size, nccl_options)


_DEVICE_LOCK = threading.Lock()


def make_gloo_device(host: str) -> tuple[Any, sockets.Address | None]:
    """A Gloo device that listens on `host`, and its address (None where it cannot be known)."""
    with _DEVICE_LOCK:
        for _ in range(5):  # another thread may open a listener at the same instant
            before = sockets.listening()
            device = ProcessGroupGloo.create_device(hostname=host)
            new = sockets.listening() - before
            if len(new) == 1:
                return device, new.pop()
    return device, None
