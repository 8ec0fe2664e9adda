"""Hand-made training samples and batches."""

from __future__ import annotations

import random

from protocol.records import TrainBatch, TrainSample


def make_sample(
    number: int,
    *,
    length: int = 12,
    num_prompt_tokens: int = 5,
    vocab_size: int = 271,
    version: int = 0,
) -> TrainSample:
    """Random tokens, the same for the same number."""
    rng = random.Random(number)
    return TrainSample(
        rollout_id=number,
        token_ids=[rng.randrange(vocab_size) for _ in range(length)],
        num_prompt_tokens=num_prompt_tokens,
        logprobs=[rng.uniform(-6.0, -5.0) for _ in range(length - num_prompt_tokens)],
        advantage=rng.gauss(0.0, 1.0),
        reward=rng.random(),
        min_version=version,
    )


def make_batch(step: int, *, run_id: str = "test", num_samples: int = 6) -> TrainBatch:
    """Samples of mixed lengths; every step its own."""
    samples = [
        make_sample(1000 * step + index, length=8 + 5 * (index % 4), version=step)
        for index in range(num_samples)
    ]
    return TrainBatch(run_id, step, samples)
