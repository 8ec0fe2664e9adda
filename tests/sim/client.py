"""The orchestrator's end of every call: what `drivers/runtime.py` and `drivers/engines.py` do.

Each op gets exactly one terminal event, at its deadline at the latest (plus the runtime's grace when
the driver itself is late). What was sent may still be carried out after that.
"""  # noqa: E501

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrator.plane.commands import Admit, Fence, Join, Op, Send, Stage
from orchestrator.plane.events import OpFailed, OpResult, OpSucceeded, OpUnknown
from protocol.ids import Slot
from tests.sim.server import Call, Server

if TYPE_CHECKING:
    from tests.sim.world import World

GRACE_S = 1.0
_SERVER_SHARE = 0.9
_MAX_MARGIN_S = 2.0


class Gates:
    """One call at a time per slot: a fence never overtakes a renewal that is on its way."""

    def __init__(self) -> None:
        self._waiting: dict[Slot, deque[Callable[[], None]]] = {}
        self._held: set[Slot] = set()

    def acquire(self, slot: Slot, then: Callable[[], None]) -> None:
        """Call `then` once the slot is free."""
        if slot in self._held:
            self._waiting.setdefault(slot, deque()).append(then)
        else:
            self._held.add(slot)
            then()

    def release(self, slot: Slot) -> None:
        """The next one."""
        waiting = self._waiting.get(slot)
        if waiting:
            waiting.popleft()()
        else:
            self._held.discard(slot)


class Client:
    """Carries out ops. A new one begins with each life of the orchestrator."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.gates = Gates()
        self.arrived_by = 0.0
        self._open: dict[Call, None] = {}

    @property
    def num_open(self) -> int:
        """Ops without a terminal event."""
        return len(self._open)

    def open_calls(self) -> list[Call]:
        """Those ops."""
        return list(self._open)

    def start(self, op: Op) -> None:
        """Begin `op`; its terminal event is posted later."""
        world = self.world
        call = Call(op, *world.faults.hit(op))
        self._open[call] = None
        is_late = world.noise.random() < 0.1
        world.loop.timer(op.deadline + (GRACE_S if is_late else 0.0), self._time_is_over, call)
        if isinstance(op, Admit | Fence):
            self.gates.acquire(op.slot, lambda: self._send_gated(call, op.slot))
        else:
            self._send(call)

    def close(self) -> None:
        """The process of the orchestrator ended: nobody waits any more."""
        for call in self._open:
            call.is_done = True
        self._open.clear()

    def _send_gated(self, call: Call, slot: Slot) -> None:
        if call.is_done:  # it waited for the gate until its deadline
            self.gates.release(slot)
            return
        call.holds_gate = True
        self._send(call)

    def _send(self, call: Call) -> None:
        world = self.world
        now, op = world.loop.now, call.op
        left = op.deadline - now
        if left <= 0.0:
            world.loop.ours(now, self._ended, call, OpUnknown(op.op_id, "no time left"))
            return
        slot: Slot | None = getattr(op, "slot", None)
        server: Server | None
        if slot is None:
            server, share = world.trainer, left * _SERVER_SHARE
        else:
            server = world.at_url.get(world.core.url_of(slot))
            share = max(left * _SERVER_SHARE, left - _MAX_MARGIN_S, 0.01)
        call.server = server
        call.wait_until = now + share if isinstance(op, Join | Stage | Send) else now
        if call.fault == "lost_request":
            return
        wait_s = world.latency() + (call.delay_s if call.fault == "slow" else 0.0)
        self.arrived_by = max(self.arrived_by, now + wait_s)
        if server is None:
            world.loop.at(now + wait_s, self.broken, call, "connection refused")
        else:
            world.loop.at(now + wait_s + server.slow_s, server.receive, call)

    def answered(self, call: Call, outcome: str, result: OpResult, error: str) -> None:
        """The server's answer is on its way."""
        if call.is_done:
            return
        op_id = call.op.op_id
        event: OpSucceeded | OpFailed | OpUnknown
        if call.fault == "lost_reply":
            event = OpUnknown(op_id, "connection broke before the answer")
        elif outcome == "succeeded":
            event = OpSucceeded(op_id, result)
        else:
            event = OpFailed(op_id, f"HTTP 409: {error}")
        world = self.world
        slow_s = call.server.slow_s if call.server is not None else 0.0
        world.loop.ours(world.loop.now + world.latency() + slow_s, self._ended, call, event)

    def broken(self, call: Call, error: str) -> None:
        """The connection broke, or there was none."""
        if not call.is_done:
            event = OpUnknown(call.op.op_id, error)
            now = self.world.loop.now
            self.world.loop.ours(now + self.world.latency(), self._ended, call, event)

    def _time_is_over(self, call: Call) -> None:
        self._ended(call, OpUnknown(call.op.op_id, "no answer by the deadline"))

    def _ended(self, call: Call, event: OpSucceeded | OpFailed | OpUnknown) -> None:
        world = self.world
        if call.is_done:
            return
        call.is_done = True
        del self._open[call]
        if call.holds_gate:
            assert isinstance(call.op, Admit | Fence)
            self.gates.release(call.op.slot)
        world.post(event)
        if call.fault == "dup_reply":
            world.loop.ours(world.loop.now + world.noise.uniform(0.0, 0.5), world.post, event)
