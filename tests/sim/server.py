"""What engines and the trainer have in common: a process that answers calls, or does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.plane.commands import Op
from orchestrator.plane.events import OpResult

if TYPE_CHECKING:
    from tests.sim.world import World


class Call:
    """One request of the orchestrator. `is_answered`: by the server; `is_done`: for the
    orchestrator. `wait_until`: how long the server may wait before it answers "not in time"."""

    __slots__ = (
        "delay_s", "fault", "holds_gate", "is_answered", "is_done", "op", "server", "wait_until",
    )  # fmt: skip

    def __init__(self, op: Op, fault: str, delay_s: float) -> None:
        self.op = op
        self.fault = fault
        self.delay_s = delay_s
        self.wait_until = 0.0
        self.server: Server | None = None
        self.is_answered = False
        self.is_done = False
        self.holds_gate = False


class Server:
    """A process. `is_frozen`: stopped, it keeps what arrives for later. `is_cut`: its admin link
    loses everything, in both directions."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.is_frozen = False
        self.is_cut = False
        self.slow_s = 0.0
        self._calls: dict[Call, None] = {}
        self._inbox: list[Call] = []
        self._outbox: list[tuple[Call, str, OpResult, str]] = []

    def receive(self, call: Call) -> None:
        """A request arrives."""
        if not self.is_alive:
            self.world.client.broken(call, "connection refused")
            return
        if self.is_cut:
            return
        self._calls[call] = None
        if self.is_frozen:
            self._inbox.append(call)
        elif call.fault == "refuse":
            self.answer(call, "failed", error="injected refusal")
        else:
            self.handle(call)

    def answer(
        self, call: Call, outcome: str, result: OpResult | None = None, error: str = ""
    ) -> None:
        """Answer once; a stopped process answers when it goes on."""
        if call.is_answered or not self.is_alive:
            return
        if self.is_frozen:
            self._outbox.append((call, outcome, result or OpResult(), error))
            return
        call.is_answered = True
        self._calls.pop(call, None)
        if not self.is_cut:
            self.world.client.answered(call, outcome, result or OpResult(), error)

    def die(self) -> None:
        """Like SIGKILL: all connections break."""
        if not self.is_alive:
            return
        self.is_alive = False
        for call in self._calls:
            self.world.client.broken(call, "connection reset")
        self._calls.clear()
        self._inbox.clear()
        self._outbox.clear()
        self.died()

    def freeze(self) -> None:
        """Like SIGSTOP."""
        self.is_frozen = True

    def thaw(self) -> None:
        """Like SIGCONT: what piled up is done now, connections in any order."""
        if not self.is_frozen:
            return
        self.is_frozen = False
        outbox, self._outbox = self._outbox, []
        for row in outbox:
            self.answer(*row)
        inbox, self._inbox = self._inbox, []
        self.world.noise.shuffle(inbox)
        for call in inbox:
            self.receive(call)
        self.thawed()

    def handle(self, call: Call) -> None:
        """Carry it out."""
        raise NotImplementedError

    def died(self) -> None:
        """What else the end of the process means."""

    def thawed(self) -> None:
        """What else goes on."""

    def __repr__(self) -> str:
        return self.name
