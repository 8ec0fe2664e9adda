"""The step loop. Rank 0 decides what comes next and tells the others; all ranks do it together.

    publish v -> (send v, as often as asked) -> finish v -> batch -> train -> publish v + 1 -> ...

| state | waits for | at most |
|---|---|---|
| publishing | /finish of the published version; serves sends | update_timeout_s, then goes on |
| waiting_batch | the next batch; serves sends (a late engine catches up) | for ever, or /stop |
| training | nothing | |
| stopping | /stop, so that the last status can be read; serves sends | EXIT_LINGER_S |

A failed or aborted transfer is the answer to whoever asked for it and never ends the trainer.
"""

from __future__ import annotations

import logging
import time
from typing import Literal

from protocol.records import TrainBatch, decode_batch, encode_batch
from protocol.trainer_api import StepMetrics
from trainer.checkpoint import Checkpoints
from trainer.config import TrainerConfig
from trainer.desk import Conflict, Desk, SendCommand
from trainer.learner import Learner
from trainer.model import wire_dtype
from trainer.sender import Sender
from trainer.world import World
from transfer.errors import TransferError

_LOG = logging.getLogger("muster.trainer")

# Rank 0 speaks at least this often, so that the others' collectives never time out while it waits.
_IDLE_S = 5.0
EXIT_LINGER_S = 30.0

_IDLE, _SEND, _TRAIN, _SAVE, _STOP = range(5)


class Loop:
    """One rank's loop; `lead` on rank 0, `follow` on the others."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        world: World,
        learner: Learner,
        sender: Sender,
        checkpoints: Checkpoints,
    ) -> None:
        self._config = config
        self._world = world
        self._learner = learner
        self._sender = sender
        self._checkpoints = checkpoints
        self._dtype = wire_dtype(config.model, world.device)

    def lead(self, desk: Desk) -> None:
        """Rank 0: run until max_steps or stop; returns after the last checkpoint."""
        while not desk.is_stopping:
            self._publish(desk)
            if self._learner.version >= self._config.max_steps or desk.is_stopping:
                break
            batch = self._wait_batch(desk)
            if batch is not None:
                self._train(desk, batch)
        desk.report("stopping")
        if self._config.checkpoint.is_final:
            self._save()
        self._serve(desk, "stopping", timeout_s=EXIT_LINGER_S)
        self._world.share_int(_STOP)

    def follow(self) -> None:
        """Other ranks: do what rank 0 says until it says stop."""
        while (order := self._world.share_int()) != _STOP:
            if order == _SEND:
                self._sender.follow()
            elif order == _TRAIN:
                self._learner.train(decode_batch(self._world.share_bytes()))
            elif order == _SAVE:
                self._write_checkpoint()

    def _publish(self, desk: Desk) -> None:
        """Offer the current version until it is in service, or the update took too long."""
        version = self._learner.version
        desk.report("publishing", published=version, num_bytes=self._sender.num_bytes)
        timeout_s = self._config.weight_broadcast.update_timeout_s
        self._serve(desk, "publishing", timeout_s=timeout_s, for_version=version)
        if not desk.is_finished(version) and not desk.is_stopping:
            message = f"version {version} was not in service after {timeout_s:g} s; going on"
            _LOG.warning(message)
            desk.report("publishing", error=message)

    def _wait_batch(self, desk: Desk) -> TrainBatch | None:
        """The next batch, or None when stopping."""
        desk.report("waiting_batch")
        while not desk.is_stopping:
            batch = self._serve(desk, "waiting_batch", timeout_s=_IDLE_S)
            if batch is not None:
                return batch
        return None

    def _serve(
        self,
        desk: Desk,
        state: Literal["publishing", "waiting_batch", "stopping"],
        *,
        timeout_s: float,
        for_version: int | None = None,
    ) -> TrainBatch | None:
        """Do sends until a batch comes, the version is finished, stop, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            taken = desk.take(timeout_s=min(max(left, 0.0), _IDLE_S), for_version=for_version)
            if isinstance(taken, SendCommand):
                self._send(desk, taken)
                continue
            is_done = for_version is not None and desk.is_finished(for_version)
            if taken is not None or desk.is_stopping or is_done or left <= 0:
                return taken
            self._world.share_int(_IDLE)

    def _send(self, desk: Desk, command: SendCommand) -> None:
        """One transfer; every outcome goes to whoever asked."""
        try:
            desk.check_published(command.version)
        except Conflict as exc:
            command.future.set_exception(exc)
            return
        self._world.share_int(_SEND)
        left = command.deadline - time.monotonic()
        try:
            result = self._sender.send(command.group, version=command.version, timeout_s=left)
        except TransferError as exc:
            _LOG.warning("send of version %d failed: %s", command.version, exc)
            command.future.set_exception(exc)
        else:
            _LOG.info(
                "sent version %d over generation %d: %d bytes in %.3f s, digest %s",
                command.version,
                command.group.generation,
                result.num_bytes,
                result.duration_s,
                result.digest,
            )
            command.future.set_result(result)

    def _train(self, desk: Desk, batch: TrainBatch) -> None:
        desk.report("training")
        self._world.share_int(_TRAIN)
        self._world.share_bytes(encode_batch(batch) if self._world.size > 1 else b"")
        values = self._learner.train(batch)
        _LOG.info(
            "step %d: loss %.4f, grad norm %.3f, ratio max %.3f, mismatch %.2e, %.2f s",
            batch.step,
            values["loss"],
            values["grad_norm"],
            values["ratio_max"],
            values["logprob_mismatch"],
            values["step_s"],
        )
        desk.report("training", step=StepMetrics(step=batch.step, values=values))
        interval = self._config.checkpoint.interval_steps
        if interval and self._learner.version % interval == 0:
            self._save()

    def _save(self) -> None:
        self._world.share_int(_SAVE)
        self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        start = time.monotonic()
        path = self._checkpoints.save(self._learner, run_id=self._config.run_id, dtype=self._dtype)
        if self._world.is_first:
            _LOG.info("checkpoint %s in %.2f s", path, time.monotonic() - start)
