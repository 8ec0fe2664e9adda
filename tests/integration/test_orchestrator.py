"""The orchestrator as a process: real router, fake engines, fake trainer, from the first probe to
the closing table."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from protocol.ids import Slot
from tests.fakes.processes import RouterProcess
from tests.helpers.orchestrator_process import GROUPS, orchestrator
from tests.integration.conftest import StartFleet, StartTrainer


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
