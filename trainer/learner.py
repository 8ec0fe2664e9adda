"""One optimizer step: batch in, new weights and numbers out. Every rank calls it with all samples.

    samples -> micro-batches (packing) -> forward, loss, backward each -> clip -> AdamW

Each micro-batch's loss is divided by the completion tokens of the whole batch, over all ranks, so
the gradient does not depend on how samples were packed or spread.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from protocol.records import TrainBatch
from trainer.config import OptimizerConfig, TrainerConfig
from trainer.loss import policy_loss, token_entropy, token_logprobs
from trainer.packing import Collated, collate, pack
from trainer.world import World

_SUMS = ("loss", "ratio", "clipped", "entropy", "mismatch", "on_policy")


class Learner:
    """Model and optimizer. `version` counts the steps that the weights have seen."""

    def __init__(self, model: nn.Module, world: World, config: TrainerConfig) -> None:
        self.model = model
        self.version = 0
        self._world = world
        self._config = config
        section = config.optimizer
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=section.learning_rate,
            betas=(section.beta1, section.beta2),
            eps=section.epsilon,
            weight_decay=section.weight_decay,
        )

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """Version v -> v + 1. Returns the step's metrics, equal on every rank."""
        start = time.perf_counter()
        num_tokens = sum(len(sample.logprobs) for sample in batch.samples)
        micro_batches = pack(
            batch.samples,
            max_tokens=self._config.micro_batch_tokens,
            num_ranks=self._world.size,
        )[self._world.rank]
        sums = torch.zeros(len(_SUMS), dtype=torch.float64)
        ratio_max = torch.zeros(1, dtype=torch.float64)
        self.optimizer.zero_grad()
        for micro_batch in micro_batches:
            collated = collate(micro_batch, version=self.version).to(self._world.device)
            part, part_max = self._backward(collated, num_tokens)
            sums += part
            ratio_max = torch.maximum(ratio_max, part_max)
        section = self._config.optimizer
        grad_norm = _to_float(
            nn.utils.clip_grad_norm_(self.model.parameters(), section.max_grad_norm)
        )
        learning_rate = _learning_rate(section, self.version)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.version += 1
        totals = dict(zip(_SUMS, self._world.sum(sums).tolist(), strict=True))
        self._world.max(ratio_max)
        lengths = [len(sample.token_ids) for sample in batch.samples]
        return {
            "loss": totals["loss"] / num_tokens,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "ratio_mean": totals["ratio"] / num_tokens,
            "ratio_max": float(ratio_max.item()),
            "clip_fraction": totals["clipped"] / num_tokens,
            "entropy": totals["entropy"] / num_tokens,
            "logprob_mismatch": totals["mismatch"] / max(totals["on_policy"], 1.0),
            "on_policy_fraction": totals["on_policy"] / num_tokens,
            "reward_mean": sum(sample.reward for sample in batch.samples) / len(batch.samples),
            "num_samples": float(len(batch.samples)),
            "num_tokens": float(sum(lengths)),
            "num_completion_tokens": float(num_tokens),
            "num_micro_batches": float(len(micro_batches)),
            "step_s": time.perf_counter() - start,
        }

    def _backward(self, batch: Collated, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one micro-batch's gradient; sums in the order of _SUMS, and the largest ratio."""
        config = self._config.loss
        logits = self.model(input_ids=batch.token_ids).logits
        chosen = logits.flatten(0, 1)[batch.rows]
        logprobs = token_logprobs(chosen, batch.targets, config.temperature)
        result = policy_loss(logprobs, batch.engine_logprobs, batch.advantages, config)
        # FSDP averages gradients over ranks; ours is a sum. The zero keeps a filler in the graph.
        scale = self._world.size / num_tokens
        (result.total * scale + logits.sum() * 0.0).backward()
        with torch.no_grad():
            mismatch = (logprobs - batch.engine_logprobs).abs() * batch.is_on_policy
            sums = torch.stack(
                [
                    result.total.detach(),
                    result.ratio_sum,
                    result.num_clipped,
                    token_entropy(chosen, config.temperature).sum(),
                    mismatch.sum(),
                    batch.is_on_policy.sum(),
                ]
            )
        return sums.double().cpu(), result.ratio_max.double().cpu().reshape(1)


def _learning_rate(config: OptimizerConfig, step: int) -> float:
    if step >= config.warmup_steps:
        return config.learning_rate
    return config.learning_rate * (step + 1) / config.warmup_steps


def _to_float(value: Any) -> float:
    return float((value.full_tensor() if isinstance(value, DTensor) else value).item())
