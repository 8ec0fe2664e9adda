"""From whole groups to what the trainer consumes. Pure.

Advantage of a rollout (GRPO): (reward - mean of its group) / (standard deviation of its group +
1e-6). A group whose rewards are all equal gets zeros: it teaches nothing, and harms nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.rollouts.buffer import is_zero_variance
from orchestrator.rollouts.staleness import num_off_policy_steps
from protocol.records import Rollout, TrainBatch, TrainSample

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Numbers of one batch. Off-policy steps are counted from the oldest token of each sample."""

    step: int
    num_rollouts: int
    num_groups: int
    num_zero_variance_groups: int
    reward_mean: float
    reward_std: float
    reward_min: float
    reward_max: float
    off_policy_steps_mean: float
    off_policy_steps_max: int
    num_mixed_version_samples: int
    num_prompt_tokens: int
    num_completion_tokens: int
    truncated_fraction: float
    num_retried_rollouts: int
    rollout_duration_mean_s: float
    rollout_duration_max_s: float
    rollouts_per_engine: dict[str, int]

    def as_metrics(self) -> dict[str, float]:
        """Flat numbers for a monitor; the engines under `engine/<id>`."""
        metrics = {
            name: float(getattr(self, name))
            for name in self.__slots__
            if name not in ("step", "rollouts_per_engine")
        }
        for engine_id, number in self.rollouts_per_engine.items():
            metrics[f"engine/{engine_id}"] = float(number)
        return metrics


def advantages(rewards: Sequence[float]) -> list[float]:
    """Group-normalised advantages; zeros when all rewards are equal."""
    if all(reward == rewards[0] for reward in rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (std + _EPSILON) for reward in rewards]


def build_batch(run_id: str, step: int, groups: Sequence[Sequence[Rollout]]) -> TrainBatch:
    """All rollouts of `groups` as the batch of `step`, in the order given."""
    samples = [
        _train_sample(rollout, advantage)
        for group in groups
        for rollout, advantage in zip(
            group, advantages([rollout.reward for rollout in group]), strict=True
        )
    ]
    return TrainBatch(run_id=run_id, step=step, samples=samples)


def batch_stats(step: int, groups: Sequence[Sequence[Rollout]]) -> BatchStats:
    """Numbers of the batch of `step`, whose policy version is `step`. `groups` is not empty."""
    rollouts = [rollout for group in groups for rollout in group]
    number = len(rollouts)
    rewards = [rollout.reward for rollout in rollouts]
    mean = math.fsum(rewards) / number
    ages = [num_off_policy_steps(rollout.sample, step) for rollout in rollouts]
    durations = [rollout.duration_s for rollout in rollouts]
    engines = Counter(rollout.sample.engine_id for rollout in rollouts)
    truncated = sum(rollout.sample.finish_reason == "length" for rollout in rollouts)
    return BatchStats(
        step=step,
        num_rollouts=number,
        num_groups=len(groups),
        num_zero_variance_groups=sum(is_zero_variance(list(group)) for group in groups),
        reward_mean=mean,
        reward_std=math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / number),
        reward_min=min(rewards),
        reward_max=max(rewards),
        off_policy_steps_mean=sum(ages) / number,
        off_policy_steps_max=max(ages),
        num_mixed_version_samples=sum(len(rollout.sample.spans) > 1 for rollout in rollouts),
        num_prompt_tokens=sum(len(rollout.sample.prompt_ids) for rollout in rollouts),
        num_completion_tokens=sum(len(rollout.sample.completion_ids) for rollout in rollouts),
        truncated_fraction=truncated / number,
        num_retried_rollouts=sum(rollout.num_attempts > 1 for rollout in rollouts),
        rollout_duration_mean_s=math.fsum(durations) / number,
        rollout_duration_max_s=max(durations),
        rollouts_per_engine=dict(sorted(engines.items())),
    )


def _train_sample(rollout: Rollout, advantage: float) -> TrainSample:
    sample = rollout.sample
    return TrainSample(
        rollout_id=rollout.rollout_id,
        token_ids=sample.prompt_ids + sample.completion_ids,
        num_prompt_tokens=len(sample.prompt_ids),
        logprobs=sample.logprobs,
        advantage=advantage,
        reward=rollout.reward,
        min_version=min(span.version for span in sample.spans),
    )
