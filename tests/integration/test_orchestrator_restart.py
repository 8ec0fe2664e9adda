"""SIGKILL of the orchestrator in each phase of an update, and in each moment of a step.

One run, one orchestrator after the other in the same directory: real router, fake engines (a
process each), fake trainer. Each phase is held by a fault of an engine or of the trainer, so that
the kill comes in it; some of what is held is done later, when nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.fake_faults import FaultRule
from orchestrator.drivers.journal import segments
from orchestrator.recovery import Past, recover
from orchestrator.replay import replay
from tests.fakes.processes import FakeEngineProcess, RouterProcess, free_port
from tests.fakes.trainer import FakeTrainer
from tests.helpers.orchestrator_process import (
    GROUPS,
    RUN_ID,
    Orchestrator,
    commands_in,
    journal_lines,
    orchestrator,
)
from tests.helpers.polling import until
from tests.integration.conftest import EngineProcesses, StartTrainer

_HEADERS = {"Authorization": "Bearer secret"}
_LATE_S = 2.5  # longer than a restart takes: carried out when the next one is at work


@dataclass(frozen=True)
class Hold:
    """What stands still, and what shows it: `engine` None is the trainer. `is_new`: the last engine
    restarts first, so that the membership changes."""

    phase: str
    engine: int | None
    at: str
    action: str = "hang"
    is_new: bool = False


# In the phases up to the pause v is served again, and v + 1 is loaded once; a commit without an
# outcome is done again; from the verification on nothing is loaded again.
HOLDS = {
    "open": Hold("open", None, "/transfer/open", "slow", is_new=True),
    "join": Hold("join", 0, "join", "slow", is_new=True),
    "stage": Hold("stage", 1, "stage", "slow"),
    "send": Hold("stage", None, "send"),
    "abort": Hold("abort", None, "/transfer/abort"),
    "pause": Hold("pause", 0, "/pause", "slow"),
    "commit": Hold("commit", 1, "/finish_weight_update", "slow"),
    "load": Hold("commit", 2, "load", "slow"),
    "verify": Hold("verify", 0, "/weight_version"),
    "admit": Hold("admit", 3, "/admit", is_new=True),
    "resume": Hold("resume", 2, "/resume"),
    "finish": Hold("finish", None, "/finish"),
}
_NUM_LOADS = {"verify": 0, "admit": 0, "resume": 0, "finish": 0}


@dataclass
class Bench:
    """The run as a test sees it."""

    engines: list[FakeEngineProcess]
    trainer: FakeTrainer
    client: httpx.AsyncClient
    served: set[tuple[str, str, int]] = field(default_factory=set)

    async def order(self, engine: int, **order: Any) -> dict[str, int]:
        """Change an engine's faults; how often each has fired."""
        answer = await self.client.post(f"{self.engines[engine].url}/fault", json=order)
        answer.raise_for_status()
        fired: dict[str, int] = answer.json()["fired"]
        return fired

    async def hold(self, hold: Hold) -> None:
        """Set the fault."""
        if hold.phase == "abort":
            self.trainer.plan.add(FaultRule(at="send", action="error"))
        rule = FaultRule(at=hold.at, action=hold.action, delay_s=_LATE_S, times=0)  # type: ignore[arg-type]
        if hold.engine is None:
            self.trainer.plan.add(rule)
        else:
            is_new = hold.is_new and hold.engine == len(self.engines) - 1
            await self.order(hold.engine, rules=[rule.model_dump()], restart=is_new)
        if hold.is_new and hold.engine != len(self.engines) - 1:
            await self.order(len(self.engines) - 1, restart=True)

    async def release(self, hold: Hold) -> None:
        """Undo the fault."""
        if hold.engine is None:
            self.trainer.plan.clear()
        else:
            await self.order(hold.engine, clear=True)

    async def num_fired(self, hold: Hold) -> int:
        """How often the fault has hit."""
        if hold.engine is None:
            return self.trainer.plan.fired.get(hold.at, 0)
        return (await self.order(hold.engine)).get(hold.at, 0)

    async def watch(self) -> None:
        """Ask every engine for tokens all the time, like somebody who does not know the plane."""
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}

        async def ask(engine: FakeEngineProcess) -> None:
            while True:
                with contextlib.suppress(httpx.TimeoutException):
                    url = f"{engine.url}/inference/v1/generate"
                    answer = await self.client.post(url, json=body, timeout=1.0)
                    if answer.status_code == 200:
                        who = answer.headers["X-Engine-Id"], answer.headers["X-Boot-Id"]
                        for span in answer.json()["choices"][0]["weight_versions"]:
                            self.served.add((*who, int(span["version"])))
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as group:
            for engine in self.engines:
                group.create_task(ask(engine))


