"""Serves many small apps from one process: a listening socket an app, one loop, no logging.

One uvicorn protocol per connection without uvicorn's server object, whose ten ticks a second for
each of 128 apps would cost more than the requests. `kill` is what SIGKILL looks like from outside:
connections are reset and the port refuses.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

Handler = Callable[[Request], Awaitable[Response]]

_KEEP_ALIVE_S = 600  # a pooled connection is not cut under a caller that is about to use it


class ExactRoutes:
    """ASGI app over a table of exact routes. Matching 25 patterns a request, as a general router
    does, would be half of the fake's work."""

    def __init__(self, table: dict[tuple[str, str], Handler]) -> None:
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._table.get((scope["method"], scope["path"]))
        if handler is None:
            response: Response = JSONResponse({"detail": "Not Found"}, 404)
        else:
            response = await handler(Request(scope, receive))
        await response(scope, receive, send)


class _Connection(HttpToolsProtocol):
    """Tells the app its transport (`scope["state"]["transport"]`), so that a fault can cut it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {"transport": transport}


class AppServer:
    """One app on one socket of the running loop."""

    def __init__(self, app: Any) -> None:
        self._config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            date_header=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one. `self.port` is the real one. Raises OSError."""
        if not self._config.loaded:
            self._config.load()
        sock = socket.create_server((host, port), backlog=256)
        # asyncio sets it only on sockets that it made; without it an answer takes 44 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = int(sock.getsockname()[1])
        self._server = await asyncio.get_running_loop().create_server(self._connect, sock=sock)

    def kill(self) -> None:
        """Refuse new connections and reset the open ones, without a word. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self._state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    def _connect(self) -> _Connection:
        return _Connection(config=self._config, server_state=self._state, app_state={})
