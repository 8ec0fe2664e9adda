"""The API server's view of its engine core: asked regularly, remembered, never waited for.

    ping task -> core -> (paused, receiver's status, time of the answer) -> identity, liveness

Why: a core that is frozen or dead must not freeze `/identity` too. So the answer about the core is
the last thing it said and how long ago that was. One question is under way at a time; a core that
does not answer makes `age_s` grow, and liveness draws the line.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.transfer_status import combine
from protocol.engine_api import TransferStatus

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)


class CoreLink:
    """See the module. `is_dead` is True once the core is known to be gone."""

    def __init__(self, llm: AsyncLLM, *, interval_s: float, exit_after_death_s: float) -> None:
        self.llm = llm
        self.paused = False
        self.is_dead = False
        self.status = TransferStatus(generation=0, state="idle")
        self._interval_s = interval_s
        self._exit_after_death_s = exit_after_death_s
        self._answered_at = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the core last answered."""
        return time.monotonic() - self._answered_at

    def start(self, on_death: Callable[[], None]) -> None:
        """Begin to ask; `on_death` is called some time after the core is found dead."""
        self._task = asyncio.create_task(self._ping_for_ever(on_death), name="core-ping")

    def stop(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call `method` of every worker; one result a worker."""
        results: list[Any] = await self.llm.collective_rpc(method, args=args)
        self._answered_at = time.monotonic()
        return results

    async def call_status(self, method: str, *args: Any) -> TransferStatus:
        """`call` of a method that answers with the receiver's status."""
        statuses = [TransferStatus.model_validate(item) for item in await self.call(method, *args)]
        self.status = combine(statuses)
        return self.status

    async def ping(self) -> None:
        """Ask the core how it is. Raises what vLLM raises when the core is dead."""
        self.paused = bool(await self.llm.is_paused())
        await self.call_status("muster_status")

    async def _ping_for_ever(self, on_death: Callable[[], None]) -> None:
        while True:
            try:
                await self.ping()
            except Exception as exc:  # noqa: BLE001
                # Task boundary: vLLM raises bare Exceptions. Such a core will not recover.
                log.critical("engine core does not answer any more: %s", exc)
                self.is_dead = True
                await asyncio.sleep(self._exit_after_death_s)
                on_death()
                return
            await asyncio.sleep(self._interval_s)
