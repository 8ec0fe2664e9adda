from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.records import TrainSample
from tests.batches import make_sample
from trainer.packing import MicroBatch, check_sample, collate, pack


def make_samples(lengths: list[int]) -> list[TrainSample]:
    return [
        make_sample(number, length=length, num_prompt_tokens=1)
        for number, length in enumerate(lengths)
    ]


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=40), st.integers(40, 200), st.integers(1, 5)
)
def test_every_sample_once_within_the_budget_equally_many_a_rank(
    lengths: list[int], max_tokens: int, num_ranks: int
) -> None:
    samples = make_samples(lengths)
    ranks = pack(samples, max_tokens=max_tokens, num_ranks=num_ranks)
    assert len(ranks) == num_ranks
    assert len({len(own) for own in ranks}) == 1
    micro_batches = [micro_batch for own in ranks for micro_batch in own]
    packed = [sample for micro_batch in micro_batches for sample in micro_batch.samples]
    assert sorted(sample.rollout_id for sample in packed) == list(range(len(lengths)))
    for micro_batch in micro_batches:
        assert len(micro_batch.samples) * micro_batch.width <= max_tokens
        assert micro_batch.width == max(
            (len(sample.token_ids) for sample in micro_batch.samples), default=2
        )


def test_long_and_short_samples_are_not_mixed() -> None:
    ranks = pack(make_samples([4, 20, 5, 20]), max_tokens=40, num_ranks=1)
    assert [[len(s.token_ids) for s in mb.samples] for mb in ranks[0]] == [[20, 20], [5, 4]]


def test_more_ranks_than_samples_get_fillers() -> None:
    ranks = pack(make_samples([4]), max_tokens=40, num_ranks=3)
    assert [[len(mb.samples) for mb in own] for own in ranks] == [[1], [0], [0]]


def test_collate_points_each_target_at_the_logits_before_it() -> None:
    first = TrainSample(0, [10, 11, 12, 13], 2, [-0.1, -0.2], 1.5, 0.0, 3)
    second = TrainSample(1, [20, 21, 22], 1, [-0.3, -0.4], -0.5, 0.0, 2)
    got = collate(MicroBatch((first, second)), version=3)
    assert got.token_ids.tolist() == [[10, 11, 12, 13], [20, 21, 22, 0]]
    assert got.rows.tolist() == [1, 2, 4, 5]
    assert got.targets.tolist() == [12, 13, 21, 22]
    torch.testing.assert_close(got.engine_logprobs, torch.tensor([-0.1, -0.2, -0.3, -0.4]))
    assert got.advantages.tolist() == [1.5, 1.5, -0.5, -0.5]
    assert got.is_on_policy.tolist() == [True, True, False, False]


def test_filler_has_tokens_but_no_targets() -> None:
    got = collate(MicroBatch(()), version=0)
    assert got.token_ids.shape == (1, 2)
    assert got.rows.numel() == got.targets.numel() == got.advantages.numel() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"num_prompt_tokens": 0}, "rollout 1: 0 prompt tokens of 12 in all"),
        ({"num_prompt_tokens": 12}, "rollout 1: 12 prompt tokens of 12 in all"),
        ({"token_ids": [1] * 41}, "rollout 1: 41 tokens, at most 40 fit"),
        ({"logprobs": [0.0]}, "rollout 1: 1 logprobs for 7"),
        ({"token_ids": [300] * 12}, "rollout 1: token id outside of the vocabulary of 271"),
        ({"token_ids": [-1] * 12}, "rollout 1: token id outside of the vocabulary of 271"),
        ({"advantage": float("nan")}, "rollout 1: a logprob or advantage is not finite"),
        ({"logprobs": [float("-inf")] * 7}, "rollout 1: a logprob or advantage is not finite"),
    ],
)
def test_check_sample(change: dict[str, object], message: str | None) -> None:
    sample = msgspec.structs.replace(make_sample(1), **change)
    assert check_sample(sample, vocab_size=271, max_tokens=40) == message
