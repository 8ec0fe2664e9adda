"""One rank's receiver: joins generations and stages versions, in threads beside the engine core.

    idle -join-> joining -> joined -receive-> receiving -> staged -(commit)-> joined
    abort, from any thread and at any time: -> aborted; a join or receive that fails: -> failed

Rules:
- No method blocks: what blocks runs in a thread, whose outcome counts only while its attempt is the
  current one. `join` and `abort` start a new attempt; what an older thread still brings is closed.
- Memory that a broken transfer may still write to is never used again.
- Nothing here touches the model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from protocol.engine_api import InitInfo, TransferState, TransferStatus, UpdateInfo
from transfer.errors import TransferError
from transfer.join import join
from transfer.receive import Staged, Staging, receive

if TYPE_CHECKING:
    import torch

    from transfer.group import Backend, TransferGroup

log = logging.getLogger(__name__)


class ReceiverState(RuntimeError):
    """The call does not fit the receiver's state."""


class Receiver:
    """See the module. `device` is where the backend's bytes arrive; staging is host memory."""

    def __init__(self, *, backend: Backend, device: torch.device) -> None:
        self._backend: Backend = backend
        self._device = device
        self._lock = threading.Lock()
        self._attempt = 0
        self._cancel = threading.Event()
        self._group: TransferGroup | None = None
        self._staging = Staging()
        self._staged: Staged | None = None
        self._status = TransferStatus(generation=0, state="idle")

    def status(self) -> TransferStatus:
        """Where the current attempt stands."""
        return self._status

    def join(self, info: InitInfo, rank: int) -> None:
        """Leave what there is and start to join `info.generation` as `rank`."""
        with self._lock:
            attempt, cancel = self._renew("a new generation begins")
            self._status = TransferStatus(generation=info.generation, state="joining")
        self._start(
            f"join-g{info.generation}", lambda: self._join(attempt, cancel, info, rank), attempt
        )

    def forget(self) -> None:
        """Drop what is staged; the membership stays."""
        with self._lock:
            if self._status.state == "staged":
                self._drop_staged()

    def receive(self, info: UpdateInfo) -> None:
        """Start to receive `info.version`. Raises ReceiverState unless joined and idle."""
        with self._lock:
            group = self._group
            if group is None or self._status.state not in ("joined", "staged"):
                raise ReceiverState(f"cannot receive while {self._status.state}")
            if info.generation != self._status.generation:
                raise ReceiverState(
                    f"generation is {self._status.generation}, not {info.generation}"
                )
            self._drop_staged()
            self._set("receiving")
            attempt = self._attempt
        self._start(
            f"receive-v{info.version}", lambda: self._receive(attempt, group, info), attempt
        )

    def staged(self, version: int) -> Staged:
        """What is staged. Raises ReceiverState unless it is `version`."""
        with self._lock:
            if self._staged is None or self._staged.version != version:
                held = None if self._staged is None else self._staged.version
                raise ReceiverState(f"staged version is {held}, not {version}")
            return self._staged

    def abort(self, generation: int, reason: str) -> TransferStatus:
        """End `generation`; no effect when it is not the current one or over already."""
        with self._lock:
            is_over = self._status.state in ("idle", "failed", "aborted")
            if generation != self._status.generation or is_over:
                return self._status
            self._renew(reason or "aborted")
            self._status = TransferStatus(
                generation=generation, state="aborted", error=reason or None
            )
            return self._status

    def close(self) -> None:
        """Leave for good. Idempotent."""
        with self._lock:
            self._renew("the engine leaves")
            self._status = TransferStatus(generation=self._status.generation, state="idle")

    def _join(self, attempt: int, cancel: threading.Event, info: InitInfo, rank: int) -> None:
        try:
            group = join(
                info.host,
                info.port,
                generation=info.generation,
                rank=rank,
                world_size=info.world_size,
                backend=self._backend,
                device=self._device,
                timeout_s=info.timeout_s,
                cancel=cancel,
            )
        except TransferError as exc:
            self._fail(attempt, str(exc))
            return
        with self._lock:
            if attempt == self._attempt:
                self._group = group
                self._set("joined")
                return
        group.close()

    def _receive(self, attempt: int, group: TransferGroup, info: UpdateInfo) -> None:
        try:
            staged = receive(
                group, version=info.version, timeout_s=info.timeout_s, staging=self._staging
            )
        except TransferError as exc:
            self._fail(attempt, str(exc))
            return
        with self._lock:
            if attempt == self._attempt:
                self._staged = staged
                self._status = TransferStatus(
                    generation=group.generation,
                    state="staged",
                    staged_version=staged.version,
                    num_bytes=staged.num_bytes,
                    digest=staged.digest,
                )

    def _fail(self, attempt: int, error: str) -> None:
        with self._lock:
            if attempt != self._attempt:
                return
            self._renew(error)
            self._status = TransferStatus(
                generation=self._status.generation, state="failed", error=error
            )
        log.warning("weight transfer failed: %s", error)

    def _renew(self, reason: str) -> tuple[int, threading.Event]:
        """Begin a new attempt: free what is blocked, forget what is staged. Under the lock."""
        self._attempt += 1
        self._cancel.set()
        self._cancel = threading.Event()
        group, self._group = self._group, None
        if group is not None:
            group.abort(reason)  # frees blocked calls at once; closing may wait for the backend
            self._start(f"close-g{group.generation}", group.close, None)
            self._staging = Staging()
        self._staged = None
        return self._attempt, self._cancel

    def _drop_staged(self) -> None:
        if self._staged is not None:
            self._staged.drop()
            self._staged = None
        self._set("joined")

    def _set(self, state: TransferState) -> None:
        self._status = TransferStatus(generation=self._status.generation, state=state)

    def _start(self, name: str, work: Callable[[], None], attempt: int | None) -> None:
        """`work` in a thread; `attempt` fails with it."""
        threading.Thread(target=self._run, args=(work, attempt), name=name, daemon=True).start()

    def _run(self, work: Callable[[], None], attempt: int | None) -> None:
        try:
            work()
        except Exception as exc:
            # Task boundary: nobody joins the thread, the caller polls `status`.
            log.exception("weight transfer thread broke")
            if attempt is not None:
                self._fail(attempt, f"{type(exc).__name__}: {exc}")
