"""The fault table, and what each action looks like to a client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.fake_faults import FaultPlan, FaultRule
from engine.fake_fleet import FakeFleet
from protocol.ids import Slot

_SLOT = Slot(0, 0)


def test_rule_fires_on_the_chosen_hits_only() -> None:
    plan = FaultPlan((FaultRule(at="join", action="error", after=1, times=2),))
    assert [plan.hit("join") is not None for _ in range(5)] == [False, True, True, False, False]
    assert plan.hit("stage") is None
    assert plan.fired == {"join": 2}


def test_times_zero_fires_always_and_clear_ends_it() -> None:
    plan = FaultPlan((FaultRule(at="/pause", action="hang", times=0),), lie_version=3)
    assert all(plan.hit("/pause") for _ in range(3))
    plan.clear()
    assert plan.hit("/pause") is None
    assert plan.lie_version is None
    assert plan.fired == {"/pause": 3}


def test_first_due_rule_wins_and_every_rule_counts() -> None:
    slow, error = FaultRule(at="a", action="slow"), FaultRule(at="a", action="error", times=2)
    plan = FaultPlan((slow, error))
    assert [plan.hit("a"), plan.hit("a"), plan.hit("a")] == [slow, error, None]


@contextlib.asynccontextmanager
async def _engine() -> AsyncIterator[tuple[FakeFleet, httpx.AsyncClient]]:
    async with FakeFleet([_SLOT]) as fleet:
        client = httpx.AsyncClient(
            base_url=fleet.urls[_SLOT],
            headers={"Authorization": "Bearer secret"},
            trust_env=False,
            timeout=5.0,
        )
        async with client:
            yield fleet, client


def _fault(**order: Any) -> dict[str, Any]:
    return {"url": "/fault", "json": order}


async def _load(client: httpx.AsyncClient, version: int, generation: int) -> httpx.Response:
    info = {"host": "x", "port": 9, "rank_offset": 1, "world_size": 2, "timeout_s": 5}
    body = {"init_info": {**info, "generation": generation}}
    await client.post("/init_weight_transfer_engine", json=body)
    wait = {"generation": generation, "stage": "joined", "timeout_s": 5}
    await client.post("/await_weight_transfer", json=wait)
    update = {"generation": generation, "version": version, "timeout_s": 5}
    await client.post("/update_weights", json={"update_info": update})
    await client.post("/await_weight_transfer", json={**wait, "stage": "staged"})
    finish = {"generation": generation, "weight_version": str(version)}
    return await client.post("/finish_weight_update", json=finish)


@pytest.mark.parametrize(("action", "status"), [("error", 500), ("conflict", 409)])
async def test_refusals_do_nothing(action: str, status: int) -> None:
    async with _engine() as (_, client):
        await client.post(**_fault(rules=[{"at": "/pause", "action": action}]))
        assert (await client.post("/pause?mode=keep")).status_code == status
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        assert (await client.post("/pause?mode=keep")).status_code == 200


async def test_dropped_reply_is_done_all_the_same() -> None:
    async with _engine() as (_, client):
        await client.post(**_fault(rules=[{"at": "/pause", "action": "drop_reply"}]))
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/pause?mode=keep")
        assert (await client.get("/is_paused")).json() == {"is_paused": True}


async def test_hang_answers_nothing_and_other_routes_go_on() -> None:
    async with _engine() as (_, client):
        await client.post(**_fault(rules=[{"at": "/pause", "action": "hang"}]))
        hung = asyncio.create_task(client.post("/pause?mode=keep"))
        report = (await client.get("/fault")).json()
        while report["fired"] != {"/pause": 1}:
            report = (await client.get("/fault")).json()
        assert not hung.done()
        hung.cancel()


async def test_exit_refuses_like_a_dead_process() -> None:
    async with _engine() as (_, client):
        await client.post(**_fault(rules=[{"at": "/pause", "action": "exit"}]))
        with pytest.raises(httpx.TransportError):
            await client.post("/pause?mode=keep")
        with pytest.raises(httpx.ConnectError):
            await client.get("/identity")


async def test_lie_about_the_version_after_a_commit() -> None:
    async with _engine() as (_, client):
        await client.post(**_fault(lie_version=1))
        assert (await _load(client, version=2, generation=1)).status_code == 200
        assert (await client.get("/weight_version")).json()["version"] == 1
        assert (await client.get("/identity")).json()["weight_version"] == 1
        await client.post(**_fault(clear=True))
        assert (await client.get("/weight_version")).json()["version"] == 2


async def test_failed_load_holds_no_version() -> None:
    async with _engine() as (_, client):
        assert (await _load(client, version=1, generation=1)).status_code == 200
        await client.post(**_fault(rules=[{"at": "load", "action": "error"}]))
        failed = await _load(client, version=2, generation=2)
        assert (failed.status_code, "injected" in failed.json()["error"]) == (500, True)
        assert (await client.get("/weight_version")).json()["version"] is None


@pytest.mark.parametrize("phase", ["join", "stage"])
async def test_failed_phase_shows_in_the_status(phase: str) -> None:
    async with _engine() as (_, client):
        await client.post(**_fault(rules=[{"at": phase, "action": "error"}]))
        assert (await _load(client, version=1, generation=1)).status_code == 409
        identity = (await client.get("/identity")).json()
        assert (identity["transfer_state"], identity["generation"]) == ("failed", 1)


async def test_hung_join_is_freed_by_an_abort() -> None:
    async with _engine() as (_, client):
        await client.post(**_fault(rules=[{"at": "join", "action": "hang"}]))
        info = {"host": "x", "port": 9, "rank_offset": 1, "world_size": 2, "timeout_s": 5}
        body = {"init_info": {**info, "generation": 1}}
        await client.post("/init_weight_transfer_engine", json=body)
        wait = {"generation": 1, "stage": "joined", "timeout_s": 5}
        waiting = asyncio.create_task(client.post("/await_weight_transfer", json=wait))
        await client.post("/abort_weight_transfer", json={"generation": 1})
        assert (await waiting).json()["state"] == "aborted"


async def test_frozen_core_looks_alive_to_probes() -> None:
    async with _engine() as (fleet, client):
        await client.post(**_fault(freeze=True))
        identity = await client.get("/identity")
        assert identity.status_code == 200
        assert fleet.engines[_SLOT].core.age_s >= 0
        pausing = asyncio.create_task(client.post("/pause?mode=keep"))
        await client.get("/identity")
        assert not pausing.done()
        await client.post(**_fault(freeze=False))
        assert (await pausing).status_code == 200


async def test_restart_in_place_is_a_new_boot() -> None:
    async with _engine() as (_, client):
        await _load(client, version=1, generation=1)
        before = (await client.get("/identity")).json()
        await client.post(**_fault(restart=True))
        after = (await client.get("/identity")).json()
        assert after["boot_id"] != before["boot_id"]
        assert (after["weight_version"], after["generation"]) == (None, 0)


async def test_generate_fails_while_probes_are_fine() -> None:
    async with _engine() as (_, client):
        await _load(client, version=0, generation=1)
        me = (await client.get("/identity")).json()
        admit = {"boot_id": me["boot_id"], "version": 0, "lease_s": 60}
        assert (await client.post("/admit", json=admit)).status_code == 200
        await client.post(**_fault(rules=[{"at": "generate", "action": "error", "times": 0}]))
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
        for _ in range(2):
            assert (await client.post("/inference/v1/generate", json=body)).status_code == 500
        assert (await client.get("/ready")).status_code == 200


async def test_fault_route_needs_the_token_and_a_known_body() -> None:
    async with _engine() as (fleet, client):
        async with httpx.AsyncClient(trust_env=False) as stranger:
            url = f"{fleet.urls[_SLOT]}/fault"
            assert (await stranger.post(url, json={"restart": True})).status_code == 401
        assert (await client.post("/fault", json={"explode": True})).status_code == 400


async def test_128_engines_in_one_loop() -> None:
    slots = [Slot(group, index) for group in range(8) for index in range(16)]
    async with FakeFleet(slots) as fleet:
        assert len(set(fleet.urls.values())) == 128
        boots = {engine.keeper.boot_id for engine in fleet.engines.values()}
        assert len(boots) == 128
