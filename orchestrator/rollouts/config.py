"""Settings of `[orchestrator.rollouts]`: what is sampled, how often it is tried, what may be trained on.

Timeouts nest: one attempt (`request_timeout_s`) < one rollout with all its retries
(`rollout_timeout_s`) < the wait for a batch (`batch_timeout_s`).
"""

from __future__ import annotations

import itertools
from typing import Self

from pydantic import Field, model_validator

from protocol.config import Config, Seconds


class RolloutsConfig(Config):
    """Which episodes are sampled, and which of them become batches."""

    env: str = Field(
        "reverse-text",
        description="Environment: `reverse-text`, or `module:Class` of your own (see "
        "orchestrator/rollouts/env.py).",
    )
    env_seed: int = Field(
        0, description="Seed of the environment's prompts: the same seed gives the same prompts."
    )
    prompts_per_step: int = Field(8, ge=1, description="Prompts (GRPO groups) in one batch.")
    group_size: int = Field(
        8, ge=2, description="Rollouts of one prompt; advantages are taken relative to their mean."
    )
    max_prompt_tokens: int = Field(
        64, ge=1, description="Longest prompt, in tokens. A longer one is an error of the env."
    )
    max_completion_tokens: int = Field(
        16, ge=1, description="Longest completion, in tokens; the end token counts."
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature.")
    sampling_seed: int | None = Field(
        None,
        description="Seed of the sampling: every rollout gets its own, derived from this and its "
        "number. Empty: engines choose.",
    )
    max_in_flight: int = Field(
        64, ge=1, description="Most rollouts that wait for an engine at the same time."
    )
    max_off_policy_steps: int = Field(
        1,
        ge=0,
        description="Most optimizer steps between the oldest weights that sampled a token and the "
        "weights that train on it. 0: sampling and training take turns.",
    )
    drop_zero_variance: bool = Field(
        False,
        description="Drop groups whose rewards are all equal (they teach nothing) and sample "
        "others in their place.",
    )
    connect_timeout_s: Seconds = Field(5.0, description="Longest wait for a TCP connection.")
    request_timeout_s: Seconds = Field(
        60.0, description="Longest wait for the answer to one attempt of one rollout."
    )
    rollout_timeout_s: Seconds = Field(
        300.0, description="Longest time for one rollout, retries included; then it is lost."
    )
    batch_timeout_s: Seconds = Field(
        1800.0, description="Longest wait for a full batch while dispatch is on; then the run ends."
    )
    retry_wait_s: Seconds = Field(
        0.1, description="First wait before a request is tried again; doubles each time."
    )
    retry_wait_max_s: Seconds = Field(2.0, description="Longest wait between two tries.")
    max_consecutive_env_errors: int = Field(
        16, ge=1, description="So many errors of the environment in a row end the run."
    )
    max_consecutive_lost: int = Field(
        64,
        ge=1,
        description="So many lost rollouts in a row (each after all its retries, or refused by "
        "an engine) end the run.",
    )

    @model_validator(mode="after")
    def _timeouts_nest(self) -> Self:
        order = ("request_timeout_s", "rollout_timeout_s", "batch_timeout_s")
        for inner, outer in itertools.pairwise(order):
            if getattr(self, inner) >= getattr(self, outer):
                raise ValueError(
                    f"{inner} ({getattr(self, inner):g}) must be below "
                    f"{outer} ({getattr(self, outer):g})"
                )
        if self.retry_wait_s > self.retry_wait_max_s:
            raise ValueError(
                f"retry_wait_s ({self.retry_wait_s:g}) must not be above "
                f"retry_wait_max_s ({self.retry_wait_max_s:g})"
            )
        return self

    @property
    def batch_size(self) -> int:
        """Rollouts in one batch."""
        return self.prompts_per_step * self.group_size
