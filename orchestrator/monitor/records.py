"""What the run loop tells its monitors: one record a step, one summary a run.

Plain data. The loop makes them, `console` formats them, `wandb_sink` sends their numbers away;
neither asks back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step: its batch, the update that followed, and what the trainer measured.

    `step` is 0-based and turns policy version `step` into `step + 1`; `policy_version` is the one
    in service after it. Times are seconds, `completion_len_mean` tokens, `off_policy_*` versions.
    `trainer` holds the trainer's own series (loss, grad_norm, lr ...), by name.
    """

    step: int
    policy_version: int
    generation: int
    reward_mean: float
    reward_std: float
    completion_len_mean: float
    off_policy_mean: float
    off_policy_max: int
    num_samples: int
    num_dropped: int
    groups_admitted: int
    groups_total: int
    update_s: float
    stage_s: float
    pause_s: float
    step_s: float
    tokens_per_s: float
    trainer: Mapping[str, float] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """All finite numbers as flat series: `reward/mean`, `update/pause_s`, `trainer/loss` ..."""
        series: dict[str, float] = {
            "policy_version": self.policy_version,
            "generation": self.generation,
            "reward/mean": self.reward_mean,
            "reward/std": self.reward_std,
            "rollout/completion_len_mean": self.completion_len_mean,
            "rollout/off_policy_mean": self.off_policy_mean,
            "rollout/off_policy_max": self.off_policy_max,
            "rollout/num_samples": self.num_samples,
            "rollout/num_dropped": self.num_dropped,
            "rollout/tokens_per_s": self.tokens_per_s,
            "groups/admitted": self.groups_admitted,
            "groups/total": self.groups_total,
            "update/total_s": self.update_s,
            "update/stage_s": self.stage_s,
            "update/pause_s": self.pause_s,
            "step_s": self.step_s,
        }
        series.update((f"trainer/{name}", value) for name, value in self.trainer.items())
        return {name: float(value) for name, value in series.items() if math.isfinite(value)}


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended. The means are of the first and last ten steps (fewer in a short run);
    None where no step finished. `evictions` counts groups taken out, by reason."""

    steps: int
    reward_first10_mean: float | None
    reward_last10_mean: float | None
    evictions: Mapping[str, int]
    readmissions: int
    generations: int
    wall_time_s: float
    outcome: Outcome
    output_dir: str
    policy_version: int | None = None
    cause: str = ""
