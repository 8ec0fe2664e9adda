"""Real processes for integration tests: fake engines and the real vllm-router.

Every process has a log file, says itself when it is up (or is asked until a deadline), and is gone
after its `with` block whatever state it is in: stopped processes too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from protocol.ids import Slot

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.02


@dataclass(slots=True)
class FakeEngineProcess:
    """One `python -m engine.fake`. Signals go to it alone; it has no children."""

    slot: Slot
    url: str
    process: subprocess.Popen[str]
    log: Path

    def signal(self, number: signal.Signals) -> None:
        """SIGKILL is a crash, SIGSTOP a hang, SIGCONT its end."""
        self.process.send_signal(number)


@dataclass(slots=True)
class RouterProcess:
    """The real vllm-router."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    def workers(self) -> list[str]:
        """The router's own listing, sorted. Raises httpx.HTTPError when it does not answer."""
        answer = httpx.get(f"{self.url}/list_workers", timeout=2.0, trust_env=False)
        answer.raise_for_status()
        return sorted(answer.json()["urls"])


def clean_environment(admin_token: str) -> dict[str, str]:
    """Our own environment without proxies, with the token."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return {**kept, "MUSTER_ADMIN_TOKEN": admin_token}


@contextlib.contextmanager
def fake_engine_processes(
    slots: Sequence[Slot], *, admin_token: str, log_dir: Path, args: Sequence[str] = ()
) -> Iterator[list[FakeEngineProcess]]:
    """One process a slot, all started at once; yields when every one listens."""
    with contextlib.ExitStack() as stack:
        started = []
        for slot in slots:
            log = log_dir / f"{slot.engine_id}.log"
            command = [sys.executable, "-m", "engine.fake", "--port", "0"]
            command += ["--group", str(slot.group), "--index", str(slot.index), *args]
            process = stack.enter_context(running(command, log, admin_token))
            started.append((slot, process, log))
        yield [
            FakeEngineProcess(slot, _first_line(process, log), process, log)
            for slot, process, log in started
        ]


@contextlib.contextmanager
def router_process(
    *,
    log_dir: Path,
    port: int | None = None,
    args: Sequence[str] = (),
    is_waited_for: bool = True,
) -> Iterator[RouterProcess]:
    """A vllm-router, empty unless `args` name members; health checks each second on `/ready`. It
    answers by then, unless the caller wants to see its port open."""
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    log = log_dir / f"router-{port}.log"
    flags = {
        "--host": "127.0.0.1",
        "--port": port,
        "--prometheus-port": free_port(),
        "--policy": "consistent_hash",
        "--request-id-headers": "x-session-id",
        "--worker-startup-timeout-secs": 5,
        "--worker-startup-check-interval": 1,
        "--health-check-endpoint": "/ready",
        "--health-check-interval-secs": 1,
        "--health-check-timeout-secs": 2,
        "--health-failure-threshold": 2,
        "--health-success-threshold": 1,
        "--cb-failure-threshold": 5,
        "--cb-timeout-duration-secs": 5,
        "--cb-success-threshold": 1,
        "--request-timeout-secs": 14400,
        "--log-level": "warning",
    }
    command = [str(Path(sys.executable).with_name("vllm-router"))]
    command += [*(str(part) for pair in flags.items() for part in pair), *args]
    with running(command, log, admin_token="", is_piped=False) as process:
        router = RouterProcess(url, process, log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while is_waited_for and not _answers(router):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the router did not start:\n{log.read_text()}")
            time.sleep(_POLL_S)
        yield router


def free_port() -> int:
    """A port that was free a moment ago; for programs that cannot bind port 0."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def _answers(router: RouterProcess) -> bool:
    try:
        router.workers()
        return True
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def running(
    command: list[str], log: Path, admin_token: str, *, is_piped: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """A process, and its end. `is_piped`: stdout is for the caller, who reads the first lines. Not
    for a router: it says something at every request, whatever its log level, and stands still once
    a pipe that nobody reads is full."""
    with log.open("w") as sink:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=clean_environment(admin_token),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_piped else sink,
            stderr=sink,
            text=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_TIMEOUT_S)
        if process.stdout is not None:
            process.stdout.close()


def _first_line(process: subprocess.Popen[str], log: Path) -> str:
    """The URL that a fake engine prints once it listens."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    line = process.stdout.readline().strip() if ready else ""
    if not line.startswith("http://"):
        raise RuntimeError(f"a fake engine did not start: {line!r}\n{log.read_text()}")
    return line
