"""The trainer: rank 0 of every generation, and the step loop that waits for updates and rollouts.

publish v -> Finish(v), or its own patience -> batch (needs engines that serve) -> publish v + 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orchestrator.plane.commands import AbortGeneration, Finish, Join, Open, Send
from orchestrator.plane.events import OpResult
from tests.sim.server import Call, Server
from tests.sim.transfer import Collective

if TYPE_CHECKING:
    from tests.sim.world import World

_LOOK_S = 0.2
_FIRST_PORT = 1000


class Trainer(Server):
    """One boot of the trainer. `version`: of its weights, those of its last checkpoint at boot."""

    def __init__(self, world: World, boot: str, version: int) -> None:
        super().__init__(world, boot)
        self.boot = boot
        self.version = version
        self.published: int | None = None
        self.finished: int | None = None
        self.last_generation = 0
        self._collective: Collective | None = None
        self._waiting: list[Call] = []

    def collective_at(self, port: int) -> Collective | None:
        """What listens on a port of this host."""
        collective = self._collective
        if self.is_alive and collective is not None and collective.number + _FIRST_PORT == port:
            return collective
        return None

    # -- steps

    def publish(self) -> None:
        """Offer the weights; go on without a confirmation only after the update's time."""
        if not self.is_alive:
            return
        world = self.world
        self.published = self.version
        world.tell_trainer()
        patience_s = world.plane["update_timeout_s"]
        world.loop.at(world.loop.now + patience_s, self._out_of_patience, self.version)

    def _out_of_patience(self, version: int) -> None:
        if self.is_alive and version == self.version and not self._is_finished():
            self.world.checks.trainer_waited(version)
            self.world.note(f"{self.boot} goes on without confirmation of v{version}")
            self._next_batch(version)

    def _is_finished(self) -> bool:
        return self.finished is not None and self.finished >= self.version

    def _next_batch(self, version: int) -> None:
        if not self.is_alive or version != self.version:
            return
        world = self.world
        if self.is_frozen or not world.makes_rollouts():
            world.loop.at(world.loop.now + _LOOK_S, self._next_batch, version)
        else:
            seconds = world.timing["train_s"] * world.noise.uniform(0.5, 1.5)
            world.loop.at(world.loop.now + seconds, self._trained, version)

    def _trained(self, version: int) -> None:
        if self.is_alive and version == self.version:
            self.version += 1
            self.publish()

    # -- requests

    def handle(self, call: Call) -> None:
        """Carry it out."""
        _HANDLERS[type(call.op)](self, call)

    def _open(self, call: Call) -> None:
        op = call.op
        assert isinstance(op, Open)
        if op.generation <= self.last_generation:
            self.answer(call, "failed", error=f"the last generation is {self.last_generation}")
            return
        self._end("a newer generation was opened")
        self.last_generation = op.generation
        self._collective = Collective(self.world, op.generation, op.world_size, self)
        ends_at = self.world.loop.now + op.join_timeout_s
        self.world.loop.at(ends_at, _join_is_over, self._collective)
        port = _FIRST_PORT + op.generation
        self.answer(call, "succeeded", OpResult(host="trainer", port=port))

    def _join(self, call: Call) -> None:
        op = call.op
        assert isinstance(op, Join)
        collective = self._collective
        if collective is None or op.generation != collective.number:
            self.answer(call, "failed", error=f"the last generation is {self.last_generation}")
        elif collective.broken:
            self.answer(call, "failed", error=collective.broken)
        elif collective.is_joined:
            self.answer(call, "succeeded")
        else:
            self._wait(call)

    def _send(self, call: Call) -> None:
        op = call.op
        assert isinstance(op, Send)
        collective = self._collective
        if op.version != self.published:
            self.answer(call, "failed", error=f"version {self.published} is published")
        elif collective is None or op.generation != collective.number or collective.broken:
            self.answer(call, "failed", error="no such generation")
        else:
            self._wait(call)
            collective.start(self, op.version)

    def _abort(self, call: Call) -> None:
        op = call.op
        assert isinstance(op, AbortGeneration)
        if op.generation > self.last_generation:
            self.answer(call, "failed", error="it was never opened")
            return
        if self._collective is not None and self._collective.number == op.generation:
            self._end("aborted")
        self.answer(call, "succeeded")

    def _finish(self, call: Call) -> None:
        op = call.op
        assert isinstance(op, Finish)
        if self.published is None or op.version > self.published:
            self.answer(call, "failed", error=f"version {self.published} is published")
            return
        was_finished = self._is_finished()
        self.finished = max(op.version, -1 if self.finished is None else self.finished)
        if self._is_finished() and not was_finished:
            self._next_batch(self.version)
        self.answer(call, "succeeded")

    def _wait(self, call: Call) -> None:
        self._waiting.append(call)
        self.world.loop.at(call.wait_until, self._not_in_time, call)

    def _not_in_time(self, call: Call) -> None:
        if call in self._waiting:
            self._waiting.remove(call)
            if isinstance(call.op, Send):
                self._end("send timed out")
            self.answer(call, "failed", error="not in time")

    def _end(self, reason: str) -> None:
        collective, self._collective = self._collective, None
        if collective is not None:
            collective.leave(reason)

    def joined(self) -> None:
        """All ranks are in."""
        self._answer_waiting("succeeded")

    def received(self, version: int) -> None:
        """All bytes are out."""
        self._answer_waiting("succeeded")

    def transfer_failed(self, reason: str) -> None:
        """The collective broke."""
        self._answer_waiting("failed", reason)

    def _answer_waiting(self, outcome: str, error: str = "") -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            result = OpResult(num_bytes=64, digest="d") if isinstance(call.op, Send) else None
            self.answer(call, outcome, result, error)

    def died(self) -> None:
        """The end of the process breaks its collective."""
        self._waiting.clear()
        self._end(f"{self.name} died")


def _join_is_over(collective: Collective) -> None:
    if not collective.is_joined:
        collective.leave("not all ranks joined in time")


_HANDLERS: dict[type[Any], Callable[[Trainer, Call], None]] = {
    AbortGeneration: Trainer._abort,
    Finish: Trainer._finish,
    Join: Trainer._join,
    Open: Trainer._open,
    Send: Trainer._send,
}
