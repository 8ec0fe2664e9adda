"""The loop round the core: order, one outcome an op, deadlines, what ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.drivers import runtime as runtime_module
from orchestrator.drivers.admin_http import NoAnswer, Refused
from orchestrator.drivers.journal import (
    SEGMENT_BYTES,
    Header,
    Journal,
    read_segment,
    segments,
)
from orchestrator.drivers.runtime import Drivers, Runtime
from orchestrator.plane.commands import (
    Command,
    Fail,
    Finish,
    Op,
    Pause,
    Probe,
    Relaunch,
    Report,
    Route,
    RouteEntry,
    Send,
)
from orchestrator.plane.core import PlaneCore
from orchestrator.plane.events import (
    BroadcastReady,
    Deadline,
    Event,
    OpFailed,
    OpResult,
    OpSucceeded,
    OpUnknown,
    Restarted,
)
from orchestrator.plane.state import PlaneMemory, PlaneSettings
from protocol.ids import Slot

SLOT = Slot(0, 0)


class ScriptedCore:
    """Answers each event kind with prepared commands; remembers the events."""

    def __init__(self) -> None:
        self.replies: dict[type[Any], list[Command]] = {}
        self.events: list[Event] = []
        self.deadline: float | None = None
        self.pulse = asyncio.Event()

    def handle(self, now: float, event: Event) -> Sequence[Command]:
        self.events.append(event)
        self.pulse.set()
        if isinstance(event, Deadline):
            self.deadline = None
        return self.replies.pop(type(event), [])

    def next_deadline(self) -> float | None:
        return self.deadline

    def memory(self) -> PlaneMemory:
        core = PlaneCore(PlaneSettings(), ["http://a"], [0], 0.0)
        core.handle(0.0, Deadline())
        return core.memory()


class Hands:
    """All drivers in one: carries out what a test says, remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.act: Callable[[Op], Awaitable[OpResult]] = self._succeed

    async def _succeed(self, op: Op) -> OpResult:
        return OpResult(num_bytes=op.op_id)

    async def run(self, op: Op) -> OpResult:
        self.told.append(op)
        return await self.act(op)

    def watch(self, command: Probe) -> None:
        self.told.append(command)

    def serve(self, entries: tuple[RouteEntry, ...]) -> None:
        self.told.append(("serve", entries))

    def want(self, urls: Any) -> None:
        self.told.append(("want", list(urls)))

    def wish(self, command: Relaunch) -> None:
        self.told.append(command)


class Bench:
    """A runtime over a scripted core."""

    def __init__(
        self, path: Path, has_router: bool = True, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.core = ScriptedCore()
        self.engines, self.trainer, self.others = Hands(), Hands(), Hands()
        self.notices: list[Any] = []
        self.path = path / "journal.jsonl"
        self.journal = Journal(self.path, time.time, segment_bytes=segment_bytes)
        self.journal.begin(Header("run", 0, PlaneSettings(), (), (), 0.0))
        self.runtime = Runtime(
            cast(PlaneCore, self.core), self.journal, time.monotonic, self.notices.append
        )
        others: Any = self.others
        outside = others if has_router else None
        engines: Any = self.engines
        trainer: Any = self.trainer
        self.drivers = Drivers(engines, others, trainer, outside, outside)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()[1:]]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(5.0):
            while not holds():
                self.core.pulse.clear()
                await self.core.pulse.wait()

    def ended(self) -> list[Any]:
        kinds = OpSucceeded | OpFailed | OpUnknown
        return [event for event in self.core.events if isinstance(event, kinds)]

    def ask(self, *commands: Command) -> None:
        """The core will command these on the next event, which comes now."""
        self.core.replies[BroadcastReady] = list(commands)
        self.runtime.post(BroadcastReady(0, "t"))


@contextlib.asynccontextmanager
async def at_work(bench: Bench) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(bench.runtime.run(bench.drivers))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        bench.journal.close()


def pause(op_id: int = 7, timeout_s: float = 5.0) -> Pause:
    return Pause(op_id, time.monotonic() + timeout_s, "r", SLOT)


