"""A vllm-router without its proxy: membership only, behind the HTTP contract of the real one.

| mode | adds | removals | health |
|---|---|---|---|
| `regular` | wait for the engine's `/health`, 400 when it is known | always 200 | not looked at |
| `pd` | 400, always | always 200, for good | asks `/ready` of each member once an interval |

The knobs make it worse than the real one was ever seen to be. Serves in the test's own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from engine.fake_server import AppServer, ExactRoutes
from tests.fakes.processes import free_port
from tests.helpers.polling import until

NO_ADDS = "PD router requires specific add_prefill_server or add_decode_server methods"


@dataclass(slots=True)
class Knobs:
    """`blocks`: adds of these URLs wait for `release`, even when their caller has left. `lies`: so
    many removals say 200 and do nothing. `late_s`: adds say 200 and are listed so much later.
    `forgets_adds`: so many say 200 and nothing comes. `twice`: an add lists the URL twice.
    `hangs`: the listing never answers. `listing`: what it says instead of the truth."""

    blocks: set[str] = field(default_factory=set)
    lies: int = 0
    late_s: float = 0.0
    forgets_adds: int = 0
    twice: bool = False
    hangs: bool = False
    listing: object = None


class FakeRouter:
    """`async with FakeRouter().serve() as router`: at `router.url`. `adds` and `removals` are the
    URLs that were asked for, in order; `num_looks` counts listings."""

    def __init__(
        self,
        mode: Literal["regular", "pd"] = "regular",
        *,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        startup_timeout_s: float = 1.0,
        health_interval_s: float = 0.1,
    ) -> None:
        self.url = ""
        self.knobs = Knobs()
        self.workers: list[str] = []
        self.adds: list[str] = []
        self.removals: list[str] = []
        self.num_looks = 0
        self._mode = mode
        self._fixed = {url: "prefill" for url in prefill} | {url: "decode" for url in decode}
        self._healthy: dict[str, bool] = {}
        self._startup_timeout_s = startup_timeout_s
        self._health_interval_s = health_interval_s
        self._released = asyncio.Event()
        self._jobs: set[asyncio.Task[Response]] = set()
        self._checks: asyncio.Task[None] | None = None
        self._server: AppServer | None = None

    @contextlib.asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[FakeRouter]:
        """Listen on `port` (0: a free one)."""
        self._http = httpx.AsyncClient(trust_env=False, timeout=1.0)
        await self.start(port or free_port())
        try:
            yield self
        finally:
            self.kill()
            await self._http.aclose()

    async def start(self, port: int) -> None:
        """Up, and everything is forgotten; with roles, the members are those of its start."""
        routes = {
            ("GET", "/list_workers"): self._list,
            ("GET", "/workers"): self._list_healths,
            ("POST", "/add_worker"): self._add,
            ("POST", "/remove_worker"): self._remove,
        }
        self.workers = list(self._fixed)
        self._healthy = dict.fromkeys(self.workers, True)
        self._server = AppServer(ExactRoutes(routes))
        await self._server.start("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}"
        if self._mode == "pd":
            self._checks = asyncio.create_task(self._check_for_ever())

    def kill(self) -> None:
        """Like SIGKILL."""
        if self._server is not None:
            self._server.kill()
        for task in [*self._jobs, *filter(None, [self._checks])]:
            task.cancel()

    async def restart(self) -> None:
        """A new process on the same port."""
        self.kill()
        await self.start(int(self.url.rsplit(":", 1)[1]))

    def release(self) -> None:
        """Let the adds that block go on."""
        self._released.set()

    async def _list(self, _: Request) -> Response:
        await self._hang()
        return JSONResponse(self.knobs.listing or {"urls": self.workers})

    async def _list_healths(self, _: Request) -> Response:
        await self._hang()
        workers = [
            {
                "url": url,
                "worker_type": self._fixed.get(url, "regular"),
                "is_healthy": self._healthy.get(url, True),
            }
            for url in self.workers
        ]
        return JSONResponse(self.knobs.listing or {"workers": workers})

    async def _hang(self) -> None:
        self.num_looks += 1
        if self.knobs.hangs:
            await asyncio.Event().wait()

    async def _add(self, request: Request) -> Response:
        url = request.query_params["url"]
        self.adds.append(url)
        if self._mode == "pd":
            return PlainTextResponse(NO_ADDS, 400)
        job = asyncio.create_task(self._added(url))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        await asyncio.wait([job])
        return Response(status_code=503) if job.cancelled() else job.result()

    async def _added(self, url: str) -> Response:
        if url in self.knobs.blocks:
            await self._released.wait()
        elif not await self._becomes_healthy(url):
            text = f"Timeout {self._startup_timeout_s}s waiting for worker {url} to become healthy"
            return PlainTextResponse(text, 400)
        if url in self.workers:
            return PlainTextResponse(f"Worker {url} already exists", 400)
        if self.knobs.forgets_adds:
            self.knobs.forgets_adds -= 1
        elif self.knobs.late_s:
            asyncio.get_running_loop().call_later(self.knobs.late_s, self.workers.append, url)
        else:
            self.workers += [url, url] if self.knobs.twice else [url]
        return PlainTextResponse(f"Successfully added worker: {url}")

    async def _remove(self, request: Request) -> Response:
        url = request.query_params["url"]
        self.removals.append(url)
        if self.knobs.lies:
            self.knobs.lies -= 1
        elif url in self.workers:
            self.workers.remove(url)
        return PlainTextResponse(f"Successfully removed worker: {url}")

    async def _becomes_healthy(self, url: str) -> bool:
        try:
            await until(
                lambda: self._answers(f"{url}/health"),
                timeout_s=self._startup_timeout_s,
                every_s=self._health_interval_s,
            )
        except TimeoutError:
            return False
        return True

    async def _check_for_ever(self) -> None:
        while True:
            for url in list(self.workers):
                self._healthy[url] = await self._answers(f"{url}/ready")
            await asyncio.sleep(self._health_interval_s)

    async def _answers(self, url: str) -> bool:
        try:
            return (await self._http.get(url)).is_success
        except httpx.HTTPError:
            return False
