"""The fakes themselves: as processes behind the real router, and as a fleet in one loop."""

from __future__ import annotations

import asyncio
import signal

import httpx

from protocol.ids import HEADER_ENGINE_ID, Slot
from tests.fakes.processes import RouterProcess
from tests.integration.conftest import EngineProcesses, StartFleet, StartTrainer

_DEADLINE_S = 15.0
_GENERATE = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3}}


def _load_and_admit(url: str, client: httpx.Client, version: int) -> None:
    """A whole update of one engine in transfer mode `none`."""
    me = client.get(f"{url}/identity").json()
    generation = me["generation"] + 1
    info = {"host": "x", "port": 9, "rank_offset": 1, "world_size": 2, "timeout_s": 5}
    update = {"generation": generation, "version": version, "timeout_s": 5}
    wait = {"generation": generation, "stage": "staged", "timeout_s": 5}
    for path, body in (
        ("/init_weight_transfer_engine", {"init_info": {**info, "generation": generation}}),
        ("/await_weight_transfer", {**wait, "stage": "joined"}),
        ("/update_weights", {"update_info": update}),
        ("/await_weight_transfer", wait),
        ("/finish_weight_update", {"generation": generation, "weight_version": str(version)}),
        ("/admit", {"boot_id": me["boot_id"], "version": version, "lease_s": 60}),
    ):
        answer = client.post(f"{url}{path}", json=body)
        assert answer.status_code == 200, f"{path}: {answer.text}"


def test_router_sends_to_admitted_engines(
    router: RouterProcess, engine_processes: EngineProcesses, admin_token: str
) -> None:
    engines = engine_processes([0, 0, 1, 1])
    assert [engine.slot.engine_id for engine in engines] == ["g0e0", "g0e1", "g1e0", "g1e1"]
    headers = {"Authorization": f"Bearer {admin_token}"}
    with httpx.Client(headers=headers, trust_env=False, timeout=_DEADLINE_S) as client:
        for engine in engines[:2]:
            _load_and_admit(engine.url, client, 0)
            client.post(f"{router.url}/add_worker", params={"url": engine.url})
        assert router.workers() == sorted(engine.url for engine in engines[:2])

        answers = [
            client.post(f"{router.url}/inference/v1/generate", json=_GENERATE) for _ in range(4)
        ]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers[HEADER_ENGINE_ID] for answer in answers} <= {"g0e0", "g0e1"}

        engines[0].signal(signal.SIGKILL)
        assert engines[0].process.wait(_DEADLINE_S) == -signal.SIGKILL
        rule = {"at": "/identity", "action": "exit"}
        client.post(f"{engines[1].url}/fault", json={"rules": [rule]})
        try:
            client.get(f"{engines[1].url}/identity")
        except httpx.TransportError:
            assert engines[1].process.wait(_DEADLINE_S) == -signal.SIGKILL
        else:
            raise AssertionError("the engine answered after its death")


async def test_fleet_and_trainer_over_gloo(
    fake_fleet: StartFleet, fake_trainer: StartTrainer, admin_token: str
) -> None:
    """One generation of a trainer and three engines, over the real transfer package."""
    fleet = await fake_fleet([0, 0, 1], transfer="gloo")
    trainer = await fake_trainer(transfer="gloo", num_bytes=4000)
    headers = {"Authorization": f"Bearer {admin_token}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=_DEADLINE_S) as client:

        async def ok(url: str, body: dict[str, object]) -> dict[str, object]:
            answer = await client.post(url, json=body)
            assert answer.status_code == 200, f"{url}: {answer.text}"
            return dict(answer.json())

        opened = await ok(
            f"{trainer.url}/transfer/open", {"generation": 1, "world_size": 4, "timeout_s": 10}
        )
        for rank, slot in enumerate(fleet.slots, start=1):
            info = {**opened, "generation": 1, "rank_offset": rank, "world_size": 4, "timeout_s": 9}
            await ok(f"{fleet.urls[slot]}/init_weight_transfer_engine", {"init_info": info})
        await ok(f"{trainer.url}/transfer/join", {"generation": 1, "timeout_s": 10})
        wait = {"generation": 1, "stage": "joined", "timeout_s": 10}
        update = {"generation": 1, "version": 0, "timeout_s": 10}
        for slot in fleet.slots:
            await ok(f"{fleet.urls[slot]}/await_weight_transfer", wait)
            await ok(f"{fleet.urls[slot]}/update_weights", {"update_info": update})
        sent = await ok(f"{trainer.url}/transfer/send", update)
        for slot in fleet.slots:
            status = await ok(
                f"{fleet.urls[slot]}/await_weight_transfer", {**wait, "stage": "staged"}
            )
            assert (status["state"], status["digest"]) == ("staged", sent["digest"])
        await ok(f"{trainer.url}/finish", {"version": 0, "members": ["g0e0"]})
        assert trainer.status().state == "waiting_batch"


async def test_fleet_kill_and_relaunch(fake_fleet: StartFleet, admin_token: str) -> None:
    fleet = await fake_fleet([0, 1])
    slot = Slot(1, 0)
    headers = {"Authorization": f"Bearer {admin_token}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=_DEADLINE_S) as client:
        before = (await client.get(f"{fleet.urls[slot]}/identity")).json()
        url = fleet.urls[slot]
        fleet.kill(slot)
        try:
            await client.get(f"{url}/identity")
        except httpx.TransportError:
            pass
        else:
            raise AssertionError("a killed engine answered")
        await fleet.relaunch(slot, life=1)
        assert fleet.urls[slot] == url
        after = (await client.get(f"{url}/identity")).json()
        assert (after["life"], after["admission"]) == (1, "closed")
        assert after["boot_id"] != before["boot_id"]


async def test_trainer_steps(fake_trainer: StartTrainer, admin_token: str) -> None:
    from protocol.records import encode_batch
    from tests.fakes.trainer import train_batches

    trainer = await fake_trainer()
    headers = {"Authorization": f"Bearer {admin_token}"}
    async with httpx.AsyncClient(
        base_url=trainer.url, headers=headers, trust_env=False, timeout=_DEADLINE_S
    ) as client:
        batches = train_batches("run")
        for version in range(3):
            await client.post("/finish", json={"version": version, "members": []})
            seq = trainer.status().seq
            watch = asyncio.create_task(client.get("/status", params={"since": seq, "wait_s": 5}))
            answer = await client.post("/batch", content=encode_batch(next(batches)))
            assert answer.status_code == 200
            assert (await watch).json()["seq"] > seq
            while trainer.published != version + 1:
                seq = trainer.status().seq
                await client.get("/status", params={"since": seq, "wait_s": 1})
        assert len(trainer.batches) == 3
        again = await client.post("/batch", content=encode_batch(next(train_batches("run"))))
        assert again.status_code == 409
