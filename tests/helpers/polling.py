"""Waiting, for tests, for what nobody announces."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

DEADLINE_S = 20.0


async def until(
    holds: Callable[[], bool | Awaitable[bool]],
    *,
    timeout_s: float = DEADLINE_S,
    every_s: float = 0.01,
) -> None:
    """Look until it holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = holds()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return
            await asyncio.sleep(every_s)