@contextlib.asynccontextmanager
async def bench_of(engines: list[FakeEngineProcess], trainer: FakeTrainer) -> AsyncIterator[Bench]:
    async with httpx.AsyncClient(headers=_HEADERS, trust_env=False, timeout=5.0) as client:
        bench = Bench(engines, trainer, client)
        task = asyncio.create_task(bench.watch())
        try:
            yield bench
            assert not task.done(), task
        finally:
            task.cancel()
            await asyncio.wait([task])


async def kill(run: Orchestrator) -> None:
    """SIGKILL."""
    run.process.kill()
    await run.process.communicate()


def past_of(directory: Path) -> Past:
    past = recover(directory, RUN_ID)
    assert past is not None
    assert past.problem == ""
    return past


def newest(directory: Path, kind: str) -> list[dict[str, Any]]:
    """Commands of this kind since the last start."""
    lines = journal_lines(directory)
    starts = [i for i, line in enumerate(lines) if line["event"]["type"] == "Restarted"]
    return commands_in(lines[starts[-1] :] if starts else lines, kind)


async def finished(run: Orchestrator, version: int) -> None:
    """Until an update to this version, or a return at it, has ended."""
    await run.until(
        lambda: any(
            (ended["version"], ended["outcome"]) == (version, "finished")
            for ended in newest(run.directory, "UpdateEnded")
        )
    )


Start = Callable[[Bench], contextlib.AbstractAsyncContextManager[Orchestrator]]


@pytest.fixture
def start(router: RouterProcess, tmp_path: Path) -> Start:
    """Start an orchestrator, always in the same place. Its port is chosen when all others listen:
    chosen before, it may be one that an engine gets."""
    port = 0

    def started(bench: Bench) -> contextlib.AbstractAsyncContextManager[Orchestrator]:
        nonlocal port
        port = port or free_port()
        urls = [engine.url for engine in bench.engines]
        return orchestrator(
            tmp_path, urls, bench.trainer.url, router.url, port, max_steps=1000,
            groups={"startup_wait_s": 5.0, "lease_s": 4.0},
        )  # fmt: skip

    return started


def check_whole(bench: Bench, directory: Path) -> None:
    """What must be true of the whole run, all orchestrators together."""
    lines = journal_lines(directory)
    admitted = {
        (f"g{e['slot']['group']}e{e['slot']['index']}", e["boot_id"], e["version"])
        for command in commands_in(lines, "Route")
        for e in command["entries"]
    }
    assert len(bench.served) > 20
    assert bench.served <= admitted
    batches = bench.trainer.batches
    assert [batch.step for batch in batches] == list(range(len(batches)))
    ids = [sample.rollout_id for batch in batches for sample in batch.samples]
    assert len(set(ids)) == len(ids)
    generations = [command["generation"] for command in commands_in(lines, "Open")]
    assert generations == sorted(set(generations))
    story = replay(segments(directory))
    assert story.divergence is None


