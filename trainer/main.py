"""`muster trainer`: one rank of the trainer, from start to exit code.

    meet -> load (or resume) -> listen (rank 0) -> step loop -> last checkpoint -> leave

SIGTERM ends rank 0 after the current step, with a checkpoint; it also frees a transfer that is
under way. The other ranks follow rank 0 and ignore the signal. Ranks die with their launcher.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from pathlib import Path

import torch

from protocol.records import TrainBatch
from trainer.checkpoint import Checkpoints
from trainer.config import TrainerConfig, admin_token, is_agent_given, rank_environment
from trainer.desk import Desk
from trainer.generations import Generations
from trainer.learner import Learner
from trainer.loop import Loop
from trainer.model import load_model, wire_dtype
from trainer.packing import check_sample
from trainer.sender import Sender
from trainer.server import make_app, start_server
from trainer.world import World
from transfer.group import Backend

_LOG = logging.getLogger("muster.trainer")
_PR_SET_PDEATHSIG = 1


def run(config: TrainerConfig) -> int:
    """Run this process's rank. Returns the exit code."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    place = rank_environment()
    if place.world_size > 1:
        _die_with_parent()
    token = admin_token() if place.rank == 0 else ""
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)
    world = World(
        place,
        timeout_s=config.rank_timeout_s,
        has_rendezvous=place.world_size > 1 and is_agent_given(),
    )
    try:
        model_path = Path(config.model.path)
        learner = Learner(load_model(model_path, world), world, config)
        checkpoints = Checkpoints(
            config.output_dir / "checkpoints",
            world,
            model_path=model_path,
            keep=config.checkpoint.keep,
        )
        if config.checkpoint.resume and checkpoints.restore(learner) is not None:
            _LOG.info("resumed at version %d", learner.version)
        sender = Sender(
            learner.model,
            world,
            dtype=wire_dtype(config.model, world.device),
            bucket_bytes=config.weight_broadcast.bucket_mb << 20,
        )
        loop = Loop(config, world=world, learner=learner, sender=sender, checkpoints=checkpoints)
        if world.is_first:
            _lead(config, world, learner, loop, token)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            loop.follow()
    finally:
        world.close()
    if world.size > 1:
        _leave()
    return 0


def _leave() -> None:
    """End this rank now, in order: everything is on disk, and the group is left. Threads that
    torch keeps for a group of several ranks can abort the process while the interpreter ends
    (seen: SIGABRT, "terminate called without an active exception"), which looks like a crash."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _lead(config: TrainerConfig, world: World, learner: Learner, loop: Loop, token: str) -> None:
    """Rank 0: control server around the loop."""
    desk = Desk(
        run_id=config.run_id,
        boot=uuid.uuid4().hex,
        first_step=learner.version,
        max_steps=config.max_steps,
        max_queued=config.max_queued_batches,
    )
    backend = resolve_backend(config, world.device)
    generations = Generations(
        host=config.weight_broadcast.host,
        backend=backend,
        device=world.device if backend == "nccl" else torch.device("cpu"),
    )
    vocab_size = int(learner.model.config.vocab_size)

    def check_batch(batch: TrainBatch) -> str | None:
        if not batch.samples:
            return "batch has no samples"
        limit = config.micro_batch_tokens
        problems = (
            check_sample(sample, vocab_size=vocab_size, max_tokens=limit)
            for sample in batch.samples
        )
        return next((problem for problem in problems if problem is not None), None)

    def stop(signum: int, frame: object) -> None:
        # Locks may be held by the code that the signal interrupted.
        threading.Thread(target=_stop, args=(desk, generations), daemon=True).start()

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # uvicorn sets it only on sockets of its own; without it every answer waits 40 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((config.host, config.port))
        signal.signal(signal.SIGTERM, stop)
        server = start_server(
            make_app(desk, generations, check_batch=check_batch), sock, token=token
        )
        _LOG.info("control server on %s:%d", config.host, config.port)
        try:
            loop.lead(desk)
        finally:
            generations.close("trainer is stopping")
            server.stop()


def _stop(desk: Desk, generations: Generations) -> None:
    desk.stop()
    generations.close("trainer is stopping")


def resolve_backend(config: TrainerConfig, device: torch.device) -> Backend:
    """Backend of the transfer generations. Raises ValueError for nccl without CUDA."""
    wanted = config.weight_broadcast.backend
    if wanted == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if wanted == "nccl" and device.type != "cuda":
        raise ValueError("weight_broadcast.backend = nccl needs CUDA, this machine has none")
    return wanted


def _die_with_parent() -> None:
    """SIGKILL for this rank when the agent that started it dies, however that happens."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the launching process is gone")
