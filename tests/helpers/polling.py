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
    what: str = "",
) -> None:
    """Look until it holds. Raises TimeoutError, which names `what`."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                found = holds()
                if isinstance(found, Awaitable):
                    found = await found
                if found:
                    return
                await asyncio.sleep(every_s)
    except TimeoutError:
        raise TimeoutError(f"not within {timeout_s:g} s: {what or holds}") from None
