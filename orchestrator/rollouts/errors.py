"""What can go wrong with a rollout, named by the boundary that broke.

A bad rollout is data, not a crash: the service counts these and goes on. Only `RolloutsFailed`
ends a run.
"""

from __future__ import annotations

from typing import Literal

EnvBoundary = Literal["prompt", "tokenize", "reward"]
LostReason = Literal["refused", "bad_answer", "timeout"]


class RolloutLost(Exception):
    """One rollout will not be had. `refused`: a 4xx; `bad_answer`: an answer that breaks the
    contract; `timeout`: no good answer before the rollout's deadline."""

    def __init__(self, reason: LostReason, detail: str, num_attempts: int) -> None:
        super().__init__(f"{reason} after {num_attempts} attempts: {detail}")
        self.reason = reason
        self.detail = detail
        self.num_attempts = num_attempts


class EnvironmentFailed(Exception):
    """The environment raised, or answered nonsense, at `boundary`."""

    def __init__(self, boundary: EnvBoundary, prompt_group: int, detail: str) -> None:
        super().__init__(f"environment error in {boundary} of prompt {prompt_group}: {detail}")
        self.boundary = boundary
        self.prompt_group = prompt_group


class RolloutsFailed(Exception):
    """The run cannot go on: too many errors in a row, or no batch in time."""
