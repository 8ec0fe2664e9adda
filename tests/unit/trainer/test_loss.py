from __future__ import annotations

import math

import pytest
import torch

from trainer.config import LossConfig
from trainer.loss import policy_loss, token_entropy, token_logprobs

CONFIG = LossConfig(clip_low=0.2, clip_high=0.3, ratio_cap=5.0)


def loss_and_grad(ratio: float, advantage: float) -> tuple[float, float, float]:
    """Loss, its derivative by the token's log probability, number of clipped tokens."""
    logprobs = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    result = policy_loss(logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), CONFIG)
    result.total.backward()
    assert logprobs.grad is not None
    return result.total.item(), logprobs.grad.item(), result.num_clipped.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "num_clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),  # on policy: plain policy gradient
        (1.0, -2.0, 2.0, 2.0, 0),
        (1.2, 2.0, -2.4, -2.4, 0),  # inside of the clip: weighted by the ratio
        (1.5, 2.0, -2.6, 0.0, 1),  # grown enough: no more reason to grow
        (0.5, 2.0, -1.0, -1.0, 0),  # shrunk by mistake: free to grow
        (0.5, -2.0, 1.6, 0.0, 1),  # shrunk enough
        (1.5, -2.0, 3.0, 3.0, 0),  # grown by mistake: free to shrink
        (8.0, -2.0, 10.0, 0.0, 0),  # beyond the cap: bounded loss, no gradient
    ],
)
def test_one_token(
    ratio: float, advantage: float, loss: float, grad: float, num_clipped: int
) -> None:
    assert loss_and_grad(ratio, advantage) == pytest.approx((loss, grad, num_clipped), abs=1e-5)


def test_sums_over_tokens() -> None:
    result = policy_loss(
        torch.log(torch.tensor([0.5, 0.5, 0.25])),
        torch.log(torch.tensor([0.5, 0.25, 0.5])),
        torch.tensor([1.0, 1.0, 1.0]),
        CONFIG,
    )
    assert result.total.item() == pytest.approx(-(1.0 + 1.3 + 0.5))
    assert result.ratio_sum.item() == pytest.approx(1.0 + 2.0 + 0.5)
    assert result.ratio_max.item() == pytest.approx(2.0)
    assert result.num_clipped.item() == 1


def test_no_tokens() -> None:
    empty = torch.zeros(0)
    result = policy_loss(empty, empty, empty, CONFIG)
    assert [value.item() for value in result] == [0.0, 0.0, 0.0, 0.0]


def test_token_logprobs_are_those_of_the_tempered_softmax() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    got = token_logprobs(logits, torch.tensor([2, 0]), 2.0)
    expected = (logits / 2.0).softmax(-1).log()[[0, 1], [2, 0]]
    torch.testing.assert_close(got, expected)


def test_entropy() -> None:
    assert token_entropy(torch.zeros(1, 8), 1.0).item() == pytest.approx(math.log(8))
    certain = torch.tensor([[1000.0, 0.0]])
    assert token_entropy(certain, 1.0).item() == pytest.approx(0.0)
