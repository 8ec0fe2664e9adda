"""Config of the trainer. Importable without torch.

Root of `muster trainer @ plan/trainer.json`, and the `[trainer]` section of a run's TOML; what a
whole run shares (run id, model, weight broadcast, places) is filled in by the launcher.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from protocol.config import Config, ModelConfig, Port, Seconds, WeightBroadcastConfig

ADMIN_TOKEN_VARIABLE = "MUSTER_ADMIN_TOKEN"


class OptimizerConfig(Config):
    """AdamW with linear warm-up, constant after it."""

    learning_rate: float = Field(
        1e-3, ge=0, description="Peak learning rate. 0 leaves the weights as they are."
    )
    warmup_steps: int = Field(
        0, ge=0, description="Steps over which the learning rate rises linearly from 0."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of AdamW's second moment.")
    epsilon: float = Field(1e-8, gt=0, description="Added to AdamW's denominator.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of AdamW.")
    max_grad_norm: float = Field(
        1.0, gt=0, description="Gradients are scaled down to this L2 norm over all parameters."
    )


class LossConfig(Config):
    """Token-level clipped policy gradient; the formula is in trainer/loss.py."""

    clip_low: float = Field(
        0.2, gt=0, lt=1, description="A token's ratio counts no lower than 1 - clip_low."
    )
    clip_high: float = Field(
        0.28,
        gt=0,
        description="A token's ratio counts no higher than 1 + clip_high; above clip_low it leaves "
        "unlikely tokens room to grow.",
    )
    ratio_cap: float = Field(
        10.0,
        gt=1,
        description="Absolute cap of a token's importance ratio, also for negative advantages, "
        "where clipping alone has no upper bound.",
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="Logits are divided by this; equals the sampling temperature, so that both "
        "sides speak of the same distribution.",
    )

    @model_validator(mode="after")
    def _cap_is_above_clip(self) -> Self:
        if self.ratio_cap <= 1 + self.clip_high:
            raise ValueError(
                f"ratio_cap = {self.ratio_cap:g} must be above 1 + clip_high = "
                f"{1 + self.clip_high:g}"
            )
        return self


class CheckpointConfig(Config):
    """When the trainer writes checkpoints, and how many it keeps."""

    interval_steps: int = Field(
        50, ge=0, description="A checkpoint after every so many steps. 0: only at the end."
    )
    keep: int = Field(
        2, ge=1, description="Complete checkpoints that are kept; older ones are removed."
    )
    is_final: bool = Field(True, description="Write a checkpoint when the trainer ends in order.")
    resume: bool = Field(
        True, description="Go on from the newest complete checkpoint of this output directory."
    )


class TrainerConfig(Config):
    """One trainer: `num_ranks` processes, rank 0 answers the orchestrator."""

    run_id: str = Field("local", min_length=1, description="Id of the run.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The policy.")
    weight_broadcast: WeightBroadcastConfig = Field(
        default_factory=WeightBroadcastConfig, description="How weights travel to the engines."
    )
    output_dir: Path = Field(
        Path("outputs/run"), description="Directory of the run; checkpoints go below it."
    )
    host: str = Field("127.0.0.1", description="Address that the control server binds.")
    port: Port = Field(29400, description="Port of the control server.")
    num_ranks: Annotated[int, Field(ge=1, le=4096)] = Field(
        1, description="Trainer processes, one a device. The model is sharded over them (FSDP2)."
    )
    seed: int = Field(0, ge=0, description="Seed of everything random in the trainer.")
    max_steps: int = Field(60, ge=0, description="Optimizer steps; the trainer ends after them.")
    micro_batch_tokens: int = Field(
        4096,
        ge=16,
        description="Most tokens, padding included, in one forward pass of one rank. Samples are "
        "packed up to it; it bounds memory and does not change the result.",
    )
    max_queued_batches: int = Field(
        2, ge=1, le=64, description="Batches that may wait for the step loop."
    )
    num_threads: int = Field(1, ge=1, description="CPU threads of one rank's tensor operations.")
    rank_timeout_s: Seconds = Field(
        600.0, description="Longest wait of one rank for the others in a collective."
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW.")
    loss: LossConfig = Field(default_factory=LossConfig, description="Policy gradient loss.")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="Checkpoints of weights and optimizer."
    )

    @model_validator(mode="after")
    def _sample_fits(self) -> Self:
        if self.micro_batch_tokens < self.model.max_model_len:
            raise ValueError(
                f"micro_batch_tokens = {self.micro_batch_tokens} is below model.max_model_len = "
                f"{self.model.max_model_len}: the longest sample would not fit"
            )
        return self


class RankEnvironment(NamedTuple):
    """What torchrun (or the launcher, for one rank) tells a process about its place."""

    rank: int
    local_rank: int
    world_size: int


def rank_environment() -> RankEnvironment:
    """This process's place; a process started by hand is the only rank."""
    return RankEnvironment(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )


def is_agent_given() -> bool:
    """Whether somebody published a rendezvous for several ranks."""
    return "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ


def admin_token() -> str:
    """Bearer token of the control server. Raises ValueError when there is none."""
    token = os.environ.get(ADMIN_TOKEN_VARIABLE, "")
    if not token:
        raise ValueError(f"{ADMIN_TOKEN_VARIABLE} is not set")
    return token
