"""The orchestrator as a process: real router, fake engines, fake trainer, from the first probe to
the closing table."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.ids import Slot
from tests.fakes.processes import RouterProcess, free_port
from tests.helpers.tokenizers import letters_tokenizer
from tests.integration.conftest import RUN_ID, StartFleet, StartTrainer

GROUPS = [0, 0, 1, 1]
_DEADLINE_S = 40.0


class Orchestrator:
    """A running `muster orchestrator`."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path, url: str) -> None:
        self.process = process
        self.directory = directory
        self.url = url

    def commands(self, kind: str) -> list[dict[str, Any]]:
        """Commands of this type in the journal so far."""
        path = self.directory / "journal.jsonl"
        if not path.exists():
            return []
        lines = path.read_bytes().split(b"\n")[:-1]
        found = [json.loads(line)["commands"] for line in lines]
        return [command for commands in found for command in commands if command["type"] == kind]

    async def until(self, is_met: Callable[[], bool]) -> None:
        """Poll until the condition holds."""
        async with asyncio.timeout(_DEADLINE_S):
            while not is_met():
                assert self.process.returncode is None
                await asyncio.sleep(0.02)

    async def end(self) -> tuple[int, str]:
        """Exit code and everything it printed on stdout."""
        async with asyncio.timeout(_DEADLINE_S):
            output, _ = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, output.decode()


@contextlib.asynccontextmanager
async def orchestrator(
    directory: Path, urls: list[str], trainer_url: str, router_url: str | None, **settings: Any
) -> AsyncIterator[Orchestrator]:
    """Start it; kill it when the test leaves early."""
    letters_tokenizer(directory)
    port = free_port()
    config = {
        "run_id": RUN_ID,
        "output_dir": str(directory),
        "port": port,
        "trainer_url": trainer_url,
        "model": {
            "path": str(directory),
            "client": {
                **({"base_url": router_url} if router_url else {"router": "none"}),
                "admin_base_url": urls,
                "admin_engine_groups": GROUPS,
            },
        },
        "probe": {"interval_s": 0.2, "timeout_s": 0.2, "retry_s": 0.05},
        "rollouts": {"prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 8},
        "wandb": {"mode": "disabled"},
        **settings,
    }
    path = directory / "orchestrator.json"
    path.write_text(json.dumps(config))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "launch.cli", "orchestrator", "@", str(path)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "MUSTER_ADMIN_TOKEN": "secret"},
    )
    try:
        yield Orchestrator(process, directory, f"http://127.0.0.1:{port}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_it_runs_to_the_last_step(
    fake_fleet: StartFleet, fake_trainer: StartTrainer, router: RouterProcess, tmp_path: Path
) -> None:
    fleet = await fake_fleet(GROUPS, tokens_per_s=2000.0)
    trainer = await fake_trainer()
    urls = [fleet.urls[slot] for slot in fleet.slots]
    async with orchestrator(tmp_path, urls, trainer.url, router.url, max_steps=6) as run:
        code, output = await run.end()
    assert code == 0, output
    assert "finished" in output
    assert [batch.step for batch in trainer.batches] == list(range(6))
    for batch in trainer.batches:
        assert len(batch.samples) == 8
        assert all(batch.step - 1 <= sample.min_version <= batch.step for sample in batch.samples)
    consumed = [sample.rollout_id for batch in trainer.batches for sample in batch.samples]
    assert len(set(consumed)) == len(consumed)
    ended = run.commands("UpdateEnded")
    assert [(e["version"], e["outcome"]) for e in ended] == [(v, "finished") for v in range(7)]
    assert {e["generation"] for e in ended} == {1}


async def test_without_a_router_requests_go_to_the_engines_that_serve(
    fake_fleet: StartFleet, fake_trainer: StartTrainer, tmp_path: Path
) -> None:
    fleet = await fake_fleet(GROUPS, tokens_per_s=2000.0)
    trainer = await fake_trainer()
    urls = [fleet.urls[slot] for slot in fleet.slots]
    async with orchestrator(tmp_path, urls, trainer.url, None, max_steps=12) as run:
        await run.until(lambda: len(trainer.batches) >= 3)
        fleet.kill(Slot(1, 1))
        code, output = await run.end()
    assert code == 0, output
    assert [batch.step for batch in trainer.batches] == list(range(12))
    assert all(engine.core.generated_tokens > 0 for engine in fleet.engines.values())


async def test_sigterm_ends_it_in_order(
    fake_fleet: StartFleet, fake_trainer: StartTrainer, router: RouterProcess, tmp_path: Path
) -> None:
    fleet = await fake_fleet(GROUPS, tokens_per_s=2000.0)
    trainer = await fake_trainer(step_s=0.1)
    urls = [fleet.urls[slot] for slot in fleet.slots]
    async with orchestrator(tmp_path, urls, trainer.url, router.url, max_steps=1000) as run:
        await run.until(lambda: len(run.commands("UpdateEnded")) >= 3)
        headers = {"Authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=run.url, trust_env=False) as client:
            assert (await client.get("/status")).status_code == 401
            status = (await client.get("/status", headers=headers)).json()
        assert [group["state"] for group in status["groups"]] == ["admitted", "admitted"]
        run.process.send_signal(signal.SIGTERM)
        code, output = await run.end()
    assert code == 128 + signal.SIGTERM
    assert "interrupted" in output
    assert "Traceback" not in output


async def test_a_fleet_that_is_gone_ends_it_with_a_table_of_causes(
    fake_fleet: StartFleet, fake_trainer: StartTrainer, router: RouterProcess, tmp_path: Path
) -> None:
    fleet = await fake_fleet(GROUPS, tokens_per_s=2000.0)
    trainer = await fake_trainer(step_s=0.1)
    urls = [fleet.urls[slot] for slot in fleet.slots]
    limits = {"no_capacity_timeout_s": 1.0}
    async with orchestrator(
        tmp_path, urls, trainer.url, router.url, max_steps=1000, groups=limits
    ) as run:
        await run.until(lambda: len(run.commands("UpdateEnded")) >= 3)
        for slot in (Slot(0, 1), Slot(1, 0)):
            fleet.kill(slot)
        code, output = await run.end()
    assert code == 1
    assert "no capacity: fewer than 1 groups have served for 1 s" in output
    assert "g0  evicted" in output
    assert "g1  evicted" in output


@pytest.mark.parametrize("module", ["torch", "vllm", "ray"])
def test_the_orchestrator_does_not_load(module: str) -> None:
    code = f"import sys, orchestrator.main; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