@pytest.mark.timeout(240)
async def test_killed_in_each_phase_of_an_update(
    engine_processes: EngineProcesses,
    fake_trainer: StartTrainer,
    start: Start,
    tmp_path: Path,
) -> None:
    engines = engine_processes(GROUPS, "--tokens-per-s", "2000")
    trainer = await fake_trainer(step_s=0.05)
    async with bench_of(engines, trainer) as bench:
        for name, hold in HOLDS.items():
            async with start(bench) as run:
                await run.until(lambda: len(newest(tmp_path, "UpdateEnded")) >= 3)
                num_fired = await bench.num_fired(hold)
                await bench.hold(hold)

                async def is_held(hold: Hold = hold, before: int = num_fired) -> bool:
                    memory = past_of(tmp_path).memory
                    is_there = memory.update is not None and memory.update.phase == hold.phase
                    return is_there and await bench.num_fired(hold) > before

                await until(is_held, what=name)
                await kill(run)
            await bench.release(hold)
            memory = past_of(tmp_path).memory
            assert memory.update is not None, name
            assert memory.update.phase == hold.phase
            version = memory.update.version
            async with start(bench) as run:
                await finished(run, version)
                loads = [
                    command["slot"]["group"]
                    for command in newest(tmp_path, "Commit")
                    if command["version"] == version
                ]
                for group in memory.update.targets:
                    num_loads = _NUM_LOADS.get(name, 1) * GROUPS.count(group)
                    assert loads.count(group) == num_loads, name
                await finished(run, version + 1)
                await run.until(lambda: len(newest(tmp_path, "Route")[-1]["entries"]) == 4)
                assert newest(tmp_path, "Route")[0]["entries"] == []
                run.process.send_signal(signal.SIGTERM)
                code, output = await run.end()
                assert code == 128 + signal.SIGTERM, output
    check_whole(bench, tmp_path)


@pytest.mark.timeout(120)
async def test_killed_in_each_moment_of_a_step(
    engine_processes: EngineProcesses,
    fake_trainer: StartTrainer,
    start: Start,
    tmp_path: Path,
) -> None:
    """The batch on its way, taken but not trained, and nothing at all in flight."""
    engines = engine_processes(GROUPS, "--tokens-per-s", "2000")
    trainer = await fake_trainer(step_s=0.05)
    moments = [
        FaultRule(at="/batch", action="slow", delay_s=0.2),
        FaultRule(at="/batch", action="slow", delay_s=_LATE_S),
        FaultRule(at="/batch", action="hang"),
        FaultRule(at="train", action="slow", delay_s=0.2),
        FaultRule(at="train", action="slow", delay_s=_LATE_S),
    ]
    async with bench_of(engines, trainer) as bench:
        for rule in moments:
            async with start(bench) as run:
                await run.until(lambda: len(newest(tmp_path, "UpdateEnded")) >= 3)
                before = trainer.plan.fired.get(rule.at, 0)
                trainer.plan.add(rule)

                async def is_hit(rule: FaultRule = rule, before: int = before) -> bool:
                    return trainer.plan.fired.get(rule.at, 0) > before

                await until(is_hit, what=rule.at)
                await kill(run)
            memory = past_of(tmp_path).memory
            version = memory.policy_version
            assert version is not None
            async with start(bench) as run:
                await finished(run, version + 2)
                loads = [c["version"] for c in newest(tmp_path, "Commit")]
                assert loads.count(version) == 0
                assert loads.count(version + 1) == len(engines)
                assert newest(tmp_path, "Open") == []  # the transfer group is what it was
                await kill(run)
    check_whole(bench, tmp_path)


async def test_a_trainer_that_went_back_ends_the_run(
    engine_processes: EngineProcesses,
    fake_trainer: StartTrainer,
    start: Start,
    tmp_path: Path,
) -> None:
    engines = engine_processes(GROUPS)
    async with bench_of(engines, await fake_trainer(step_s=0.05)) as bench:
        async with start(bench) as run:
            await run.until(lambda: len(newest(tmp_path, "UpdateEnded")) >= 3)
            await kill(run)
        bench.trainer = await fake_trainer()
        async with start(bench) as run:
            code, output = await run.end()
    assert code == 1
    assert "the trainer wants the batch of step 0, but version" in " ".join(output.split())


async def test_a_second_orchestrator_is_refused(
    engine_processes: EngineProcesses,
    fake_trainer: StartTrainer,
    start: Start,
    tmp_path: Path,
) -> None:
    engines = engine_processes(GROUPS)
    trainer = await fake_trainer(step_s=0.05)
    async with bench_of(engines, trainer) as bench, start(bench) as run:
        await run.until(lambda: len(newest(tmp_path, "UpdateEnded")) >= 1)
        async with start(bench) as second:
            code, output = await second.end()
        assert code == 1
        assert f"belongs to an orchestrator, pid {run.process.pid}" in " ".join(output.split())
        num_ended = len(newest(tmp_path, "UpdateEnded"))
        await run.until(lambda: len(newest(tmp_path, "UpdateEnded")) > num_ended)
        os.kill(run.process.pid, signal.SIGTERM)
        assert (await run.end())[0] == 128 + signal.SIGTERM
