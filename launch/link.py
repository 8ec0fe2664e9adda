"""The launcher's side of its link with the orchestrator.

Posts the whole view on every change and once a second, hands each reply to the launcher. The
orchestrator may be late, restarting or gone: that is not the launcher's business, it posts on.
Only an answer that refuses us is told to the user, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx

from protocol.launcher_api import GroupsView, LauncherReply

_INTERVAL_S = 1.0
_TIMEOUT_S = 3.0


class OrchestratorLink:
    """Level-triggered exchange of GroupsView and LauncherReply."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        view: Callable[[], GroupsView],
        on_reply: Callable[[LauncherReply], None],
        say: Callable[[str], None],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = f"{url}/launcher/groups"
        self._token = token
        self._view = view
        self._on_reply = on_reply
        self._say = say
        self._transport = transport
        self._changed = asyncio.Event()
        self._last_refusal: str | None = None

    def changed(self) -> None:
        """The view differs from what was posted last."""
        self._changed.set()

    async def run(self) -> None:
        """Post until cancelled."""
        headers = {"Authorization": f"Bearer {self._token}"}
        async with httpx.AsyncClient(
            headers=headers, timeout=_TIMEOUT_S, trust_env=False, transport=self._transport
        ) as client:
            while True:
                self._changed.clear()
                await self._post(client)
                try:
                    async with asyncio.timeout(_INTERVAL_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    async def _post(self, client: httpx.AsyncClient) -> None:
        try:
            answer = await client.post(
                self._url,
                content=self._view().model_dump_json(),
                headers={"Content-Type": "application/json"},
            )
        except httpx.HTTPError:
            return
        if answer.is_success:
            try:
                reply = LauncherReply.model_validate_json(answer.content)
            except ValueError as error:
                self._refused(f"its answer does not parse: {error}")
                return
            self._last_refusal = None
            self._on_reply(reply)
        else:
            self._refused(f"{answer.status_code} {answer.text[:300]}")

    def _refused(self, text: str) -> None:
        if text != self._last_refusal:
            self._last_refusal = text
            self._say(f"the orchestrator refuses the launcher's report: {text}")