async def test_starts_with_a_deadline_and_then_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with at_work(bench):
        await bench.until(lambda: len(bench.core.events) == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert bench.core.events == [Deadline()]
    assert [line["event"] for line in bench.lines()] == [{"type": "Deadline"}]


async def test_what_it_starts_with_may_be_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    task = asyncio.create_task(bench.runtime.run(bench.drivers, Restarted()))
    await bench.until(lambda: len(bench.core.events) == 1)
    task.cancel()
    await asyncio.wait([task])
    bench.journal.close()
    assert bench.core.events == [Restarted()]


async def test_a_full_segment_is_followed_by_one_that_knows_everything(tmp_path: Path) -> None:
    bench = Bench(tmp_path, segment_bytes=1)
    async with at_work(bench):
        bench.ask(pause())
        await bench.until(lambda: len(bench.ended()) == 1)
    files = segments(tmp_path)
    read = [read_segment(path) for path in files]
    memories = [header.memory for header, _ in read]
    assert memories == [None] + [bench.core.memory()] * (len(files) - 1)
    events = [line.event for _, lines in read for line in lines]
    assert events == bench.core.events


async def test_a_deadline_comes_when_it_is_due_and_only_then(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with at_work(bench):
        await bench.until(lambda: len(bench.core.events) == 1)
        bench.core.deadline = time.monotonic() + 0.02
        bench.runtime.post(BroadcastReady(0, "t"))
        await bench.until(lambda: len(bench.core.events) == 3)
    assert bench.core.events[1:] == [BroadcastReady(0, "t"), Deadline()]


async def test_commands_reach_their_drivers(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    entry = RouteEntry(SLOT, "http://a", "b", 1)
    probe, relaunch = Probe(SLOT, "http://a", 0), Relaunch(0, 0, "r")
    route, report = Route((entry,), "r"), Report(0, "starting", "candidate", "", "")
    finish = Finish(8, time.monotonic() + 5, "r", 1, ())
    fail = Fail("why")
    async with at_work(bench):
        bench.ask(probe, route, relaunch, report, fail, pause(7), finish)
        await bench.until(lambda: len(bench.ended()) == 2)
    assert bench.others.told == [probe, ("serve", (entry,)), ("want", ["http://a"]), relaunch]
    assert bench.notices == [route, report, fail]
    assert [op.op_id for op in bench.engines.told] == [7]
    assert bench.trainer.told == [finish]
    assert bench.ended() == [
        OpSucceeded(7, OpResult(num_bytes=7)),
        OpSucceeded(8, OpResult(num_bytes=8)),
    ]


async def test_without_router_and_launcher(tmp_path: Path) -> None:
    bench = Bench(tmp_path, has_router=False)
    async with at_work(bench):
        bench.ask(Route((), "r"), Relaunch(0, 0, "r"), pause())
        await bench.until(lambda: len(bench.ended()) == 1)
    assert bench.others.told == [("serve", ())]
    assert bench.notices == [Route((), "r")]


async def test_the_journal_is_written_before_anything_is_done(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    seen: list[int] = []

    async def look(op: Op) -> OpResult:
        seen.append(len(bench.lines()))
        return OpResult()

    bench.engines.act = look
    async with at_work(bench):
        bench.ask(pause())
        await bench.until(lambda: len(bench.ended()) == 1)
    assert seen == [2]
    types = [line["event"]["type"] for line in bench.lines()]
    assert types == ["Deadline", "BroadcastReady", "OpSucceeded"]


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (Refused(409, "foreign boot"), OpFailed(7, "HTTP 409: foreign boot")),
        (NoAnswer("reset"), OpUnknown(7, "reset")),
        (TimeoutError(), OpUnknown(7, "no answer by the deadline")),
    ],
)
async def test_outcomes(tmp_path: Path, error: Exception, event: Event) -> None:
    bench = Bench(tmp_path)

    async def fail(op: Op) -> OpResult:
        raise error

    bench.engines.act = fail
    async with at_work(bench):
        bench.ask(pause())
        await bench.until(lambda: len(bench.ended()) == 1)
    assert bench.ended() == [event]


async def test_a_driver_that_hangs_past_the_deadline_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "_GRACE_S", 0.01)
    bench = Bench(tmp_path)

    async def hang(op: Op) -> OpResult:
        await asyncio.Event().wait()
        raise AssertionError

    bench.trainer.act = hang
    async with at_work(bench):
        bench.ask(Send(9, time.monotonic() + 0.02, "r", 1, 1), pause(10, timeout_s=-1.0))
        await bench.until(lambda: len(bench.ended()) == 2)
    assert {event.op_id for event in bench.ended()} == {9, 10}
    assert OpUnknown(9, "no answer by the deadline") in bench.ended()


async def test_a_programming_error_in_a_driver_ends_the_loop(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def broken(op: Op) -> OpResult:
        raise ZeroDivisionError

    bench.engines.act = broken
    async with at_work(bench) as task:
        bench.ask(pause())
        with pytest.raises(ZeroDivisionError):
            async with asyncio.timeout(5.0):
                await asyncio.shield(task)
    assert bench.ended() == []


async def test_the_end_of_the_loop_is_the_end_of_its_ops(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    ends: list[str] = []
    started = asyncio.Event()

    async def hang(op: Op) -> OpResult:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")
        raise AssertionError

    bench.engines.act = hang
    async with at_work(bench):
        bench.ask(pause())
        async with asyncio.timeout(5.0):
            await started.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert ends == ["cancelled"]
