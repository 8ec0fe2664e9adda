"""The step loop: policy version s in service -> batch of step s -> trainer -> version s + 1.

Back-pressure: a batch is handed over only when its policy version is in service, so the trainer is
never more than one step ahead; rollouts go on meanwhile, bounded by `max_off_policy_steps`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.config import OrchestratorConfig
from orchestrator.drivers.admin_http import NoAnswer, Refused
from orchestrator.drivers.runtime import Notice
from orchestrator.drivers.trainer import TrainerLink
from orchestrator.errors import RunFailed
from orchestrator.plane.commands import Fail, Report, Route, UpdateEnded
from orchestrator.plane.core import PlaneSnapshot
from orchestrator.progress import Progress
from orchestrator.rollouts.client import GenerationClient
from orchestrator.rollouts.env import load_environment
from orchestrator.rollouts.service import RolloutService
from orchestrator.rollouts.staleness import Admissions
from orchestrator.rollouts.tokenizer import PromptTokenizer

ResultT = TypeVar("ResultT")
# Rollout ids go on after a restart of the orchestrator; what is in flight then has used some.
_ROLLOUTS_A_START = 10**9


class StepLoop:
    """Follows the plane through `on_notice`; `run` ends after `max_steps`, or raises RunFailed."""

    def __init__(
        self,
        config: OrchestratorConfig,
        snapshot: Callable[[], PlaneSnapshot],
        link: TrainerLink,
        progress: Progress,
        clock: Callable[[], float],
        api_key: str | None,
        *,
        url_for: Callable[[str], str | None] | None = None,
        start: int = 0,
    ) -> None:
        """`url_for`: see GenerationClient. `start`: how many orchestrators this run has had."""
        self._config = config
        self._snapshot = snapshot
        self._link = link
        self._progress = progress
        self._clock = clock
        self._api_key = api_key
        self._start = start
        self._url_for = url_for
        self._admissions = Admissions()
        self._service: RolloutService | None = None
        self._version: int | None = None
        self._failure: str | None = None
        self._failed = asyncio.Event()
        self._wake = asyncio.Event()

    def on_notice(self, notice: Notice) -> None:
        """The plane did something that others should know."""
        snapshot = self._snapshot()
        match notice:
            case Route():
                for entry in notice.entries:
                    self._admissions.admit(entry.slot.engine_id, entry.boot_id, entry.version)
            case Report():
                self._progress.group_changed(notice, snapshot)
            case UpdateEnded():
                self._progress.update_ended(notice)
            case Fail():
                self._failure = notice.reason
                self._failed.set()
        self._version = snapshot.policy_version
        self._follow(snapshot)
        self._wake.set()

    async def run(self) -> None:
        """All steps."""
        first_step = await self._first_step()
        rollouts = self._config.rollouts
        async with GenerationClient(
            rollouts,
            self._config.model.client.base_url,
            api_key=self._api_key,
            url_for=self._url_for,
        ) as client:
            service = RolloutService(
                rollouts,
                client,
                load_environment(rollouts.env, rollouts.env_seed),
                PromptTokenizer(Path(self._config.model.path)),
                run_id=self._config.run_id,
                admissions=self._admissions,
                first_step=first_step,
                first_rollout=self._start * _ROLLOUTS_A_START,
                now=self._clock,
            )
            self._service = service
            await service.start()
            self._follow(self._snapshot())
            try:
                for step in range(first_step, self._config.max_steps):
                    await self._step(service, step)
                await self._settle()
            finally:
                self._service = None
                await service.stop()

    async def _step(self, service: RolloutService, step: int) -> None:
        batch, stats = await self._or_failure(service.next_batch(step))
        timeout_s = self._config.step_timeout_s
        try:
            await self._link.post_batch(batch, timeout_s)
        except (NoAnswer, Refused) as error:
            raise RunFailed(f"the trainer did not take the batch of step {step}: {error}") from None
        self._progress.batch_sent(stats, sum(service.stats().buffer.dropped.values()))
        await self._reach(step + 1, timeout_s)
        self._progress.step_done(step, self._snapshot())

    async def _first_step(self) -> int:
        """The step that comes next, once the version that it starts from is in service.

        The trainer knows it: it takes each batch once, and may have one of an orchestrator that
        was killed after handing it over.
        """
        await self._reach(0, None)
        try:
            async with asyncio.timeout(self._config.step_timeout_s):
                step = (await self._link.first_status()).next_step
        except TimeoutError:
            raise RunFailed(
                f"the trainer has not said its state within {self._config.step_timeout_s:g} s"
            ) from None
        version = self._version
        assert version is not None
        if step < version:
            raise RunFailed(
                f"the trainer wants the batch of step {step}, but version {version} was in service "
                "already: it went back to an older checkpoint. Start the whole run anew"
            )
        await self._reach(step, self._config.step_timeout_s)
        return step

    async def _reach(self, version: int, timeout_s: float | None) -> None:
        """Wait until `version` is in service. Without a time the plane's own deadlines for a
        fleet that does not serve are what bounds it."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._version is None or self._version < version:
                    self._check()
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            raise RunFailed(
                f"policy version {version} is not in service {timeout_s:g} s after its batch"
            ) from None
        self._check()

    async def _or_failure(self, job: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The job's result, unless the plane gives up before."""
        task = asyncio.ensure_future(job)
        failed = asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait([task, failed], return_when=asyncio.FIRST_COMPLETED)
            self._check()
            return await task
        finally:
            task.cancel()
            failed.cancel()

    async def _settle(self) -> None:
        """Let the last update end: engines resume, and the trainer hears that it is finished."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.weight_broadcast.update_timeout_s):
                while self._snapshot().update_version is not None:
                    self._wake.clear()
                    await self._wake.wait()

    def _check(self) -> None:
        if self._failure is not None:
            raise RunFailed(self._failure)

    def _follow(self, snapshot: PlaneSnapshot) -> None:
        """Rollouts sample while there is a version in service and enough groups serve it."""
        service = self._service
        version = snapshot.policy_version
        if service is None or version is None:
            return
        service.set_policy_version(version)
        reason = "" if snapshot.has_capacity else "(no capacity)"
        service.set_dispatch(snapshot.has_capacity, reason)
