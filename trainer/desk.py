"""What the control server's thread and the step loop share: requests in, status out.

    server thread --batch, send, finish, stop--> Desk --take()--> step loop --report()--> status

One lock. The desk decides what may be asked at all (order of steps, room, versions); the loop
decides when it is done. Every change bumps `seq` and wakes long polls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from protocol.records import TrainBatch
from protocol.trainer_api import StepMetrics, TrainerState, TrainerStatus
from transfer.group import TransferGroup
from transfer.send import SendResult

_NUM_RECENT_STEPS = 64


class Conflict(Exception):
    """The request does not fit the trainer's state (409)."""


class Full(Exception):
    """No room for another batch now (503)."""


@dataclass(slots=True)
class SendCommand:
    """Ship `version` over `group`; the outcome goes to `future`."""

    group: TransferGroup
    version: int
    deadline: float
    future: Future[SendResult] = field(default_factory=Future)


class Desk:
    """Shared state of a trainer. Methods may be called from any thread."""

    def __init__(
        self, *, run_id: str, boot: str, first_step: int, max_steps: int, max_queued: int
    ) -> None:
        self._run_id = run_id
        self._boot = boot
        self._max_steps = max_steps
        self._max_queued = max_queued
        self._changed = threading.Condition(threading.RLock())
        self._listeners: list[Callable[[], None]] = []
        self._seq = 0
        self._state: TrainerState = "starting"
        self._next_step = first_step
        self._published: int | None = None
        self._finished: int | None = None
        self._generation = 0
        self._num_bytes = 0
        self._error: str | None = None
        self._steps: deque[StepMetrics] = deque(maxlen=_NUM_RECENT_STEPS)
        self._batches: deque[TrainBatch] = deque()
        self._sends: deque[SendCommand] = deque()
        self._is_stopping = False

    # What the server calls.

    def status(self) -> TrainerStatus:
        """The whole state as it is now."""
        with self._changed:
            return TrainerStatus(
                run_id=self._run_id,
                trainer_boot=self._boot,
                seq=self._seq,
                state=self._state,
                next_step=self._next_step,
                published_version=self._published,
                finished_version=self._finished,
                generation=self._generation,
                num_bytes=self._num_bytes,
                recent_steps=list(self._steps),
                error=self._error,
            )

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` (quick, from any thread) after every change."""
        with self._changed:
            self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Undo `listen`."""
        with self._changed:
            self._listeners.remove(listener)

    def offer(self, batch: TrainBatch) -> None:
        """Queue a batch. Raises Conflict for another run or step than the next, Full."""
        with self._changed:
            if batch.run_id != self._run_id:
                raise Conflict(f"batch of run {batch.run_id!r}, this is {self._run_id!r}")
            if self._is_stopping or self._next_step >= self._max_steps:
                raise Conflict(f"no step {batch.step}: the trainer is stopping")
            if batch.step != self._next_step:
                raise Conflict(f"batch of step {batch.step}, the next one is {self._next_step}")
            if len(self._batches) >= self._max_queued:
                raise Full(f"{len(self._batches)} batches are waiting")
            self._batches.append(batch)
            self._next_step += 1
            self._wake()

    def ask_send(self, command: SendCommand) -> None:
        """Queue a send. Raises Conflict when its version is not the published one."""
        with self._changed:
            self._check_published(command.version)
            self._sends.append(command)
            self._wake()

    def finish(self, version: int) -> None:
        """Version `version` is in service. Raises Conflict when it was not published."""
        with self._changed:
            if self._published is None or version > self._published:
                raise Conflict(f"version {version} is not published, {self._published} is")
            if self._finished is None or version > self._finished:
                self._finished = version
                self._wake()

    def opened(self, generation: int) -> None:
        """A generation was opened."""
        with self._changed:
            self._generation = generation
            self._wake()

    def stop(self) -> None:
        """End after the current step."""
        with self._changed:
            self._is_stopping = True
            self._wake()

    # What the loop calls.

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._is_stopping

    def is_finished(self, version: int) -> bool:
        """Whether `version` was confirmed to be in service."""
        with self._changed:
            return self._finished is not None and self._finished >= version

    def report(
        self,
        state: TrainerState,
        *,
        published: int | None = None,
        num_bytes: int | None = None,
        step: StepMetrics | None = None,
        error: str | None = None,
    ) -> None:
        """Publish the loop's state; None leaves a field as it is."""
        with self._changed:
            self._state = state
            self._published = self._published if published is None else published
            self._num_bytes = self._num_bytes if num_bytes is None else num_bytes
            self._error = self._error if error is None else error
            if step is not None:
                self._steps.append(step)
            self._wake()

    def take(
        self, *, timeout_s: float, for_version: int | None = None
    ) -> SendCommand | TrainBatch | None:
        """The next thing to do, sends first; None after `timeout_s`, or when it is time to look up.

        With `for_version` batches stay queued, and the version's finish ends the wait.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                while self._sends:
                    command = self._sends.popleft()
                    if command.future.set_running_or_notify_cancel():
                        return command
                if self._is_stopping:
                    return None
                if for_version is None and self._batches:
                    return self._batches.popleft()
                if for_version is not None and self.is_finished(for_version):
                    return None
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None

    def check_published(self, version: int) -> None:
        """Raises Conflict when `version` is not what a send would ship now."""
        with self._changed:
            self._check_published(version)

    def _check_published(self, version: int) -> None:
        if version != self._published:
            raise Conflict(f"version {version} is not the published one, {self._published} is")

    def _wake(self) -> None:
        self._seq += 1
        self._changed.notify_all()
        for listener in self._listeners:
            listener()
