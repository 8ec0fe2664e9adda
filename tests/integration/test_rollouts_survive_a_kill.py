"""Rollouts through the real router go on when an engine is killed in the middle of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from orchestrator.rollouts.client import GenerationClient, Outcome
from orchestrator.rollouts.config import RolloutsConfig
from orchestrator.rollouts.env import load_environment
from orchestrator.rollouts.service import RolloutService
from orchestrator.rollouts.staleness import Admissions
from tests.fakes.processes import FakeEngineProcess, RouterProcess, router_process
from tests.helpers.tokenizers import letters_tokenizer
from tests.integration.conftest import RUN_ID, EngineProcesses

_DEADLINE_S = 20.0
_CONFIG = RolloutsConfig(
    prompts_per_step=4,
    group_size=4,
    max_in_flight=16,
    max_off_policy_steps=0,
    max_completion_tokens=8,
    request_timeout_s=5.0,
    rollout_timeout_s=_DEADLINE_S,
)


def load_and_admit(engine: FakeEngineProcess, client: httpx.Client, version: int) -> str:
    """A whole update of one engine in transfer mode `none`; its boot id."""
    me = client.get(f"{engine.url}/identity").json()
    generation = {"generation": me["generation"] + 1}
    info = {"host": "x", "port": 9, "rank_offset": 1, "world_size": 2, "timeout_s": 5}
    wait = {"stage": "staged", "timeout_s": 5, **generation}
    for path, body in (
        ("/init_weight_transfer_engine", {"init_info": {**info, **generation}}),
        ("/await_weight_transfer", {**wait, "stage": "joined"}),
        ("/update_weights", {"update_info": {"version": version, "timeout_s": 5, **generation}}),
        ("/await_weight_transfer", wait),
        ("/finish_weight_update", {"weight_version": str(version), **generation}),
        ("/admit", {"boot_id": me["boot_id"], "version": version, "lease_s": 60}),
    ):
        answer = client.post(f"{engine.url}{path}", json=body)
        assert answer.status_code == 200, f"{path}: {answer.text}"
    return str(me["boot_id"])


def open_all(
    engines: list[FakeEngineProcess], router: RouterProcess, admin_token: str
) -> Admissions:
    """All engines at version 0, admitted, and in the router. The first will fail its second
    request, the second will die of its third, with two others in flight."""
    admissions = Admissions()
    headers = {"Authorization": f"Bearer {admin_token}"}
    with httpx.Client(headers=headers, trust_env=False, timeout=_DEADLINE_S) as admin:
        for engine in engines:
            boot_id = load_and_admit(engine, admin, 0)
            admin.post(f"{router.url}/add_worker", params={"url": engine.url})
            admissions.admit(engine.slot.engine_id, boot_id, 0)
        for engine, action, after in ((engines[0], "error", 1), (engines[1], "exit", 2)):
            rule = {"at": "generate", "action": action, "after": after}
            admin.post(f"{engine.url}/fault", json={"rules": [rule]}).raise_for_status()
    return admissions


@pytest.fixture
def router_without_retries(tmp_path: Path) -> Iterator[RouterProcess]:
    """A real router that leaves trying again to us, so that every failure is seen and counted."""
    with router_process(log_dir=tmp_path, args=["--disable-retries"]) as started:
        yield started


async def test_a_batch_is_completed_by_the_engines_that_are_left(
    router_without_retries: RouterProcess,
    engine_processes: EngineProcesses,
    admin_token: str,
    tmp_path: Path,
) -> None:
    router = router_without_retries
    engines = engine_processes([0, 1], "--tokens-per-s", "20")
    admissions = open_all(engines, router, admin_token)
    outcomes: list[Outcome] = []
    async with GenerationClient(_CONFIG, router.url, on_outcome=outcomes.append) as client:
        service = RolloutService(
            _CONFIG,
            client,
            load_environment(_CONFIG.env, 0),
            letters_tokenizer(tmp_path),
            run_id=RUN_ID,
            admissions=admissions,
        )
        await service.start()
        service.set_dispatch(True)
        try:
            batch, stats = await service.next_batch(0)
        finally:
            await service.stop()
    assert engines[1].process.wait(_DEADLINE_S) == -signal.SIGKILL
    assert len(batch.samples) == 16
    assert stats.rollouts_per_engine == {"g0e0": 16}
    assert stats.num_retried_rollouts >= 4
    assert {sample.min_version for sample in batch.samples} == {0}
    snapshot = service.stats()
    assert snapshot.buffer.consumed == snapshot.buffer.added == snapshot.num_started == 16
    assert client.counts.num_ok == 16
    failed = [outcome for outcome in outcomes if not outcome.ok]
    assert len(failed) == client.counts.num_retryable >= 4
    assert [outcome.status for outcome in failed if outcome.engine_id == "g0e0"] == [500]
    assert all(outcome.engine_id != "g1e0" for outcome in failed)
