"""Bounded, cancellable join of one generation.

Order: meet in the store -> register -> rank 0 sees all and says go -> connect -> hello ->
confirm. The process group is built only when every rank is known to be there, so a missing rank
costs the join's deadline and nothing else, and rank 0 can say which one was missing.

The blocking steps run in a thread of their own: `join` returns at the deadline or at `cancel` even
when the backend does not, and what the thread still makes afterwards is closed by it.

Keys, under `<generation>/`: `rank/<r>` listening address; `go` all addresses; `abort` reason of
whoever gave up; `in/<r>` connected. Without prefix: `membership`, so that a foreign generation is
told apart from a slow one.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from transfer import sockets
from transfer.errors import (
    JoinTimeout,
    PeerLost,
    TransferAborted,
    TransferError,
    TransferMismatch,
)
from transfer.group import (
    Backend,
    TransferGroup,
    brief,
    make_gloo_device,
    make_process_group,
)
from transfer.rendezvous import connect, local_address

_POLL_S = 0.01


def join(
    host: str,
    port: int,
    *,
    generation: int,
    rank: int,
    world_size: int,
    backend: Backend,
    device: torch.device | str,
    timeout_s: float,
    store: Store | None = None,
    cancel: threading.Event | None = None,
) -> TransferGroup:
    """Join generation `generation` at the store `host:port` as `rank`; blocks up to `timeout_s`.

    Rank 0 passes the `store` of its own `Rendezvous`. `cancel` ends the join from another thread.
    Returns once all ranks are connected. Raises JoinTimeout, TransferAborted, TransferMismatch or
    PeerLost; nothing is left behind then.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside of world size {world_size}")
    if rank == 0 and store is None:
        raise ValueError("rank 0 joins with the store of its own rendezvous")
    attempt = _Attempt(
        host=host,
        port=port,
        generation=generation,
        rank=rank,
        world_size=world_size,
        backend=backend,
        device=torch.device(device),
        deadline=time.monotonic() + timeout_s,
        store=store,
    )
    thread = threading.Thread(target=attempt.run, name=f"join-g{generation}-r{rank}", daemon=True)
    thread.start()
    while not attempt.done.wait(_POLL_S):
        if cancel is not None and cancel.is_set():
            attempt.abandon()
            raise attempt.error(TransferAborted, "cancelled")
        # The thread ends itself at the deadline, with a better message; this is the backstop.
        if time.monotonic() > attempt.deadline + 0.5:
            attempt.abandon()
            raise attempt.error(JoinTimeout, "backend did not answer")
    return attempt.result()


