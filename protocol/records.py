"""Rollouts and batches as they cross process boundaries (msgpack via msgspec)."""

from __future__ import annotations

import msgspec


class VersionSpan(msgspec.Struct, frozen=True):
    """Completion tokens [start, end) were sampled with policy version `version`."""

    version: int
    start: int
    end: int


class Sample(msgspec.Struct, frozen=True):
    """One completion, token in, token out. `completion_ids`, `logprobs` have equal length N;
    `logprobs` are natural-log probabilities under the engine that sampled; spans tile [0, N)."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    engine_id: str
    boot_id: str
    finish_reason: str


class Rollout(msgspec.Struct, frozen=True):
    """One episode with its reward. `rollout_id` is unique in a run; rollouts with the same
    `prompt_group` answer the same prompt (GRPO)."""

    rollout_id: int
    prompt_group: int
    sample: Sample
    reward: float
    num_attempts: int
    duration_s: float


class TrainSample(msgspec.Struct, frozen=True):
    """What the loss sees. `token_ids` = prompt + completion, length T; the completion starts at
    `num_prompt_tokens`; `logprobs` belong to the completion (length T - num_prompt_tokens)."""

    rollout_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    logprobs: list[float]
    advantage: float
    reward: float
    min_version: int


class TrainBatch(msgspec.Struct, frozen=True):
    """All samples of one optimizer step. Step s turns policy version s into s + 1."""

    run_id: str
    step: int
    samples: list[TrainSample]


def encode_batch(batch: TrainBatch) -> bytes:
    """TrainBatch -> msgpack bytes."""
    return msgspec.msgpack.encode(batch)


def decode_batch(data: bytes) -> TrainBatch:
    """Inverse of `encode_batch`. Raises msgspec.DecodeError / ValidationError on other bytes."""
    return msgspec.msgpack.decode(data, type=TrainBatch)
