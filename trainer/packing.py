"""Samples -> micro-batches of a bounded number of tokens, the same number for every rank. Pure.

A micro-batch holds whole samples, one a row, padded on the right to the longest of them. Causal
attention never looks right, so padding changes no real token, no sample sees another, and every
row's positions start at 0: the result equals that of one sample at a time. Rows are sorted by
length, so little is padded.

Every rank must run the same number of forward passes (they are collective under FSDP): ranks that
have fewer micro-batches get empty ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from protocol.records import TrainSample

_FILLER_TOKENS = 2


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward pass; none: a filler that adds nothing to the loss."""

    samples: tuple[TrainSample, ...]

    @property
    def width(self) -> int:
        """Length of a row."""
        return max((len(sample.token_ids) for sample in self.samples), default=_FILLER_TOKENS)


class Collated(NamedTuple):
    """Tensors of a micro-batch with B rows of T tokens and N completion tokens in all.

    token_ids int [B, T]; rows int [N] index the flattened [B * T] logits that predict the
    completion tokens `targets` int [N]; engine_logprobs, advantages float [N]; is_on_policy bool
    [N]: sampled with exactly the version that is being trained.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    engine_logprobs: torch.Tensor
    advantages: torch.Tensor
    is_on_policy: torch.Tensor

    def to(self, device: torch.device) -> Collated:
        """The same on another device."""
        return Collated(*(tensor.to(device) for tensor in self))


def check_sample(sample: TrainSample, *, vocab_size: int, max_tokens: int) -> str | None:
    """What is wrong with a sample, or None."""
    length = len(sample.token_ids)
    where = f"rollout {sample.rollout_id}"
    if not 1 <= sample.num_prompt_tokens < length:
        return f"{where}: {sample.num_prompt_tokens} prompt tokens of {length} in all"
    if length > max_tokens:
        return f"{where}: {length} tokens, at most {max_tokens} fit"
    if len(sample.logprobs) != length - sample.num_prompt_tokens:
        return f"{where}: {len(sample.logprobs)} logprobs for {length - sample.num_prompt_tokens}"
    if min(sample.token_ids) < 0 or max(sample.token_ids) >= vocab_size:
        return f"{where}: token id outside of the vocabulary of {vocab_size}"
    # NaN fails both comparisons, so it is caught with the infinities.
    if not all(abs(value) < 1e30 for value in (*sample.logprobs, sample.advantage)):
        return f"{where}: a logprob or advantage is not finite"
    return None


def pack(
    samples: Sequence[TrainSample], *, max_tokens: int, num_ranks: int
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Micro-batches of each rank: rows x width <= max_tokens, equally many for every rank.

    Every sample must fit alone. The same samples give the same result, in any order of equal
    lengths as given.
    """
    by_length = sorted(samples, key=lambda sample: -len(sample.token_ids))
    ranks = [_fill(by_length[rank::num_ranks], max_tokens) for rank in range(num_ranks)]
    most = max(len(micro_batches) for micro_batches in ranks)
    filler = MicroBatch(())
    return tuple(tuple(own) + (filler,) * (most - len(own)) for own in ranks)


def _fill(samples: Sequence[TrainSample], max_tokens: int) -> list[MicroBatch]:
    """Samples by falling length -> micro-batches; the first of each decides its width."""
    filled: list[MicroBatch] = []
    start = 0
    while start < len(samples):
        num_rows = max_tokens // len(samples[start].token_ids)
        assert num_rows > 0, "a sample that does not fit was let in"
        filled.append(MicroBatch(tuple(samples[start : start + num_rows])))
        start += num_rows
    return filled


def collate(micro_batch: MicroBatch, *, version: int) -> Collated:
    """Tensors for the forward pass and the loss, on the CPU. `version` is the one in training."""
    width = micro_batch.width
    token_ids = torch.zeros((max(len(micro_batch.samples), 1), width), dtype=torch.int64)
    rows: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    on_policy: list[bool] = []
    for row, sample in enumerate(micro_batch.samples):
        length = len(sample.token_ids)
        token_ids[row, :length] = torch.tensor(sample.token_ids)
        first = row * width + sample.num_prompt_tokens - 1  # the logits before a token predict it
        num_targets = length - sample.num_prompt_tokens
        rows.extend(range(first, first + num_targets))
        targets.extend(sample.token_ids[sample.num_prompt_tokens :])
        logprobs.extend(sample.logprobs)
        advantages.extend([sample.advantage] * num_targets)
        on_policy.extend([sample.min_version == version] * num_targets)
    return Collated(
        token_ids=token_ids,
        rows=torch.tensor(rows, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        engine_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        is_on_policy=torch.tensor(on_policy, dtype=torch.bool),
    )
