"""The fake's receiver: the transfer states of the contract over a link that may or may not be real.

    init -> joining -> joined -> receiving -> staged -> (commit) joined; abort from anywhere

`none` has no link: joins and receives are bookkeeping of zero bytes. `gloo` really joins and really
receives, a thread a rank, and throws the tensors away. Torch is imported only for `gloo`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeVar

from engine.control import Conflict, Stage
from protocol.engine_api import InitInfo, TransferState, TransferStatus, UpdateInfo

if TYPE_CHECKING:
    from transfer.group import TransferGroup

_T = TypeVar("_T")
TransferMode = Literal["none", "gloo"]

EMPTY_DIGEST = "0" * 32  # of zero bytes, in mode `none`; the fake trainer says the same

_REACHED: dict[Stage, frozenset[TransferState]] = {
    "joined": frozenset({"joined", "receiving", "staged"}),
    "staged": frozenset({"staged"}),
}
_OVER: frozenset[TransferState] = frozenset({"idle", "failed", "aborted"})


class LinkError(Exception):
    """A join or a receive failed; the text is shown to the caller of the await route."""


class Received(NamedTuple):
    """What one rank received."""

    num_bytes: int
    digest: str


class Link(Protocol):
    """One rank's connection to a generation."""

    async def join(self, info: InitInfo, rank: int) -> None:
        """Enter the generation. Raises LinkError."""

    async def receive(self, info: UpdateInfo) -> Received:
        """Receive one version. Raises LinkError."""

    def abort(self, reason: str) -> None:
        """Free a blocked join or receive. Idempotent."""


class NoLink:
    """Mode `none`."""

    async def join(self, info: InitInfo, rank: int) -> None:
        """Nothing to enter."""

    async def receive(self, info: UpdateInfo) -> Received:
        """Zero bytes."""
        return Received(0, EMPTY_DIGEST)

    def abort(self, reason: str) -> None:
        """Nothing can be blocked."""


class GlooLink:
    """Mode `gloo`: the real transfer package; blocking calls run in a thread of their own."""

    def __init__(self) -> None:
        self._cancel = threading.Event()
        self._thread = ThreadPoolExecutor(1)  # the loop's own pool is smaller than a fleet
        self._group: TransferGroup | None = None

    async def join(self, info: InitInfo, rank: int) -> None:
        """Join as `rank`; bounded by the info's timeout, cancelled by `abort`."""
        from transfer.errors import TransferError

        try:
            await self._in_thread(lambda: self._join(info, rank))
        except TransferError as exc:
            raise LinkError(str(exc)) from exc

    async def receive(self, info: UpdateInfo) -> Received:
        """Receive into memory that is freed again."""
        from transfer.errors import TransferError
        from transfer.receive import receive

        group = self._group
        assert group is not None
        try:
            staged = await self._in_thread(
                lambda: receive(group, version=info.version, timeout_s=info.timeout_s)
            )
        except TransferError as exc:
            raise LinkError(str(exc)) from exc
        return Received(staged.num_bytes, staged.digest)

    def abort(self, reason: str) -> None:
        """End the generation on this rank; closing may wait for the backend, we do not."""
        self._cancel.set()
        group, self._group = self._group, None
        if group is not None:
            group.abort(reason)
            self._thread.submit(group.close)
        self._thread.shutdown(wait=False)

    def _join(self, info: InitInfo, rank: int) -> None:
        from transfer.join import join

        group = join(
            info.host,
            info.port,
            generation=info.generation,
            rank=rank,
            world_size=info.world_size,
            backend="gloo",
            device="cpu",
            timeout_s=info.timeout_s,
            cancel=self._cancel,
        )
        self._group = group
        if self._cancel.is_set():  # aborted at the last moment: nobody will close it for us
            group.close()

    def _in_thread(self, work: Callable[[], _T]) -> Awaitable[_T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)


