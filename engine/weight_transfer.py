"""Our weight-transfer backend inside a vLLM worker, and the worker calls around it.

    init -> Receiver.join      (vLLM's init_weight_transfer_engine)
    muster_receive             stage, in a thread, while the core generates
    update -> load             (vLLM's update session: start, update, finish; inside the pause)

Rules:
- A worker call returns at once, except the load. The engine core calls workers between two steps,
  so what blocks here stops generation.
- vLLM's update session is opened only around the load: a transfer that is aborted before leaves no
  session open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from engine.load import load_staged
from engine.receiver import Receiver
from protocol.engine_api import Body, InitInfo, UpdateInfo

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

    from transfer.group import Backend


class CommitInfo(Body):
    """vLLM's `update_info` of our backend: load what is staged, which must be `version`."""

    version: int = Field(ge=0)


class MusterWeightTransferEngine(WeightTransferEngine[InitInfo, CommitInfo]):  # type: ignore[type-var]
    """One worker's backend. See the module."""

    init_info_cls = InitInfo
    update_info_cls = CommitInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        backend: Backend = "nccl" if device.type == "cuda" else "gloo"
        self.receiver = Receiver(
            backend=backend, device=device if backend == "nccl" else torch.device("cpu")
        )

    @property
    def rank(self) -> int:
        """This worker among all workers of the engine, 0-based."""
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Start to join; returns at once."""
        self.receiver.join(init_info, init_info.rank_offset + self.rank)

    def start_weight_update(self) -> None:
        """Nothing: the session is opened only to load."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load what is staged. Blocks; the engine is paused."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: CommitInfo) -> None:
        """Load `update_info.version`. Raises ReceiverState, before anything is touched, when it is
        not what is staged."""
        staged = self.receiver.staged(update_info.version)
        load_staged(self.model, self.model_config, staged.tensors())
        self.receiver.forget()

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Leave the generation."""
        self.receiver.close()


class WorkerExtension:
    """Calls that vLLM's worker gets from us (`--worker-extension-cls`)."""

    weight_transfer_engine: MusterWeightTransferEngine

    def muster_receive(self, info: dict[str, Any]) -> dict[str, Any]:
        """Start to stage; returns the receiver's status."""
        self.weight_transfer_engine.receiver.receive(UpdateInfo.model_validate(info))
        return self.muster_status()

    def muster_forget(self) -> dict[str, Any]:
        """Drop what is staged; returns the receiver's status."""
        self.weight_transfer_engine.receiver.forget()
        return self.muster_status()

    def muster_abort(self, generation: int, reason: str) -> dict[str, Any]:
        """Free a blocked receiver; returns the receiver's status."""
        return self.weight_transfer_engine.receiver.abort(generation, reason).model_dump()

    def muster_status(self) -> dict[str, Any]:
        """The receiver's TransferStatus."""
        return self.weight_transfer_engine.receiver.status().model_dump()
