from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from engine.control import EngineFailure, Stage
from engine.gate import Gatekeeper
from engine.routes import MAX_BODY_BYTES, engine_routes
from protocol.engine_api import Identity, InitInfo, TransferState, TransferStatus, UpdateInfo

INIT = {
    "host": "127.0.0.1",
    "port": 1,
    "generation": 5,
    "rank_offset": 1,
    "world_size": 2,
    "timeout_s": 1.0,
}


class NotingControl:
    """An engine that notes what it is told. `failure` is raised by `commit`."""

    def __init__(self) -> None:
        self.keeper = Gatekeeper(engine_id="g0e0", boot_id="boot", clock=lambda: 0.0)
        self.generation = 4
        self.status = TransferStatus(generation=4, state="joined")
        self.problem: str | None = None
        self.failure: BaseException | None = None
        self.calls: list[str] = []
        self.commits, self.may_commit = asyncio.Event(), asyncio.Event()
        self.may_commit.set()

    def stage(self, version: int) -> None:
        """Something is staged."""
        self.status = TransferStatus(generation=4, state="staged", staged_version=version)

    def identity(self) -> Identity:
        gate = self.keeper.gate
        return Identity(
            run_id="run",
            group=0,
            index=0,
            life=0,
            boot_id=gate.boot_id,
            world_size=1,
            weight_version=gate.weight_version,
            admission=gate.admission,
            admission_reason=gate.reason,
            paused=False,
            core_age_s=0.0,
            generation=self.generation,
            transfer_state=self.status.state,
            staged_version=self.status.staged_version,
            running_requests=0,
            generated_tokens=0,
            started_at=0.0,
            fault_tolerance=False,
        )

    def liveness_problem(self) -> str | None:
        return self.problem

    async def init_transfer(self, info: InitInfo) -> None:
        self.calls.append(f"init {info.generation}")
        self.generation = info.generation

    async def start_update(self) -> None:
        self.calls.append("start")

    async def receive(self, info: UpdateInfo) -> None:
        self.calls.append(f"receive {info.version}")

    async def transfer_status(self) -> TransferStatus:
        return self.status

    async def wait_transfer(self, stage: Stage, timeout_s: float) -> TransferStatus:
        self.calls.append(f"wait {stage} {timeout_s}")
        return self.status

    async def commit(self, version: int) -> None:
        self.calls.append(f"commit {version}")
        self.commits.set()
        await self.may_commit.wait()
        if self.failure is not None:
            raise self.failure

    async def abort_transfer(self, generation: int, reason: str) -> TransferStatus:
        self.calls.append(f"abort {generation} {reason}")
        return TransferStatus(generation=generation, state="aborted")

    async def shutdown_transfer(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def control() -> NotingControl:
    return NotingControl()


@pytest.fixture
def http(control: NotingControl) -> httpx.AsyncClient:
    routes = [
        Route(route.path, route.handler, methods=[route.method]) for route in engine_routes(control)
    ]
    transport = httpx.ASGITransport(app=Starlette(routes=routes), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://engine")


def finish(version: str = "7", generation: int = 4) -> dict[str, Any]:
    return {"weight_version": version, "generation": generation}


async def test_identity_and_version(http: httpx.AsyncClient, control: NotingControl) -> None:
    assert Identity.model_validate((await http.get("/identity")).json()) == control.identity()
    answer = await http.get("/weight_version")
    assert answer.json() == {"version": None, "boot_id": "boot"}


async def test_ready_is_the_gate(http: httpx.AsyncClient, control: NotingControl) -> None:
    answer = await http.get("/ready")
    assert (answer.status_code, answer.json()["error"]) == (503, "admission is closed: booted")
    control.keeper.hold(1)
    await http.post("/admit", json={"boot_id": "boot", "version": 1, "lease_s": 1})
    assert (await http.get("/ready")).status_code == 200
    control.problem = "core is gone"
    assert (await http.get("/ready")).json() == {"error": "core is gone"}


async def test_liveness_is_not_the_gate(http: httpx.AsyncClient, control: NotingControl) -> None:
    assert (await http.get("/liveness")).status_code == 200
    control.problem = "core is gone"
    answer = await http.get("/liveness")
    assert (answer.status_code, answer.json()) == (503, {"error": "core is gone"})


@pytest.mark.parametrize(
    ("boot_id", "version", "error"),
    [
        ("other", 3, "boot id is boot, not other"),
        ("boot", 4, "weight version is 3, not 4"),
    ],
)
async def test_admit_refuses(
    http: httpx.AsyncClient, control: NotingControl, boot_id: str, version: int, error: str
) -> None:
    control.keeper.hold(3)
    body = {"boot_id": boot_id, "version": version, "lease_s": 1}
    answer = await http.post("/admit", json=body)
    assert (answer.status_code, answer.json()) == (409, {"error": error})
    assert not control.keeper.gate.is_open


async def test_fence_closes(http: httpx.AsyncClient, control: NotingControl) -> None:
    control.keeper.hold(3)
    await http.post("/admit", json={"boot_id": "boot", "version": 3, "lease_s": 1})
    answer = await http.post("/fence", json={"reason": "evicted"})
    assert (answer.json()["admission"], answer.json()["admission_reason"]) == ("closed", "evicted")


@pytest.mark.parametrize("generation", [3, 4])
async def test_init_wants_a_higher_generation(
    http: httpx.AsyncClient, control: NotingControl, generation: int
) -> None:
    body = {"init_info": {**INIT, "generation": generation}}
    answer = await http.post("/init_weight_transfer_engine", json=body)
    assert answer.status_code == 409
    assert answer.json() == {"error": f"generation {generation} is not above the last one, 4"}
    assert control.calls == []


async def test_every_other_call_wants_the_last_generation(
    http: httpx.AsyncClient, control: NotingControl
) -> None:
    control.stage(7)
    for path, body in (
        ("/update_weights", {"update_info": {"generation": 9, "version": 7, "timeout_s": 1}}),
        ("/await_weight_transfer", {"generation": 9, "stage": "staged", "timeout_s": 1}),
        ("/finish_weight_update", finish(generation=9)),
        ("/abort_weight_transfer", {"generation": 9}),
    ):
        answer = await http.post(path, json=body)
        assert (answer.status_code, answer.json()) == (409, {"error": "generation is 4, not 9"})
    assert control.calls == []


async def test_whole_update(http: httpx.AsyncClient, control: NotingControl) -> None:
    await http.post("/init_weight_transfer_engine", json={"init_info": INIT})
    await http.post("/start_weight_update")
    info = {"generation": 5, "version": 7, "timeout_s": 1}
    await http.post("/update_weights", json={"update_info": info})
    wait = {"generation": 5, "stage": "staged", "timeout_s": 2}
    assert (await http.post("/await_weight_transfer", json=wait)).status_code == 200
    control.stage(7)
    answer = await http.post("/finish_weight_update", json=finish(generation=5))
    assert answer.status_code == 200
    await http.post("/shutdown_weight_transfer_engine")
    assert control.calls == [
        *("init 5", "wait joined 0.0", "start", "receive 7", "wait staged 0.0"),
        *("wait staged 2.0", "commit 7", "shutdown"),
    ]
    assert control.keeper.weight_version == 7


async def test_abort(http: httpx.AsyncClient, control: NotingControl) -> None:
    body = {"generation": 4, "reason": "enough"}
    answer = await http.post("/abort_weight_transfer", json=body)
    assert answer.json()["state"] == "aborted"
    assert control.calls == ["abort 4 enough"]


async def test_a_generation_begins_after_the_commit_that_is_under_way(
    http: httpx.AsyncClient, control: NotingControl
) -> None:
    control.stage(7)
    control.may_commit.clear()
    body = {"weight_version": "7", "generation": 4}
    commit = asyncio.create_task(http.post("/finish_weight_update", json=body))
    await asyncio.wait_for(control.commits.wait(), 5.0)
    again = await http.post("/finish_weight_update", json=body)
    assert (again.status_code, again.json()) == (409, {"error": "another commit is under way"})
    init = asyncio.create_task(http.post("/init_weight_transfer_engine", json={"init_info": INIT}))
    for _ in range(20):
        await asyncio.sleep(0)
    assert control.calls == ["commit 7"]
    control.may_commit.set()
    assert (await commit).status_code == (await init).status_code == 200
    assert control.calls == ["commit 7", "init 5", "wait joined 0.0"]
    assert control.keeper.weight_version == 7


@pytest.mark.parametrize("state", ["idle", "joined", "receiving", "failed", "aborted"])
async def test_commit_of_nothing(
    http: httpx.AsyncClient, control: NotingControl, state: TransferState
) -> None:
    control.keeper.hold(6)
    control.status = TransferStatus(generation=4, state=state)
    answer = await http.post("/finish_weight_update", json=finish())
    assert answer.json() == {"error": f"nothing is staged: the transfer is {state}"}
    assert (answer.status_code, control.calls, control.keeper.weight_version) == (409, [], 6)


async def test_commit_of_another_version(http: httpx.AsyncClient, control: NotingControl) -> None:
    control.keeper.hold(6)
    control.stage(8)
    answer = await http.post("/finish_weight_update", json=finish())
    assert answer.json() == {"error": "staged version is 8, not 7"}
    assert (answer.status_code, control.calls, control.keeper.weight_version) == (409, [], 6)


@pytest.mark.parametrize("failure", [EngineFailure("no room"), KeyError("bug")])
async def test_failed_commit_holds_nothing(
    http: httpx.AsyncClient, control: NotingControl, failure: Exception
) -> None:
    control.keeper.hold(6)
    await http.post("/admit", json={"boot_id": "boot", "version": 6, "lease_s": 1})
    control.stage(7)
    control.failure = failure
    answer = await http.post("/finish_weight_update", json=finish())
    assert answer.status_code == 500
    gate = control.keeper.gate
    assert (gate.weight_version, gate.is_open, gate.reason) == (None, False, "weights_lost")


async def test_body_has_a_limit(http: httpx.AsyncClient) -> None:
    answer = await http.post("/admit", content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 400
    assert "larger than" in answer.json()["error"]
