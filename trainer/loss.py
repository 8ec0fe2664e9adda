"""Token-level clipped policy gradient with importance weights. Pure: tensors in, tensors out.

For completion token t of a sample with group-normalised advantage A (GRPO, arXiv:2402.03300, made
by the orchestrator), with pi the policy being trained and mu what the engine sampled from:

    r_t  = min(pi(t) / mu(t), ratio_cap)
    L_t  = -min(r_t * A, clip(r_t, 1 - clip_low, 1 + clip_high) * A)
    loss = sum of L_t over all completion tokens of the whole batch / their number

- mu's log probabilities are the engine's own, recorded when the token was sampled: no second
  forward pass, and what happened between sampling and training (older weights, other kernels) is
  in the ratio.
- The clip is PPO's (arXiv:1707.06347), its two bounds and the mean over tokens instead of samples
  are DAPO's (arXiv:2503.14476). The cap bounds the case that clipping leaves open, A < 0 and r
  large (compare dual-clip PPO, arXiv:1912.09729): beyond it the gradient is zero.
- No KL term: mu is never more than `max_off_policy_steps` away.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from trainer.config import LossConfig


class TokenLoss(NamedTuple):
    """`total` is differentiable; the others are detached sums or maxima over the tokens."""

    total: torch.Tensor
    ratio_sum: torch.Tensor
    ratio_max: torch.Tensor
    num_clipped: torch.Tensor


def policy_loss(
    logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    config: LossConfig,
) -> TokenLoss:
    """Sum of L_t over N tokens. All tensors are float [N]; `logprobs` carries the gradient."""
    log_ratio = (logprobs - engine_logprobs).clamp(max=math.log(config.ratio_cap))
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        is_clipped = (clipped * advantages) < (ratio * advantages)
        ratio_max = ratio.max() if ratio.numel() else ratio.new_zeros(())
    return TokenLoss(loss.sum(), ratio.detach().sum(), ratio_max.detach(), is_clipped.sum())


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature) at `targets`. logits [N, V], targets int [N] -> [N]."""
    scaled = logits.float() / temperature
    return scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def token_entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy in nats of softmax(logits / temperature). logits [N, V] -> [N]."""
    scaled = (logits.float() / temperature).log_softmax(-1)
    return -(scaled.exp() * scaled).sum(-1)
