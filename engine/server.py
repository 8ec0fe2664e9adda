"""Build vLLM's engine client and API server, with us plugged in, and serve until told to stop.

    config -> vLLM's arguments -> engine core -> app (our plugin adds routes and gate) -> serve

These are vLLM's own steps of `vllm serve`, taken one by one, because two things must happen in
between: the engine core is forked off where that is possible, and our stat logger is handed in;
and because stopping has an order: first HTTP, then the core.
Import this module only after the environment is set.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from engine.config import EngineConfig, EngineSecrets
from engine.core_link import CoreLink
from engine.counters import TokenCounter
from engine.gate import Gatekeeper
from engine.parent_death import die_with_parent
from engine.vllm_control import VllmControl
from engine.vllm_settings import Machine, starts_by_fork, vllm_argv

log = logging.getLogger(__name__)

_BOOT_ID_BYTES = 8
# Far above any client's pool: a server that closes an idle connection just when a client uses it
# makes an outcome unknown.
_KEEP_ALIVE_S = 600
_GRACE_S = 2
_CORE_GRACE_S = 5.0  # requests are aborted at once; this is for workers to free shared memory


@dataclass(frozen=True, slots=True)
class Served:
    """What the endpoint plugin serves."""

    control: VllmControl
    link: CoreLink
    secrets: EngineSecrets


async def serve(config: EngineConfig, tokens: EngineSecrets, machine: Machine) -> int:
    """Serve until SIGTERM or SIGINT (0) or until the engine core is gone (1)."""
    signal.signal(signal.SIGTERM, _stop_starting)  # until the server takes over
    args = parse_arguments(vllm_argv(config, machine))
    counter = TokenCounter()
    llm = make_engine(args, counter, by_fork=starts_by_fork(config, machine))
    # Only now: a core that is forked with the socket would keep the port when we are gone.
    _, sock = setup_server(args, reuse_port=False)
    # Answers go out as headers, then body: without this the body waits 40 ms for an ACK.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        await llm.reset_mm_cache()
        served = make_served(config, tokens, llm, counter)
        args.muster = served
        tasks = await llm.get_supported_tasks()
        app = build_app(args, tasks, llm.model_config)
        await init_app_state(llm, app.state, args, tasks)
        await run_http(app, sock, served.link)
        return 1 if served.link.is_dead else 0
    finally:
        # In this order, since vLLM reports a core that ends before its listeners as a crash.
        if llm.output_handler is not None:
            llm.output_handler.cancel()
        llm.shutdown(timeout=_CORE_GRACE_S)
        sock.close()


async def run_http(app: Any, sock: socket.socket, link: CoreLink) -> None:
    """Serve `app` until a signal comes or the core is gone."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = Server(config)
    app.state.server = server  # vLLM's error handlers stop it when the core has died
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, server.stop)
    link.start(server.stop)
    try:
        await server.serve(sockets=[sock])
    finally:
        link.stop()


class Server(uvicorn.Server):
    """Uvicorn's server with signals left to us: its own handling ends the process by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing to capture."""
        yield

    def stop(self) -> None:
        """End soon: no new requests, a short time for those in flight."""
        self.should_exit = True


def parse_arguments(argv: list[str]) -> Any:
    """vLLM's namespace of `argv`. Exits with 2 and a message for options that vLLM refuses."""
    args = make_arg_parser(FlexibleArgumentParser(prog="muster engine")).parse_args(argv)
    validate_parsed_serve_args(args)
    return args


def make_engine(args: Any, counter: TokenCounter, *, by_fork: bool) -> AsyncLLM:
    """Start the engine core and wait until it is up."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    vllm_config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    if by_fork:
        # vLLM asks for `spawn` on CPUs because of thread pinning, which we do not use.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        os.register_at_fork(after_in_child=die_with_parent)
    return AsyncLLM.from_vllm_config(
        vllm_config=vllm_config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        stat_loggers=[counter.stat_logger],
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        disable_log_stats=engine_args.disable_log_stats,
    )


def make_served(
    config: EngineConfig, tokens: EngineSecrets, llm: AsyncLLM, counter: TokenCounter
) -> Served:
    """Gate, core link and control of a new boot."""
    keeper = Gatekeeper(
        engine_id=config.slot.engine_id,
        boot_id=secrets.token_hex(_BOOT_ID_BYTES),
        clock=time.monotonic,
        max_lease_s=config.inference.max_lease_s,
    )
    link = CoreLink(
        llm,
        interval_s=config.inference.core_ping_interval_s,
        exit_after_death_s=config.inference.exit_after_core_death_s,
    )
    return Served(VllmControl(config, keeper, link, counter), link, tokens)


def _stop_starting(signum: int, frame: object) -> None:
    """Nothing is served yet and nothing is worth saving; the kernel ends the core with us. An
    exception would not do: it may come up in any frame of vLLM's, some of which swallow it."""
    log.info("stopped while starting, by signal %d", signum)
    os._exit(0)
