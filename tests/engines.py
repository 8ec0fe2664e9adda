"""A real engine as a process, for tests: started, watched, stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.config import EngineConfig
from protocol.ids import Slot
from tests.models import build_tiny_qwen3

_START = (
    "import sys\n"
    "from pathlib import Path\n"
    "from engine.config import EngineConfig\n"
    "from engine.main import run\n"
    "sys.exit(run(EngineConfig.model_validate_json(Path(sys.argv[1]).read_text())))\n"
)
_ROOT = Path(__file__).parents[1]
_SLOT = Slot(0, 0)


@dataclass
class RunningEngine:
    """A started engine. `weights` are those of its checkpoint, by checkpoint name; it holds no
    policy version yet, and its gate is closed."""

    url: str
    slot: Slot
    process: subprocess.Popen[bytes]
    log_path: Path
    model_dir: Path
    weights: dict[str, torch.Tensor]
    admin_token: str
    start_s: float

    def log(self) -> str:
        """Everything that the engine wrote."""
        return self.log_path.read_text(errors="replace")


def build_engine_model(path: Path, seed: int) -> Path:
    """A random Qwen3 that vLLM serves on a CPU, with a tokenizer of bytes."""
    build_tiny_qwen3(path, seed, head_dim=32)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(path)
    return path


@contextmanager
def start_real_engine(
    directory: Path,
    *,
    slot: Slot = _SLOT,
    run_id: str = "test",
    admin_token: str = "test-token",
    api_key: str | None = None,
    model_dir: Path | None = None,
    inference: dict[str, Any] | None = None,
    port: int | None = None,
    deadline_s: float = 180.0,
) -> Iterator[RunningEngine]:
    """`muster engine` in a session of its own, up and closed; stopped at the end, by force if it
    must be. Start it from the main thread: the process dies with the thread that started it."""
    model_dir = model_dir or build_engine_model(directory / "model", seed=0)
    config = EngineConfig.model_validate(
        {
            "run_id": run_id,
            "model": {"path": str(model_dir), "max_model_len": 1024},
            "inference": inference or {},
            "port": port or _free_port(),
            "group": slot.group,
            "index": slot.index,
            "output_dir": str(directory),
        }
    )
    log_path = directory / f"engine-{slot.engine_id}.log"
    start = time.monotonic()
    process = _spawn(config, directory, log_path, admin_token, api_key)
    engine = RunningEngine(
        url=f"http://127.0.0.1:{config.port}",
        slot=slot,
        process=process,
        log_path=log_path,
        model_dir=model_dir,
        weights=load_file(model_dir / "model.safetensors"),
        admin_token=admin_token,
        start_s=0.0,
    )
    try:
        _wait_alive(engine, start + deadline_s)
        engine.start_s = time.monotonic() - start
        yield engine
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], grace_s: float = 15.0) -> int:
    """End the engine in order, else by force; returns its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait(grace_s)


def _spawn(
    config: EngineConfig, directory: Path, log_path: Path, admin_token: str, api_key: str | None
) -> subprocess.Popen[bytes]:
    plan = directory / f"engine-{config.slot.engine_id}.json"
    plan.write_text(config.model_dump_json())
    env = {
        **os.environ,
        "MUSTER_ADMIN_TOKEN": admin_token,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
        "TMPDIR": str(directory),
        "VLLM_RPC_BASE_PATH": _socket_dir(directory),
    }
    env.pop("MUSTER_API_KEY", None)
    if api_key is not None:
        env["MUSTER_API_KEY"] = api_key
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _START, str(plan)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_alive(engine: RunningEngine, deadline: float) -> None:
    with httpx.Client(timeout=2.0) as http:
        while True:
            try:
                if http.get(f"{engine.url}/liveness").status_code == 200:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            if engine.process.poll() is not None:
                raise AssertionError(f"engine ended at start:\n{engine.log()[-4000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"engine is not up in time:\n{engine.log()[-4000:]}")
            time.sleep(0.1)


def _socket_dir(directory: Path) -> str:
    """vLLM's sockets need a short path (about 100 characters); a long one goes to /tmp."""
    return str(directory) if len(str(directory)) < 60 else "/tmp"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
