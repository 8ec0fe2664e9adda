from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from engine.gate import Gatekeeper, GateMiddleware
from protocol.engine_api import AdmitRequest

ADMIN = {"Authorization": "Bearer admin"}
KEY = {"Authorization": "Bearer key"}
GENERATE = "/inference/v1/generate"


class World:
    """A gate in front of an app that notes every request it gets."""

    def __init__(self, *, api_key: str | None = None, max_lease_s: float = 60.0) -> None:
        self.now = 100.0
        self.seen: list[str] = []
        self.keeper = Gatekeeper(
            engine_id="g1e2", boot_id="boot", clock=lambda: self.now, max_lease_s=max_lease_s
        )
        app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])
        self.app = GateMiddleware(app, keeper=self.keeper, admin_token="admin", api_key=api_key)
        transport = httpx.ASGITransport(app=self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://engine")

    async def answer(self, request: Request) -> Response:
        """The app behind the gate."""
        self.seen.append(request.url.path)
        body = await request.body()
        return JSONResponse({"body": body.decode()}, headers={"X-Own": "kept"})

    def open(self, version: int = 7, lease_s: float = 10.0) -> None:
        """Hold `version` and admit."""
        self.keeper.hold(version)
        request = AdmitRequest(boot_id="boot", version=version, lease_s=lease_s)
        assert self.keeper.admit(request) == "ok"


async def test_closed_gate_refuses_data_and_says_when_to_retry() -> None:
    world = World()
    answer = await world.http.post(GENERATE, json={})
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "1"
    assert answer.json() == {"error": "admission is closed: booted"}
    assert answer.headers["X-Engine-Id"] == "g1e2"
    assert world.seen == []


async def test_admin_token_does_not_open_a_closed_gate() -> None:
    world = World()
    assert (await world.http.post(GENERATE, headers=ADMIN)).status_code == 503


async def test_open_gate_passes_and_identifies() -> None:
    world = World()
    world.open(7)
    answer = await world.http.post(GENERATE, content="hello")
    assert answer.json() == {"body": "hello"}
    names = ("X-Engine-Id", "X-Boot-Id", "X-Weight-Version", "X-Own")
    assert [answer.headers[name] for name in names] == ["g1e2", "boot", "7", "kept"]


async def test_unknown_version_has_no_header() -> None:
    assert "X-Weight-Version" not in (await World().http.post(GENERATE)).headers


async def test_admin_answers_are_not_identified() -> None:
    assert "X-Engine-Id" not in (await World().http.get("/identity", headers=ADMIN)).headers


async def test_lease_is_checked_at_each_request() -> None:
    world = World()
    world.open(lease_s=10.0)
    world.now = 109.9
    assert (await world.http.post(GENERATE)).status_code == 200
    world.now = 110.0
    answer = await world.http.post(GENERATE)
    assert answer.json() == {"error": "admission is closed: lease_expired"}


async def test_lease_is_cut_to_the_longest_allowed() -> None:
    world = World(max_lease_s=5.0)
    world.open(lease_s=1000.0)
    assert world.keeper.gate.lease_until == 105.0


async def test_fence_refuses() -> None:
    world = World()
    world.open()
    world.keeper.fence("evicted")
    assert (await world.http.post(GENERATE)).json() == {"error": "admission is closed: evicted"}


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({}, "missing admin token"),
        ({"Authorization": "Bearer wrong"}, "wrong admin token"),
        ({"Authorization": "Bearer admin2"}, "wrong admin token"),
        ({"Authorization": "Bearer "}, "missing admin token"),
        ({"Authorization": "Basic admin"}, "missing admin token"),
        ({"Authorization": "admin"}, "missing admin token"),
        (KEY, "wrong admin token"),
    ],
)
@pytest.mark.parametrize("path", ["/admit", "/update_weights", "/whatever_comes"])
async def test_admin_routes_need_the_token(path: str, headers: dict[str, str], error: str) -> None:
    world = World(api_key="key")
    world.open()
    before = world.keeper.gate
    answer = await world.http.post(path, headers=headers)
    assert (answer.status_code, answer.json()) == (401, {"error": error})
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert world.seen == []
    assert world.keeper.gate == before


async def test_admin_token_passes_whatever_its_scheme_is_spelled() -> None:
    world = World()
    for scheme in ("Bearer", "bearer", "BEARER"):
        answer = await world.http.post("/pause", headers={"Authorization": f"{scheme} admin"})
        assert answer.status_code == 200


async def test_non_ascii_token_is_wrong_not_an_error() -> None:
    headers = {"Authorization": "Bearer \u00e4".encode()}
    assert (await World().http.get("/identity", headers=headers)).status_code == 401


@pytest.mark.parametrize(("headers", "status"), [({}, 401), (KEY, 200), (ADMIN, 200)])
@pytest.mark.parametrize("path", [GENERATE, "/tokenize"])
async def test_api_key(path: str, headers: dict[str, str], status: int) -> None:
    world = World(api_key="key")
    world.open()
    assert (await world.http.post(path, headers=headers)).status_code == status


async def test_key_is_asked_before_the_gate() -> None:
    assert (await World(api_key="key").http.post(GENERATE)).status_code == 401


async def test_info_and_public_routes_pass_a_closed_gate() -> None:
    world = World()
    for path in ("/v1/models", "/ready", "/liveness", "/metrics"):
        assert (await world.http.get(path)).status_code == 200, path


async def test_forbidden_routes_are_refused_to_everybody() -> None:
    world = World()
    answer = await world.http.post("/collective_rpc", headers=ADMIN)
    assert answer.status_code == 403
    assert world.seen == []


async def test_streams_pass_unbuffered_with_headers() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        for number in (b"0", b"1"):
            await send({"type": "http.response.body", "body": number, "more_body": True})
            assert sent[-1]["body"] == number

    async def receive() -> Message:
        raise AssertionError("the gate reads no body")

    world = World()
    world.open()
    gate = GateMiddleware(app, keeper=world.keeper, admin_token="admin")
    scope = {"type": "http", "method": "POST", "path": GENERATE, "headers": []}
    await gate(scope, receive, send)
    assert (b"x-weight-version", b"7") in sent[0]["headers"]


def test_web_sockets_are_not_served() -> None:
    client = TestClient(World().app)
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
        pass


def test_empty_admin_token_is_refused() -> None:
    with pytest.raises(ValueError, match="admin token is empty"):
        GateMiddleware(Starlette(), keeper=World().keeper, admin_token="")
