"""`muster orchestrator`: the admin plane, the rollouts and the batches of one run.

    trainer --published v--> plane --v in service--> rollouts --batch of step v--> trainer

Wiring only. What is decided is in `plane/` and `rollouts/`; what is sent is in `drivers/`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette

from orchestrator.api import make_app
from orchestrator.config import OrchestratorConfig, admin_token, api_key
from orchestrator.drivers.admin_http import AdminHttp, NoAnswer, Refused
from orchestrator.drivers.engines import EngineDriver
from orchestrator.drivers.journal import Journal, JournalInUse
from orchestrator.drivers.launcher import LauncherDesk
from orchestrator.drivers.prober import Prober
from orchestrator.drivers.router import DirectRouting, make_routing
from orchestrator.drivers.runtime import Drivers, Runtime
from orchestrator.drivers.trainer import TrainerLink
from orchestrator.errors import RunFailed
from orchestrator.monitor.console import Console
from orchestrator.monitor.records import Outcome
from orchestrator.monitor.wandb_sink import WandbSink
from orchestrator.plane.health import ProbeSettings
from orchestrator.plane.state import PlaneSettings
from orchestrator.progress import Progress
from orchestrator.recovery import Beginning, begin
from orchestrator.rollouts.errors import RolloutsFailed
from orchestrator.steps import StepLoop

log = logging.getLogger(__name__)

_WANDB_CLOSE_S = 30.0


def run(config: OrchestratorConfig) -> int:
    """Run to the end. Exit code: 0 finished, 1 failed, 2 no token, 128 + signal when stopped."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        admin_token()
    except ValueError as error:
        print(f"muster orchestrator: {error}", file=sys.stderr)
        return 2
    return uvloop.run(_run(config))


async def _run(config: OrchestratorConfig) -> int:
    console = Console(config.max_steps, sys.stdout, sys.stdout.isatty())
    wandb = WandbSink(config.wandb, config.run_id, config.output_dir)
    progress = Progress(console, wandb, time.monotonic)
    stopped_by: list[int] = []
    outcome: Outcome = "finished"
    cause = ""
    body = asyncio.create_task(_body(config, progress), name="run")

    def stop(number: int) -> None:
        stopped_by.append(number)
        body.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        await body
    except asyncio.CancelledError:
        outcome, cause = "interrupted", signal.Signals(stopped_by[0]).name
    except (RunFailed, RolloutsFailed) as error:
        outcome, cause = "failed", str(error)
        console.event(cause, "error")
    await asyncio.to_thread(wandb.close, _WANDB_CLOSE_S)
    progress.final(outcome, cause, str(config.output_dir))
    if outcome == "interrupted":
        return 128 + stopped_by[0]
    return 0 if outcome == "finished" else 1


async def _body(config: OrchestratorConfig, progress: Progress) -> None:
    """Everything between the first probe and the last step."""
    token = admin_token()
    client = config.model.client
    async with contextlib.AsyncExitStack() as stack:
        journal = _journal(config)
        stack.callback(journal.close)
        beginning = _begin(config, journal)
        core = beginning.core

        def clock() -> float:
            return time.monotonic() + beginning.offset

        http = await stack.enter_async_context(AdminHttp(token, client.connect_timeout_s))
        runtime = Runtime(core, journal, clock, lambda notice: steps.on_notice(notice))
        link = await stack.enter_async_context(
            TrainerLink(
                config.trainer_url,
                token,
                clock,
                on_ready=runtime.post,
                on_step=progress.trainer_step,
            )
        )
        engines = EngineDriver(http, core.url_of, clock, lease_s=config.groups.lease_s)
        prober = Prober(
            engines,
            probe_settings(config),
            clock,
            runtime.post,
            run_id=config.run_id,
            timeout_s=config.probe.timeout_s,
        )
        plain = await stack.enter_async_context(AdminHttp(None, client.connect_timeout_s))
        router = make_routing(client, plain, runtime.post)
        desk = LauncherDesk(config.run_id, runtime.post)
        steps = StepLoop(
            config,
            core.snapshot,
            link,
            progress,
            clock,
            api_key(),
            url_for=router.url_for if isinstance(router, DirectRouting) else None,
            start=beginning.start,
        )
        launcher = desk if config.has_launcher else None
        drivers = Drivers(engines, prober, link, router, launcher)
        api = _make_api(config, make_app(token, desk, core.snapshot))
        background: dict[str, Coroutine[Any, Any, None]] = {
            "plane": runtime.run(drivers, beginning.first),
            "prober": prober.run(),
            "router": router.run(),
            "trainer link": link.watch(),
            "api": api.serve(),
        }
        await _until_done(steps.run, background, config.stop_timeout_s)
        desk.is_finished = True
        try:
            await link.stop()
        except (NoAnswer, Refused) as error:
            # It ends by itself after the last step; this only hurries it.
            log.info("trainer stop: %s", error)


