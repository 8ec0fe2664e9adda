"""One fake engine: the fake core and receiver behind the real gate and the real routes.

    FaultGate -> GateMiddleware (engine/gate.py) -> engine/routes.py + fake vLLM routes -> core

Only what vLLM does is faked; tokens, admission and generations are the code that real engines run.
Made inside a running event loop; one object is one place (slot), `restart` makes a new boot of it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from engine.config import EngineSecrets
from engine.control import EngineFailure, Stage
from engine.fake_config import FakeSettings
from engine.fake_core import FakeCore
from engine.fake_faults import FaultOrder, FaultPlan, FaultReport
from engine.fake_gate import FAULT_PATH, FaultGate
from engine.fake_server import ExactRoutes, Handler
from engine.fake_transfer import FakeReceiver, LinkError
from engine.fake_vllm import VllmRoutes
from engine.gate import Gatekeeper, GateMiddleware
from engine.routes import engine_routes
from protocol.engine_api import Identity, InitInfo, TransferStatus, UpdateInfo
from protocol.ids import Slot


class _Keeper(Gatekeeper):
    """A gatekeeper that can lie about the version, to everybody but itself."""

    def __init__(self, slot: Slot, plan: FaultPlan) -> None:
        super().__init__(
            engine_id=slot.engine_id, boot_id=secrets.token_hex(8), clock=time.monotonic
        )
        self._plan = plan

    @property
    def weight_version(self) -> int | None:
        """What the engine claims."""
        lie = self._plan.lie_version
        return super().weight_version if lie is None else lie


class FakeEngine:
    """An `EngineControl` and an ASGI app. `kill` ends the engine like SIGKILL."""

    def __init__(
        self,
        slot: Slot,
        settings: FakeSettings,
        tokens: EngineSecrets,
        kill: Callable[[], None],
    ) -> None:
        self.slot = slot
        self.plan = FaultPlan()
        self._settings = settings
        self._tokens = tokens
        self._kill = kill
        self.life = settings.life
        self._boot()

    def _boot(self) -> None:
        self._keeper = _Keeper(self.slot, self.plan)
        self._started_at = time.time()
        self.core = FakeCore(
            seed=self._settings.seed,
            vocab_size=self._settings.vocab_size,
            tokens_per_s=self._settings.tokens_per_s,
            clock=time.monotonic,
        )
        self.receiver = FakeReceiver(
            self._settings.transfer, self._settings.world_size, self._phase
        )
        table: dict[tuple[str, str], Handler] = {
            (route.method, route.path): route.handler for route in engine_routes(self)
        }
        table.update(VllmRoutes(self.core, self._settings, self._phase).table())
        table["GET", FAULT_PATH] = table["POST", FAULT_PATH] = self._fault
        gate = GateMiddleware(
            ExactRoutes(table),
            keeper=self._keeper,
            admin_token=self._tokens.admin_token,
            api_key=self._tokens.api_key,
        )
        self._app = FaultGate(gate, self.plan, self._kill)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve as ASGI app."""
        await self._app(scope, receive, send)

    def restart(self) -> None:
        """A new process at the same address: new boot id, closed, no weights, no generation."""
        self.stop()
        self._boot()

    def stop(self) -> None:
        """Free whatever is blocked; the engine is not used any more."""
        self.core.abort()
        self.receiver.shutdown()

    # -- EngineControl

    @property
    def keeper(self) -> Gatekeeper:
        """The gate of the current boot."""
        return self._keeper

    @property
    def generation(self) -> int:
        """Last generation."""
        return self.receiver.generation

    def identity(self) -> Identity:
        """Never waits for the core."""
        gate = self._keeper.gate
        return Identity(
            run_id=self._settings.run_id,
            group=self.slot.group,
            index=self.slot.index,
            life=self.life,
            boot_id=gate.boot_id,
            world_size=self._settings.world_size,
            weight_version=self._keeper.weight_version,
            admission=gate.admission,
            admission_reason=gate.reason,
            paused=self.core.paused,
            core_age_s=self.core.age_s,
            generation=self.receiver.generation,
            transfer_state=self.receiver.state,
            staged_version=self.receiver.staged_version,
            running_requests=self.core.num_running,
            generated_tokens=self.core.generated_tokens,
            started_at=self._started_at,
            fault_tolerance=False,
        )

    def liveness_problem(self) -> str | None:
        """A core that has been frozen for too long."""
        age_s = self.core.age_s
        if age_s <= self._settings.core_timeout_s:
            return None
        return f"the engine core has not answered for {age_s:.1f} s"

    async def init_transfer(self, info: InitInfo) -> None:
        """Start to join."""
        self.receiver.init(info)

    async def start_update(self) -> None:
        """Forget what is staged."""
        self.receiver.forget()

    async def receive(self, info: UpdateInfo) -> None:
        """Start to receive."""
        self.receiver.update(info)

    async def transfer_status(self) -> TransferStatus:
        """State of the receiver."""
        return self.receiver.status()

    async def wait_transfer(self, stage: Stage, timeout_s: float) -> TransferStatus:
        """Long poll."""
        return await self.receiver.wait(stage, timeout_s)

    async def commit(self, version: int) -> None:
        """Serve `version` from the next token on."""
        await self.core.answer()
        try:
            await self._phase("load")
        except LinkError as exc:
            self.core.version = None
            raise EngineFailure(f"loading version {version} failed: {exc}") from exc
        if self._settings.commit_s:
            await asyncio.sleep(self._settings.commit_s)
        self.core.version = version
        self.receiver.committed()

    async def abort_transfer(self, generation: int, reason: str) -> TransferStatus:
        """Leave the generation."""
        return self.receiver.abort(reason)

    async def shutdown_transfer(self) -> None:
        """Leave the generation for good."""
        self.receiver.shutdown()

    # -- faults

    def order(self, order: FaultOrder) -> FaultReport:
        """Change what goes wrong."""
        if order.clear:
            self.plan.clear()
            self.core.thaw()
        for rule in order.rules:
            self.plan.add(rule)
        if order.lie_version is not None:
            self.plan.lie_version = order.lie_version
        if order.freeze is not None:
            (self.core.freeze if order.freeze else self.core.thaw)()
        if order.restart:
            self.restart()
        return FaultReport(fired=dict(self.plan.fired))

    async def _fault(self, request: Request) -> Response:
        try:
            body = await request.body()
            order = FaultOrder.model_validate_json(body) if body else FaultOrder()
        except ValidationError as exc:
            return JSONResponse({"error": str(exc)}, 400)
        return JSONResponse(self.order(order).model_dump())

    async def _phase(self, name: str) -> None:
        """Let the plan spoil a phase. Raises LinkError; a hang ends when its task is cancelled."""
        rule = self.plan.hit(name)
        match rule.action if rule is not None else None:
            case "exit":
                self._kill()
                await asyncio.Event().wait()
            case "hang":
                await asyncio.Event().wait()
            case "slow":
                assert rule is not None
                await asyncio.sleep(rule.delay_s)
            case "error" | "conflict" | "drop_reply":
                raise LinkError("injected fault")
            case None:
                pass
