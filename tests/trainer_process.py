"""A real trainer process, and receivers of its weights in the test process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import torch

from protocol.records import TrainBatch, encode_batch
from protocol.trainer_api import SendReply, TrainerStatus
from trainer.config import ADMIN_TOKEN_VARIABLE, TrainerConfig
from transfer.group import TransferGroup
from transfer.join import join
from transfer.receive import Staged, receive

ROOT = Path(__file__).resolve().parents[1]
TOKEN = "secret-of-the-test"
START_S = 90.0
TIMEOUT_S = 60.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class TrainerProcess:
    """A trainer under test and a client of its control server."""

    process: subprocess.Popen[bytes]
    client: httpx.Client
    log: Path

    def status(self, *, since: int = -1, wait_s: float = 0.0) -> TrainerStatus:
        """GET /status."""
        answer = self.client.get("/status", params={"since": since, "wait_s": wait_s})
        answer.raise_for_status()
        return TrainerStatus.model_validate_json(answer.content)

    def wait_for(self, **expected: Any) -> TrainerStatus:
        """Long-poll until the named fields have the given values."""
        deadline = time.monotonic() + TIMEOUT_S
        status = self.status()
        while any(getattr(status, name) != value for name, value in expected.items()):
            assert time.monotonic() < deadline, f"wanted {expected}, got {status}"
            status = self.status(since=status.seq, wait_s=5.0)
        return status

    def post(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        """POST a JSON body; the answer must have `status`."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, f"{path}: {answer.status_code} {answer.text}"
        return dict(answer.json())

    def post_batch(self, batch: TrainBatch, status: int = 200) -> dict[str, Any]:
        """POST /batch."""
        answer = self.client.post("/batch", content=encode_batch(batch))
        assert answer.status_code == status, f"/batch: {answer.status_code} {answer.text}"
        return dict(answer.json())

    def wait_exit(self) -> int:
        """Exit code of the process."""
        return self.process.wait(TIMEOUT_S)


@contextlib.contextmanager
def trainer_process(
    config: TrainerConfig, directory: Path, *, num_ranks: int = 1
) -> Iterator[TrainerProcess]:
    """Start a trainer, wait until it answers; kill what is left of it at the end."""
    path, log = directory / "trainer.json", directory / "trainer.log"
    path.write_text(config.model_dump_json())
    argv = [sys.executable, "-m"]
    if num_ranks > 1:
        argv += ["torch.distributed.run", "--nnodes", "1", "--max-restarts", "0"]
        argv += ["--nproc-per-node", str(num_ranks), "--master-addr", "127.0.0.1"]
        argv += ["--master-port", str(free_port()), "-m"]
    argv += ["launch.cli", "trainer", "@", str(path)]
    env = {**os.environ, ADMIN_TOKEN_VARIABLE: TOKEN, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as output, _client(config.port) as client:
        process = subprocess.Popen(
            argv, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True
        )
        trainer = TrainerProcess(process, client, log)
        try:
            _wait_until_up(trainer)
            yield trainer
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(TIMEOUT_S)


def _client(port: int) -> httpx.Client:
    return httpx.Client(
        base_url=f"http://127.0.0.1:{port}",
        headers={"Authorization": f"Bearer {TOKEN}"},
        timeout=TIMEOUT_S,
        trust_env=False,
    )


def _wait_until_up(trainer: TrainerProcess) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert trainer.process.poll() is None, trainer.log.read_text()
        assert time.monotonic() < deadline, trainer.log.read_text()
        try:
            trainer.status()
            return
        except httpx.ConnectError:
            time.sleep(0.05)


@dataclass
class Receivers:
    """Ranks 1.. of the trainer's generations, as threads of the test process."""

    trainer: TrainerProcess
    num: int = 1
    groups: list[TransferGroup] = field(default_factory=list)
    generation: int = 0
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._pool.shutdown()

    def close(self) -> None:
        """Leave the generation."""
        for group in self.groups:
            group.close()

    def join(self, generation: int) -> None:
        """Open a generation at the trainer and join it with all receivers."""
        self.close()
        self.generation = generation
        world_size = self.num + 1
        body = {"generation": generation, "world_size": world_size, "timeout_s": TIMEOUT_S}
        place = self.trainer.post("/transfer/open", **body)
        futures = [
            self._pool.submit(
                join,
                place["host"],
                place["port"],
                generation=generation,
                rank=rank,
                world_size=world_size,
                backend="gloo",
                device=torch.device("cpu"),
                timeout_s=TIMEOUT_S,
            )
            for rank in range(1, world_size)
        ]
        self.trainer.post("/transfer/join", generation=generation, timeout_s=TIMEOUT_S)
        self.groups = [future.result(TIMEOUT_S) for future in futures]

    def start_receive(self, version: int) -> list[Future[Staged]]:
        """Receive on all ranks."""
        return [
            self._pool.submit(receive, group, version=version, timeout_s=TIMEOUT_S)
            for group in self.groups
        ]

    def start_send(self, version: int) -> Future[httpx.Response]:
        """POST /transfer/send in a thread."""
        body = {"generation": self.generation, "version": version, "timeout_s": TIMEOUT_S}
        return self._pool.submit(self.trainer.client.post, "/transfer/send", json=body)

    def update(self, version: int) -> tuple[SendReply, list[Staged]]:
        """One whole transfer, with the digests compared."""
        staged = self.start_receive(version)
        answer = self.start_send(version).result(TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        reply = SendReply.model_validate_json(answer.content)
        results = [future.result(TIMEOUT_S) for future in staged]
        assert {result.digest for result in results} == {reply.digest}
        assert {result.num_bytes for result in results} == {reply.num_bytes}
        return reply, results
