"""`EngineControl` of the real engine: vLLM's engine client, and our calls into its workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar

from engine.config import EngineConfig
from engine.control import Conflict, EngineFailure, Stage
from engine.core_link import CoreLink
from engine.counters import TokenCounter
from engine.gate import Gatekeeper
from engine.transfer_status import is_settled
from protocol.engine_api import Identity, InitInfo, TransferStatus, UpdateInfo

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

T = TypeVar("T")

# vLLM's version string once a commit has failed half-way: it labels spans of tokens.
UNKNOWN_VERSION = "unknown"
_POLL_MIN_S = 0.005
_POLL_MAX_S = 0.05


class VllmControl:
    """See `engine.control.EngineControl`."""

    def __init__(
        self, config: EngineConfig, keeper: Gatekeeper, link: CoreLink, counter: TokenCounter
    ) -> None:
        self._config = config
        self._keeper = keeper
        self._link = link
        self._counter = counter
        self._generation = 0
        self._started_at = time.time()

    @property
    def keeper(self) -> Gatekeeper:
        """The engine's gate."""
        return self._keeper

    @property
    def generation(self) -> int:
        """Highest generation given to `init_transfer`."""
        return self._generation

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's engine client."""
        return self._link.llm

    def identity(self) -> Identity:
        """From memory."""
        gate, status = self._keeper.gate, self._link.status
        parallel = self.llm.vllm_config.parallel_config
        return Identity(
            run_id=self._config.run_id,
            group=self._config.group,
            index=self._config.index,
            life=self._config.life,
            boot_id=gate.boot_id,
            world_size=parallel.world_size_across_dp,
            weight_version=gate.weight_version,
            admission=gate.admission,
            admission_reason=gate.reason,
            paused=self._link.paused,
            core_age_s=self._link.age_s,
            generation=self._generation,
            transfer_state=status.state,
            staged_version=status.staged_version,
            running_requests=self.llm.output_processor.get_num_unfinished_requests(),
            generated_tokens=self._counter.total,
            started_at=self._started_at,
            fault_tolerance=bool(getattr(parallel, "enable_fault_tolerance", False)),
        )

    def liveness_problem(self) -> str | None:
        """Why the core should be taken for dead."""
        if self._link.is_dead:
            return "engine core is dead"
        age_s = self._link.age_s
        if age_s > self._config.inference.liveness_timeout_s:
            return f"engine core has not answered for {age_s:.1f} s"
        return None

    async def pause(self, mode: str) -> None:
        """vLLM's pause. Raises Conflict for a mode that it does not know."""
        if mode not in ("abort", "wait", "keep"):
            raise Conflict(f"pause mode {mode!r} is none of abort, wait, keep")
        await _tried(self.llm.pause_generation(mode=mode))  # type: ignore[arg-type]
        self._link.paused = True

    async def resume(self) -> None:
        """vLLM's resume."""
        await _tried(self.llm.resume_generation())
        self._link.paused = False

    async def init_transfer(self, info: InitInfo) -> None:
        """Every worker starts to join."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._generation = info.generation
        request = WeightTransferInitRequest(init_info=info.model_dump())
        await _tried(self.llm.init_weight_transfer_engine(request))
        await self.transfer_status()

    async def start_update(self) -> None:
        """Every worker drops what it has staged."""
        await _tried(self._link.call_status("muster_forget"))

    async def receive(self, info: UpdateInfo) -> None:
        """Every worker starts to receive."""
        status = await self.transfer_status()
        if status.state not in ("joined", "staged"):
            raise Conflict(f"cannot receive: the transfer is {status.state}")
        await _tried(self._link.call_status("muster_receive", info.model_dump()))

    async def transfer_status(self) -> TransferStatus:
        """Ask every worker."""
        return await _tried(self._link.call_status("muster_status"))

    async def wait_transfer(self, stage: Stage, timeout_s: float) -> TransferStatus:
        """Ask again and again, more and more seldom."""
        deadline = time.monotonic() + timeout_s
        pause_s = _POLL_MIN_S
        while True:
            status = await self.transfer_status()
            left_s = deadline - time.monotonic()
            if is_settled(status, stage) or left_s <= 0:
                return status
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, _POLL_MAX_S)

    async def commit(self, version: int) -> None:
        """Load on every worker, forget all prefixes, publish. Requests in flight are computed again
        from their tokens when generation resumes, so no key or value of old weights is left."""
        start = time.monotonic()
        try:
            await self._load(version)
        except Exception as exc:  # vLLM raises whatever the worker raised, as a bare Exception
            await self._mark_unknown()
            raise EngineFailure(f"loading version {version} failed: {exc}") from exc
        await self.transfer_status()
        log.info("loaded version %d in %.3f s", version, time.monotonic() - start)

    async def abort_transfer(self, generation: int, reason: str) -> TransferStatus:
        """Every worker frees its receiver."""
        return await _tried(self._link.call_status("muster_abort", generation, reason))

    async def shutdown_transfer(self) -> None:
        """Every worker leaves the generation."""
        await _tried(self.llm.shutdown_weight_transfer_engine())
        await self.transfer_status()

    async def _load(self, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.llm.start_weight_update()
        await self.llm.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
        if not await self.llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineFailure("the prefix cache could not be reset")
        await self.llm.finish_weight_update(str(version))
        published = await self.llm.get_weight_version()
        if published != str(version):
            raise EngineFailure(f"the core says {published} after publishing {version}")

    async def _mark_unknown(self) -> None:
        """Best effort: close vLLM's update session on workers that still have it open (the one that
        failed has not), and label tokens that should never be made. What counts is that the caller
        closes the gate."""
        try:
            if self.llm.vllm_config.parallel_config.world_size_across_dp > 1:
                await self.llm.finish_weight_update()
        except Exception as exc:  # noqa: BLE001 - expected from the worker that failed
            log.info("closing the update session after a failed load: %s", exc)
        try:
            await self.llm.update_weight_version(UNKNOWN_VERSION)
        except Exception as exc:  # noqa: BLE001 - the core may be dead
            log.warning("the core did not take the unknown version: %s", exc)


async def _tried(call: Awaitable[T]) -> T:
    """The call's result. vLLM raises bare Exceptions for what failed in a worker: map them."""
    try:
        return await call
    except Exception as exc:
        raise EngineFailure(f"{type(exc).__name__}: {exc}") from exc