class _Attempt:
    """State of one join, shared by the caller and the joining thread."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        generation: int,
        rank: int,
        world_size: int,
        backend: Backend,
        device: torch.device,
        deadline: float,
        store: Store | None,
    ) -> None:
        self.host = host
        self.port = port
        self.generation = generation
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.device = device
        self.deadline = deadline
        self.store = store
        self.done = threading.Event()
        self.phase = "connect to store"
        self._abandoned = threading.Event()
        self._lock = threading.Lock()
        self._listeners: frozenset[sockets.Address] = frozenset()
        self._keys: PrefixStore | None = None
        self._is_registered = False
        self._group: TransferGroup | None = None
        self._error: TransferError | None = None

    def error(
        self, kind: type[TransferError], detail: str, missing: tuple[int, ...] = ()
    ) -> TransferError:
        """An error with this join's generation, rank and phase."""
        where: dict[str, Any] = {
            "generation": self.generation,
            "rank": self.rank,
            "phase": f"join ({self.phase})",
        }
        if issubclass(kind, JoinTimeout):
            where["missing"] = missing
        return kind(detail, **where)

    def result(self) -> TransferGroup:
        """The joined group, or raises what went wrong. After `done`."""
        if self._error is not None:
            raise self._error
        assert self._group is not None
        return self._group

    def abandon(self) -> None:
        """The caller has left: end soon, keep nothing."""
        with self._lock:
            self._abandoned.set()
            group = self._group
        sockets.cut(self._listeners)
        if group is not None:
            group.close()

    def run(self) -> None:
        """Body of the joining thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a new thread starts on device 0
        try:
            group = self._join()
        except TransferError as exc:
            self._error = exc
        except (RuntimeError, OSError) as exc:  # torch reports its store and network errors so
            late = time.monotonic() >= self.deadline
            self._error = self.error(JoinTimeout if late else PeerLost, brief(exc))
        else:
            with self._lock:
                self._group = group
            if self._abandoned.is_set():
                group.close()
        if self._error is not None:
            self._tell_others(self._error)
        self.store = self._keys = None
        self.done.set()

    def _join(self) -> TransferGroup:
        keys = self._meet()
        gloo_device, address = None, None
        if self.backend == "gloo":
            gloo_device, address = make_gloo_device(local_address(self.host, self.port))
        self._register(keys, address)
        self._listeners = self._wait_for_go(keys)
        self.phase = "connect"
        pg = make_process_group(
            self.backend,
            PrefixStore("pg", keys),
            self.rank,
            self.world_size,
            gloo_device=gloo_device,
            timeout_s=self._left(),
        )
        group = TransferGroup(
            pg,
            generation=self.generation,
            rank=self.rank,
            world_size=self.world_size,
            backend=self.backend,
            device=self.device,
            listeners=self._listeners,
        )
        try:
            self._confirm(keys, group)
        except BaseException:
            group.close()
            raise
        return group

    def _meet(self) -> PrefixStore:
        """Reach the store and check that it serves our generation."""
        if self.store is None:
            self.store = connect(self.host, self.port, timeout_s=self._left())
        ours = json.dumps([self.generation, self.world_size, self.backend])
        self._keys = PrefixStore(str(self.generation), self.store)
        if self.rank == 0:
            self.store.set("membership", ours)
            return self._keys
        self.phase = "wait for sender"
        self._poll(self.store, ["membership"])
        theirs = self.store.get("membership").decode()
        if theirs != ours:
            fields = "[generation, world size, backend]"
            raise self.error(TransferMismatch, f"sender has {fields} {theirs}, not {ours}")
        return self._keys

    def _register(self, keys: PrefixStore, address: sockets.Address | None) -> None:
        mine = json.dumps([*(address or ("", 0)), threading.get_ident()])
        if keys.compare_set(f"rank/{self.rank}", "", mine).decode() != mine:
            raise self.error(TransferMismatch, f"rank {self.rank} is taken")
        self._is_registered = True

    def _wait_for_go(self, keys: PrefixStore) -> frozenset[sockets.Address]:
        """All ranks' listening addresses, once rank 0 has seen every rank."""
        self.phase = "wait for ranks"
        ranks = [f"rank/{rank}" for rank in range(self.world_size)]
        if self.rank == 0:
            self._poll(keys, ranks, per_rank=True)
            entries = [json.loads(entry) for entry in keys.multi_get(ranks)]
            keys.set("go", json.dumps(entries))
        else:
            self._poll(keys, ["go"])
            entries = json.loads(keys.get("go"))
        return frozenset(sockets.Address(host, port) for host, port, _ in entries if port)

    def _confirm(self, keys: PrefixStore, group: TransferGroup) -> None:
        """First collective: proves every connection, and that both ends mean the same thing."""
        self.phase = "hello"
        hello = torch.tensor([self.generation], dtype=torch.int64, device=self.device)
        group.broadcast(hello, timeout_s=self._left())
        if int(hello.item()) != self.generation:
            raise self.error(TransferMismatch, f"sender says generation {int(hello.item())}")
        group.watch_connections()
        self.phase = "confirm"
        keys.set(f"in/{self.rank}", "1")
        if self.rank == 0:
            self._poll(keys, [f"in/{rank}" for rank in range(self.world_size)], per_rank=True)

    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def _poll(self, store: Store, keys: list[str], *, per_rank: bool = False) -> None:
        """Wait for `keys`. Raises at the deadline, on abandon, and when another rank gave up."""
        while not store.check(keys):
            if self._abandoned.wait(_POLL_S):
                raise self.error(TransferAborted, "cancelled")
            if self._keys is not None and self._keys.check(["abort"]):
                raise self.error(TransferAborted, self._keys.get("abort").decode())
            if time.monotonic() >= self.deadline:
                missing = (
                    tuple(rank for rank, key in enumerate(keys) if not store.check([key]))
                    if per_rank
                    else ()
                )
                detail = f"ranks {list(missing)} are missing" if per_rank else "timed out"
                raise self.error(JoinTimeout, detail, missing)

    def _tell_others(self, error: TransferError) -> None:
        """Best effort: ranks that still wait need not sit out their deadline.

        A rank that never registered is nobody's concern, unless it was cancelled; one that has run
        out of time withdraws, so that rank 0 finds it missing.
        """
        is_ours = self._is_registered or self.rank == 0 or isinstance(error, TransferAborted)
        if self._keys is None or not is_ours:
            return
        with suppress(RuntimeError):  # the store is gone, and its clients know that already
            if isinstance(error, JoinTimeout) and self.rank > 0:
                self._keys.delete_key(f"rank/{self.rank}")
            else:
                self._keys.set("abort", str(error))
