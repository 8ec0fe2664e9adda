"""Carries out the plane's commands on engines.

Every call ends by its command's deadline in one of three ways: a result, `Refused` (the engine's
own words) or `NoAnswer`. Calls that wait inside the engine (join, stage) give it a little less time
than they have, so that a healthy engine answers "not in time" itself and only a broken one is
silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, assert_never

from orchestrator.drivers.admin_http import AdminHttp, NoAnswer, Refused, parse_body
from orchestrator.plane.commands import (
    AbortGeneration,
    Admit,
    Commit,
    Fence,
    Join,
    Pause,
    ReadVersion,
    Resume,
    Stage,
)
from orchestrator.plane.events import OpResult
from protocol.engine_api import (
    AbortRequest,
    AdmitRequest,
    Body,
    FenceRequest,
    Identity,
    InitInfo,
    TransferState,
    TransferStatus,
    UpdateInfo,
    WeightVersion,
)
from protocol.ids import Slot

EngineCommand = (
    AbortGeneration | Admit | Commit | Fence | Join | Pause | ReadVersion | Resume | Stage
)
# Share of the time left that an engine may use for waiting; the rest is for its answer.
_SERVER_SHARE = 0.9
_MAX_MARGIN_S = 2.0


class EngineDriver:
    """`url_of` tells where a slot's engine is now; `clock` is the plane's."""

    def __init__(
        self,
        http: AdminHttp,
        url_of: Callable[[Slot], str],
        clock: Callable[[], float],
        *,
        lease_s: float,
    ) -> None:
        self._http = http
        self._url_of = url_of
        self._clock = clock
        self._lease_s = lease_s
        # A fence never overtakes a lease renewal that is on its way: it would be undone.
        self._gates: dict[Slot, asyncio.Lock] = {}

    async def run(self, command: EngineCommand) -> OpResult:
        """Carry out `command`. Raises Refused, NoAnswer."""
        match command:
            case Join():
                await self._join(command)
            case Stage():
                return await self._stage(command)
            case Pause():
                await self._post(command, "/pause?mode=keep")
            case Commit():
                body = {
                    "weight_version": str(command.version),
                    "generation": command.generation,
                }
                await self._post(command, "/finish_weight_update", body)
            case ReadVersion():
                answer = await self._call("GET", command, "/weight_version")
                said = parse_body(WeightVersion, answer)
                return OpResult(version=said.version, boot_id=said.boot_id)
            case Resume():
                await self._post(command, "/resume")
            case Admit():
                async with self._gate(command.slot):
                    await self._admit(command)
            case Fence():
                async with self._gate(command.slot):
                    await self._post(command, "/fence", _body(FenceRequest(reason=command.reason)))
                await self._post(command, "/abort_requests", {})
            case AbortGeneration():
                request = AbortRequest(generation=command.generation, reason=command.reason)
                await self._post(command, "/abort_weight_transfer", _body(request))
            case _:
                assert_never(command)
        return OpResult()

    async def probe(self, url: str, timeout_s: float) -> Identity:
        """What the engine at `url` says it is. Raises Refused, NoAnswer."""
        return parse_body(
            Identity, await self._http.call("GET", f"{url}/identity", timeout_s=timeout_s)
        )

    async def renew_lease(
        self,
        slot: Slot,
        *,
        boot_id: str,
        version: int,
        timeout_s: float,
        is_wanted: Callable[[], bool],
    ) -> None:
        """Keep the gate open for another lease. Raises Refused, NoAnswer."""
        request = AdmitRequest(boot_id=boot_id, version=version, lease_s=self._lease_s)
        async with self._gate(slot):
            if is_wanted():
                url = f"{self._url_of(slot)}/admit"
                await self._http.call("POST", url, _body(request), timeout_s=timeout_s)

    def _gate(self, slot: Slot) -> asyncio.Lock:
        return self._gates.setdefault(slot, asyncio.Lock())

    async def _join(self, command: Join) -> None:
        assert command.slot is not None
        wait_s = self._server_time(command.deadline)
        info = InitInfo(
            host=command.host,
            port=command.port,
            generation=command.generation,
            rank_offset=command.rank_offset,
            world_size=command.world_size,
            timeout_s=wait_s,
        )
        body = {"init_info": _body(info), "wait_s": wait_s}
        await self._reach(command, "/init_weight_transfer_engine", body, "joined")

    async def _stage(self, command: Stage) -> OpResult:
        # No /start_weight_update before it: that only drops staged bytes, and receiving does too.
        wait_s = self._server_time(command.deadline)
        info = UpdateInfo(generation=command.generation, version=command.version, timeout_s=wait_s)
        body = {"update_info": _body(info), "wait_s": wait_s}
        status = await self._reach(command, "/update_weights", body, "staged")
        if status.staged_version != command.version:
            raise Refused(200, f"staged version {status.staged_version}, not {command.version}")
        return OpResult(num_bytes=status.num_bytes, digest=status.digest or "")

    async def _reach(
        self, command: Join | Stage, path: str, body: dict[str, Any], state: TransferState
    ) -> TransferStatus:
        """One request that starts the stage and waits for it: a fleet has many engines."""
        status = parse_body(TransferStatus, await self._call("POST", command, path, body))
        if status.state != state:
            raise Refused(200, f"transfer is {status.state}: {status.error or 'not in time'}")
        return status

    async def _admit(self, command: Admit) -> None:
        request = AdmitRequest(
            boot_id=command.boot_id, version=command.version, lease_s=self._lease_s
        )
        await self._post(command, "/admit", _body(request))

    async def _post(
        self, command: EngineCommand, path: str, body: dict[str, Any] | None = None
    ) -> None:
        await self._call("POST", command, path, body)

    async def _call(
        self, method: str, command: EngineCommand, path: str, body: dict[str, Any] | None = None
    ) -> bytes:
        assert command.slot is not None
        left = command.deadline - self._clock()
        if left <= 0:
            raise NoAnswer(f"{method} {path}: no time left")
        url = f"{self._url_of(command.slot)}{path}"
        return await self._http.call(method, url, body, timeout_s=left)

    def _server_time(self, deadline: float) -> float:
        left = deadline - self._clock()
        return max(left * _SERVER_SHARE, left - _MAX_MARGIN_S, 0.01)


def _body(model: Body) -> dict[str, Any]:
    return model.model_dump(mode="json")
