"""Virtual time: one event heap, no clock, no threads.

Two kinds of events. `at`: the world (an engine loads weights, a packet arrives). `ours` and `timer`:
callbacks of the orchestrator's own loop; they wait while that loop stalls, so deadlines fire late
and what piled up is handled in one go, as after a long garbage collection or a jump of the clock.
"""  # noqa: E501

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

_WORLD, _OURS, _TIMER = 0, 1, 2
# Puts timers before everything else that waits for the end of a stall.
_FIRST = 1 << 40


class Loop:
    """`step` runs the next event. Ties are broken by the order in which they were scheduled."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.busy_until = now
        self.num_steps = 0
        self._timers_first = False
        self._num = 0
        self._heap: list[tuple[float, int, int, Callable[..., Any], tuple[Any, ...]]] = []

    def at(self, when: float, action: Callable[..., Any], *args: Any) -> None:
        """Something happens in the world."""
        self._num += 1
        heapq.heappush(self._heap, (when, self._num, _WORLD, action, args))

    def ours(self, when: float, action: Callable[..., Any], *args: Any) -> None:
        """A callback of the orchestrator."""
        self._num += 1
        heapq.heappush(self._heap, (when, self._num, _OURS, action, args))

    def timer(self, when: float, action: Callable[..., Any], *args: Any) -> None:
        """A callback of the orchestrator that ends a wait."""
        self._num += 1
        heapq.heappush(self._heap, (when, self._num, _TIMER, action, args))

    def stall(self, until: float, *, timers_first: bool) -> None:
        """The orchestrator's loop does nothing until then."""
        self.busy_until = max(self.busy_until, until)
        self._timers_first = timers_first

    def kill(self) -> None:
        """The orchestrator's process ends: its callbacks never come."""
        self._heap = [entry for entry in self._heap if entry[2] == _WORLD]
        heapq.heapify(self._heap)
        self.busy_until = self.now

    def next_at(self) -> float:
        """When the next event is; infinity when there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def is_burst(self) -> bool:
        """Whether more callbacks of the orchestrator are due at this very moment."""
        heap = self._heap
        return bool(heap) and heap[0][0] <= self.now and heap[0][2] != _WORLD

    def step(self) -> None:
        """Run the next event."""
        when, _, kind, action, args = heapq.heappop(self._heap)
        if kind != _WORLD and when < self.busy_until:
            self._num += 1
            order = self._num - _FIRST if kind == _TIMER and self._timers_first else self._num
            heapq.heappush(self._heap, (self.busy_until, order, kind, action, args))
            return
        self.now = max(self.now, when)
        self.num_steps += 1
        action(*args)
