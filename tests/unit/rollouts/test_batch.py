"""Advantages, and what the trainer gets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rollouts.batch import advantages, batch_stats, build_batch
from protocol.records import decode_batch, encode_batch
from tests.unit.rollouts.samples import make_rollout, make_sample


def test_advantages_are_centred_and_scaled() -> None:
    assert advantages([0.0, 1.0]) == pytest.approx([-1.0, 1.0], abs=1e-5)
    assert advantages([1.0, 1.0, 4.0]) == pytest.approx([-0.70711, -0.70711, 1.41421], abs=1e-4)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.3])
def test_equal_rewards_have_exactly_no_advantage(reward: float) -> None:
    assert advantages([reward] * 7) == [0.0] * 7


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=16))
def test_advantages_sum_to_nothing_and_are_finite(rewards: list[float]) -> None:
    result = advantages(rewards)
    assert all(math.isfinite(value) for value in result)
    assert sum(result) == pytest.approx(0.0, abs=1e-3)
    best = max(range(len(rewards)), key=rewards.__getitem__)
    assert result[best] == max(result)


def test_batch_carries_tokens_versions_and_advantages() -> None:
    groups = [
        [
            make_rollout(0, 5, 0.0, make_sample([3, 4], finish_reason="length")),
            make_rollout(1, 5, 1.0, make_sample(4, engine_id="g1e0")),
        ],
        [make_rollout(2, 6, 0.5), make_rollout(3, 6, 0.5)],
    ]
    batch = build_batch("run-1", 4, groups)
    assert (batch.run_id, batch.step) == ("run-1", 4)
    first = batch.samples[0]
    assert first.token_ids == [1, 2, 10, 11]
    assert first.num_prompt_tokens == 2
    assert len(first.logprobs) == 2
    assert first.min_version == 3
    assert [sample.rollout_id for sample in batch.samples] == [0, 1, 2, 3]
    assert [sample.advantage for sample in batch.samples[2:]] == [0.0, 0.0]
    assert decode_batch(encode_batch(batch)) == batch


def test_stats_of_a_batch() -> None:
    groups = [
        [
            make_rollout(0, 5, 0.0, make_sample([3, 4], finish_reason="length")),
            make_rollout(1, 5, 1.0, make_sample(4, engine_id="g1e0")),
        ],
        [
            make_rollout(2, 6, 0.5, make_sample(4)),
            make_rollout(3, 6, 0.5, make_sample(4)),
        ],
    ]
    stats = batch_stats(4, groups)
    assert stats.num_rollouts == 4
    assert stats.num_zero_variance_groups == 1
    assert stats.reward_mean == 0.5
    assert stats.reward_std == pytest.approx(math.sqrt(0.125))
    assert (stats.off_policy_steps_mean, stats.off_policy_steps_max) == (0.25, 1)
    assert stats.num_mixed_version_samples == 1
    assert stats.truncated_fraction == 0.25
    assert stats.rollouts_per_engine == {"g0e0": 3, "g1e0": 1}
    metrics = stats.as_metrics()
    assert metrics["reward_mean"] == 0.5
    assert metrics["engine/g1e0"] == 1.0
    assert "step" not in metrics
