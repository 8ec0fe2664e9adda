"""Many fake engines in one process: one event loop, a listening socket an engine.

async with FakeFleet(slots_of_sizes([16, 64])) as fleet:
    fleet.urls[Slot(0, 3)]; fleet.engines[Slot(0, 3)].order(...); fleet.kill(Slot(1, 0))
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from engine.config import EngineSecrets
from engine.fake_config import FakeSettings
from engine.fake_engine import FakeEngine
from engine.fake_server import AppServer
from protocol.ids import Slot


def slots_of_sizes(sizes: Sequence[int], first_index: int = 0) -> list[Slot]:
    """`[2, 1]` -> g0e0, g0e1, g1e0. With `first_index` 1: g0e1, g0e2, g1e1."""
    return [
        Slot(group, first_index + number)
        for group, size in enumerate(sizes)
        for number in range(size)
    ]


class FakeFleet:
    """Fake engines at `slots`; other settings are fields of FakeSettings. Leaving it kills all."""

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        admin_token: str = "secret",
        api_key: str | None = None,
        host: str = "127.0.0.1",
        **settings: Any,
    ) -> None:
        self.slots = list(slots)
        self.engines: dict[Slot, FakeEngine] = {}
        self.urls: dict[Slot, str] = {}
        self._host = host
        self._tokens = EngineSecrets(admin_token, api_key)
        self._settings = FakeSettings(**settings)
        self._servers: dict[Slot, AppServer] = {}

    async def __aenter__(self) -> Self:
        for slot in self.slots:
            await self._start(slot, port=0, life=self._settings.life)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for slot in self.slots:
            self.kill(slot)

    def kill(self, slot: Slot) -> None:
        """Like SIGKILL of the engine's process. Idempotent."""
        self._servers[slot].kill()
        self.engines[slot].stop()

    async def relaunch(self, slot: Slot, *, same_port: bool = True, life: int = 0) -> None:
        """A new process in the same place: new boot, and another URL unless `same_port`."""
        self.kill(slot)
        port = self._servers[slot].port if same_port else 0
        await self._start(slot, port=port, life=life)

    async def _start(self, slot: Slot, *, port: int, life: int) -> None:
        kill = functools.partial(self.kill, slot)
        settings = self._settings.model_copy(update={"life": life})
        engine = FakeEngine(slot, settings, self._tokens, kill)
        server = AppServer(engine)
        await server.start(self._host, port)
        self.engines[slot] = engine
        self._servers[slot] = server
        self.urls[slot] = f"http://{self._host}:{server.port}"
