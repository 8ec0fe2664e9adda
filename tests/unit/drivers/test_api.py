"""HTTP of the orchestrator."""

from __future__ import annotations

import httpx
import pytest

from orchestrator.api import make_app
from orchestrator.drivers.launcher import LauncherDesk
from orchestrator.plane.commands import Relaunch
from orchestrator.plane.events import GroupLaunched
from protocol.launcher_api import GroupsView, GroupView, LauncherReply, RelaunchWish
from tests.helpers.plane_world import World

GOOD = {"Authorization": "Bearer secret"}
VIEW = GroupsView(
    run_id="run", groups=[GroupView(group=0, life=0, state="running", urls=["http://a"])]
)


class Bench:
    """The app with its desk and a core that serves."""

    def __init__(self) -> None:
        self.told: list[GroupLaunched] = []
        self.desk = LauncherDesk("run", self.told.append)
        self.world = World([0])
        app = make_app("secret", self.desk, self.world.core.snapshot)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://orchestrator"
        )


async def test_health_needs_no_token() -> None:
    answer = await Bench().http.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_status() -> None:
    bench = Bench()
    bench.world.serve(0)
    answer = await bench.http.get("/status", headers=GOOD)
    assert answer.status_code == 200
    body = answer.json()
    assert (body["policy_version"], body["generation"], body["has_capacity"]) == (0, 1, True)
    assert body["groups"][0]["state"] == "admitted"
    assert body["groups"][0]["members"][0]["engine_id"] == "g0e0"


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}]
)
async def test_without_the_token(headers: dict[str, str]) -> None:
    bench = Bench()
    for answer in (
        await bench.http.get("/status", headers=headers),
        await bench.http.post("/launcher/groups", headers=headers, content=VIEW.model_dump_json()),
    ):
        assert answer.status_code == 401
        assert answer.json() == {"error": "missing or wrong bearer token"}
    assert bench.told == []


async def test_the_launchers_link() -> None:
    bench = Bench()
    bench.desk.wish(Relaunch(0, 0, "core_hung"))
    answer = await bench.http.post("/launcher/groups", headers=GOOD, content=VIEW.model_dump_json())
    assert LauncherReply.model_validate_json(answer.content) == LauncherReply(
        relaunch=[RelaunchWish(group=0, life=0, reason="core_hung")]
    )
    assert bench.told == [GroupLaunched(0, 0, "running", ("http://a:80",), "running")]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run_id": "run"}', '{"odd": 1}'])
async def test_what_is_no_view(content: str) -> None:
    answer = await Bench().http.post("/launcher/groups", headers=GOOD, content=content)
    assert answer.status_code == 400
    assert "GroupsView" in answer.json()["error"]


async def test_an_address_that_is_none() -> None:
    group = VIEW.groups[0].model_copy(update={"urls": ["node7:8001"]})
    view = VIEW.model_copy(update={"groups": [group]})
    answer = await Bench().http.post(
        "/launcher/groups", headers=GOOD, content=view.model_dump_json()
    )
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("groups[0].urls = ['node7:8001']: expected http://")


async def test_another_run() -> None:
    view = VIEW.model_copy(update={"run_id": "other"})
    answer = await Bench().http.post(
        "/launcher/groups", headers=GOOD, content=view.model_dump_json()
    )
    assert answer.status_code == 409
    assert "view of run 'other'" in answer.json()["error"]