def _journal(config: OrchestratorConfig) -> Journal:
    try:
        return Journal(config.output_dir / "journal.jsonl", time.time)
    except JournalInUse as error:
        raise RunFailed(str(error)) from None


def _begin(config: OrchestratorConfig, journal: Journal) -> Beginning:
    client = config.model.client
    groups = client.admin_engine_groups
    assert groups is not None
    return begin(
        journal,
        config.output_dir,
        run_id=config.run_id,
        settings=plane_settings(config),
        urls=client.admin_base_url,
        groups=groups,
        monotonic=time.monotonic,
        wall_clock=time.time,
    )


async def _until_done(
    main: Callable[[], Awaitable[None]],
    background: dict[str, Coroutine[Any, Any, None]],
    stop_timeout_s: float,
) -> None:
    """Run `main` while all of `background` live; the end of one of those is an error."""
    tasks = [asyncio.create_task(job, name=name) for name, job in background.items()]
    job = asyncio.ensure_future(main())
    try:
        await asyncio.wait([job, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
                raise RunFailed(f"the {task.get_name()} ended by itself")
        await job
    finally:
        for task in [job, *tasks]:
            task.cancel()
        await asyncio.wait([job, *tasks], timeout=stop_timeout_s)


class _Api(uvicorn.Server):
    """Leaves the signals to the run."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Nothing to capture."""
        yield


def _make_api(config: OrchestratorConfig, app: Starlette) -> _Api:
    return _Api(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
    )


def plane_settings(config: OrchestratorConfig) -> PlaneSettings:
    """The plane's part of the config."""
    groups, broadcast = config.groups, config.weight_broadcast
    return PlaneSettings(
        admin_timeout_s=config.model.client.admin_timeout_s,
        join_timeout_s=broadcast.join_timeout_s,
        stage_timeout_s=broadcast.stage_timeout_s,
        pause_timeout_s=broadcast.pause_timeout_s,
        commit_timeout_s=broadcast.commit_timeout_s,
        update_timeout_s=broadcast.update_timeout_s,
        max_regroups=broadcast.max_regroups,
        startup_timeout_s=groups.startup_timeout_s,
        startup_wait_s=groups.startup_wait_s,
        max_evictions=groups.max_evictions,
        eviction_window_s=groups.eviction_window_s,
        quarantine_s=groups.quarantine_s,
        min_serving_groups=groups.min_serving_groups,
        no_capacity_timeout_s=groups.no_capacity_timeout_s,
        retry_wait_s=config.update_retry.wait_s,
        retry_wait_max_s=config.update_retry.wait_max_s,
        has_launcher=config.has_launcher,
    )


def probe_settings(config: OrchestratorConfig) -> ProbeSettings:
    """The prober's part of the config."""
    probe, groups = config.probe, config.groups
    return ProbeSettings(
        interval_s=probe.interval_s,
        retry_s=probe.retry_s,
        backoff_max_s=probe.backoff_max_s,
        success_threshold=probe.success_threshold,
        failure_threshold=probe.failure_threshold,
        stall_timeout_s=groups.stall_timeout_s,
        core_hung_s=groups.core_hung_s,
    )
