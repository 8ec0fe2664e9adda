"""Settings of the fake engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from protocol.config import Config, Seconds


class FakeSettings(Config):
    """What fake engines of a fleet have in common."""

    run_id: str = Field("run", description="Run that the engine says it belongs to.")
    life: int = Field(0, ge=0, description="Incarnation of the group's step.")
    world_size: int = Field(1, ge=1, description="Ranks that take part in a transfer.")
    transfer: Literal["none", "gloo"] = Field(
        "none", description="`none`: bookkeeping of zero bytes; `gloo`: really joins and receives."
    )
    tokens_per_s: float = Field(1000.0, gt=0, description="Speed of each request.")
    commit_s: float = Field(0.0, ge=0, description="Time to load a staged version, in seconds.")
    seed: int = Field(0, description="Of the pseudo-random tokens.")
    vocab_size: int = Field(271, ge=1, description="Token ids are below this.")
    max_model_len: int = Field(128, ge=2, description="Longest prompt plus completion, in tokens.")
    model: str = Field("fake", description="Name in /v1/models.")
    core_timeout_s: Seconds = Field(10.0, description="Core age from which /liveness says 503.")
