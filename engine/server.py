"""Build vLLM's engine client and API server, with us plugged in, and serve until told to stop.

    config -> vLLM's arguments -> engine core -> app (our plugin adds routes and gate) -> serve

These are vLLM's own steps of `vllm serve`, taken one by one, because two things must happen in
between: the engine core is forked off where that is possible, and our stat logger is handed in.
Import this module only after the environment is set.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
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

_BOOT_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Served:
    """What the endpoint plugin serves."""

    control: VllmControl
    link: CoreLink
    secrets: EngineSecrets


async def serve(config: EngineConfig, tokens: EngineSecrets, machine: Machine) -> None:
    """Serve until SIGTERM or SIGINT, or until the engine core is gone."""
    signal.signal(signal.SIGTERM, _interrupt)  # until vLLM's server puts its own in place
    args = parse_arguments(vllm_argv(config, machine))
    check_address(config.host, config.port)
    counter = TokenCounter()
    llm = make_engine(args, counter, by_fork=starts_by_fork(config, machine))
    # Only now: a core that is forked with the socket would keep the port when we are gone.
    address, sock = setup_server(args, reuse_port=False)
    try:
        await llm.reset_mm_cache()
        args.muster = make_served(config, tokens, llm, counter)
        shutdown = await build_and_serve(llm, address, sock, args)
    finally:
        llm.shutdown(timeout=llm.vllm_config.shutdown_timeout)
        sock.close()
    await shutdown


def check_address(host: str, port: int) -> None:
    """Fail early. Raises OSError when somebody else has the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))


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


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt(f"signal {signum} while starting")
