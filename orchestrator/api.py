"""HTTP of the orchestrator: the launcher's link and the state of the fleet.

| route | |
|---|---|
| GET /health | 200 while the loop runs; no token |
| GET /status | the plane's snapshot as JSON; admin token |
| POST /launcher/groups | GroupsView -> LauncherReply; admin token; 409 for another run |
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.drivers.launcher import ForeignRun, LauncherDesk
from orchestrator.plane.core import PlaneSnapshot
from protocol.launcher_api import GroupsView


def make_app(token: str, desk: LauncherDesk, snapshot: Callable[[], PlaneSnapshot]) -> Starlette:
    """All routes."""
    expected = f"Bearer {token}".encode()

    def refusal(request: Request) -> Response | None:
        given = request.headers.get("authorization", "").encode()
        if hmac.compare_digest(given, expected):
            return None
        return JSONResponse({"error": "missing or wrong bearer token"}, status_code=401)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def status(request: Request) -> Response:
        return refusal(request) or Response(
            msgspec.json.encode(snapshot()), media_type="application/json"
        )

    async def groups(request: Request) -> Response:
        refused = refusal(request)
        if refused is not None:
            return refused
        try:
            reply = desk.exchange(GroupsView.model_validate_json(await request.body()))
        except ForeignRun as error:
            return JSONResponse({"error": str(error)}, status_code=409)
        except ValueError as error:  # no view, or URLs that are none
            return JSONResponse({"error": str(error)}, status_code=400)
        return Response(reply.model_dump_json(), media_type="application/json")

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/status", status),
            Route("/launcher/groups", groups, methods=["POST"]),
        ]
    )
