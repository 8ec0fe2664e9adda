"""The two entry points by which vLLM finds us. Nothing of vLLM is patched.

`vllm.general_plugins` -> `register`: in every process of vLLM, makes our weight-transfer backend
known. `vllm.endpoint_plugins` -> `endpoint_plugin`: in the API server, adds our routes (they
replace vLLM's of the same path) and the gate in front of all routes.
"""

from __future__ import annotations

import multiprocessing
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.control import Conflict, EngineFailure
from engine.gate import GateMiddleware
from engine.parent_death import die_with_parent
from engine.routes import engine_routes
from protocol.engine_api import ErrorBody

if TYPE_CHECKING:
    from fastapi import FastAPI

    from engine.server import Served

BACKEND = "muster"


def register() -> None:
    """Make our backend known. Called by vLLM, possibly several times in one process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if multiprocessing.parent_process() is not None:
        die_with_parent()  # a core must not outlive its API server, nor a worker its core
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "engine.weight_transfer", "MusterWeightTransferEngine"
        )


def endpoint_plugin() -> MusterEndpoints:
    """vLLM's factory of the endpoint plugin."""
    return MusterEndpoints()


class MusterEndpoints:
    """vLLM's EndpointPlugin. What it serves comes with the server's arguments (`args.muster`)."""

    name = "muster"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add our routes and the gate."""
        served: Served = app.state.args.muster
        control = served.control
        routes: list[tuple[str, str, Any]] = [
            *engine_routes(control),
            ("POST", "/pause", _pause_route(served)),
            ("POST", "/resume", _resume_route(served)),
        ]
        for method, path, handler in routes:
            app.add_api_route(path, handler, methods=[method], response_model=None)
        app.add_middleware(
            GateMiddleware,
            keeper=control.keeper,
            admin_token=served.secrets.admin_token,
            api_key=served.secrets.api_key,
        )

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Nothing: what our routes need came with the arguments."""


def _pause_route(served: Served) -> Any:
    async def pause(request: Request) -> Response:
        """vLLM's, and `identity` knows it at once."""
        try:
            await served.control.pause(request.query_params.get("mode", "abort"))
        except (Conflict, EngineFailure) as exc:
            return _error(exc)
        return JSONResponse({"status": "paused"})

    return pause


def _resume_route(served: Served) -> Any:
    async def resume(request: Request) -> Response:
        """vLLM's, and `identity` knows it at once."""
        try:
            await served.control.resume()
        except EngineFailure as exc:
            return _error(exc)
        return JSONResponse({"status": "resumed"})

    return resume


def _error(exc: Exception) -> Response:
    status = 400 if isinstance(exc, Conflict) else 500
    return JSONResponse(ErrorBody(error=str(exc)).model_dump(), status)