def make_link(mode: TransferMode) -> Link:
    """A fresh link of this mode."""
    return GlooLink() if mode == "gloo" else NoLink()


class FakeReceiver:
    """Transfer state of one engine with `world_size` ranks. `phase` is awaited inside the `join`
    and `stage` phases and may hang, or raise LinkError."""

    def __init__(
        self, mode: TransferMode, world_size: int, phase: Callable[[str], Awaitable[None]]
    ) -> None:
        self.generation = 0
        self.state: TransferState = "idle"
        self.staged_version: int | None = None
        self._mode = mode
        self._world_size = world_size
        self._phase = phase
        self._links: list[Link] = []
        self._error: str | None = None
        self._received = Received(0, "")
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def status(self) -> TransferStatus:
        """Where the receiver stands."""
        return TransferStatus(
            generation=self.generation,
            state=self.state,
            staged_version=self.staged_version,
            error=self._error,
            num_bytes=self._received.num_bytes,
            digest=self._received.digest or None,
        )

    def init(self, info: InitInfo) -> None:
        """Leave the old generation and start to join a newer one."""
        self._drop("superseded")
        self.generation = info.generation
        self._links = [make_link(self._mode) for _ in range(self._world_size)]
        self._set("joining")
        self._start(self._join(info))

    def update(self, info: UpdateInfo) -> None:
        """Start to receive. Raises Conflict when there is nothing to receive from."""
        if self.state not in ("joined", "staged"):
            raise Conflict(f"cannot receive: the transfer is {self.state}")
        self.staged_version = None
        self._set("receiving")
        self._start(self._receive(info))

    def forget(self) -> None:
        """Drop what is staged; the membership stays."""
        self.staged_version = None
        if self.state == "staged":
            self._set("joined")

    async def wait(self, stage: Stage, timeout_s: float) -> TransferStatus:
        """Status once the stage is reached, the transfer is over, or time is up."""
        generation = self.generation
        try:
            async with asyncio.timeout(timeout_s):
                while self.generation == generation and not self._is_due(stage):
                    await self._changed.wait()
        except TimeoutError:
            pass  # a long poll that ran out: the caller looks at `state`
        return self.status()

    def abort(self, reason: str) -> TransferStatus:
        """Free a blocked join or receive and forget what is staged. Idempotent."""
        if self.state not in _OVER:
            self._drop(reason)
            self._error = reason or None
            self._set("aborted")
        return self.status()

    def committed(self) -> None:
        """The staged version is loaded now."""
        self.staged_version = None
        self._set("joined")

    def shutdown(self) -> None:
        """Leave the generation; its number stays used."""
        self._drop("shut down")
        self._set("idle")

    def _is_due(self, stage: Stage) -> bool:
        return self.state in _REACHED[stage] or self.state in _OVER

    def _set(self, state: TransferState) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    def _start(self, work: Awaitable[None]) -> None:
        self._task = asyncio.ensure_future(work)

    def _drop(self, reason: str) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        for link in self._links:
            link.abort(reason)
        self._links = []
        self._received = Received(0, "")
        self._error = None
        self.staged_version = None

    async def _join(self, info: InitInfo) -> None:
        try:
            await self._phase("join")
            await asyncio.gather(
                *(link.join(info, info.rank_offset + i) for i, link in enumerate(self._links))
            )
        except LinkError as exc:
            self._failed(info.generation, exc)
        else:
            self._set("joined")

    async def _receive(self, info: UpdateInfo) -> None:
        try:
            await self._phase("stage")
            received = await asyncio.gather(*(link.receive(info) for link in self._links))
        except LinkError as exc:
            self._failed(info.generation, exc)
        else:
            self._received = received[0]
            self.staged_version = info.version
            self._set("staged")

    def _failed(self, generation: int, error: LinkError) -> None:
        if generation == self.generation:
            self._task = None  # this very task: it need not be cancelled
            self._drop(str(error))
            self._error = str(error)
            self._set("failed")
