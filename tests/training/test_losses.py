"""The losses and their hand-made gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from eyas.training.losses import LossWeights, distillation, draft_loss
from eyas.training.readout import Readout

Setting = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def setting() -> Setting:
    torch.manual_seed(0)
    head = torch.randn(20, 6)  # the target's LM head, of which the first 12 tokens may be drafted
    features = torch.randn(7, 6)
    guesses = torch.randn(3, 7, 6, requires_grad=True)
    return guesses, features, (features @ head.T).logsumexp(-1), head


def plain(guesses: torch.Tensor, features: torch.Tensor, head: torch.Tensor, size: int) -> torch.Tensor:
    target = (features @ head.T).softmax(-1)[:, :size]
    return -(target * (guesses @ head[:size].T).log_softmax(-1)).sum((-1, -2))


def assert_same(found: torch.Tensor, expected: torch.Tensor, guesses: torch.Tensor) -> None:
    """Values and gradients of three steps, each weighted."""
    weights = torch.tensor([1.0, 0.5, 0.25])
    torch.testing.assert_close(found, expected)
    (slope,) = torch.autograd.grad(expected @ weights, guesses)
    torch.testing.assert_close(torch.autograd.grad(found @ weights, guesses)[0], slope, rtol=1e-4, atol=1e-5)


def test_cross_entropy_and_its_gradient_equal_the_plain_formula() -> None:
    guesses, features, log_mass, head = setting()
    found = distillation(guesses, features, log_mass, Readout(head[:12]), LossWeights(0, 1), chunk=3)
    assert_same(found, plain(guesses, features, head, 12), guesses)


def top(target: torch.Tensor, own: torch.Tensor, k: int) -> torch.Tensor:
    """−Σ p log q over the k best of p [N, D], summed over positions, for log q [K, N, D]."""
    best, places = target.topk(k, dim=-1)
    return -(best * own.gather(-1, places.expand(len(own), -1, -1))).sum((-1, -2))


def test_top_k_and_its_gradient_equal_the_plain_formula() -> None:
    """As published: probabilities of the whole distributions, only the sum is cut."""
    guesses, features, log_mass, head = setting()
    target = (features @ head.T).softmax(-1)[:, :12]
    expected = 0.5 * plain(guesses, features, head, 12) + 2 * top(target, (guesses @ head[:12].T).log_softmax(-1), 4)
    found = distillation(guesses, features, log_mass, Readout(head[:12]), LossWeights(0, 0.5, top=2, k=4), chunk=3)
    assert_same(found, expected, guesses)


@pytest.mark.parametrize(("scale", "cap"), [(0.25, None), (1.0, 3.0), (2.0, 5.0)])
def test_scaled_capped_and_biased_logits(scale: float, cap: float | None) -> None:
    """As Cohere, Granite and Gemma have them: autograd through the plain formula gives the same gradient."""
    guesses, features, _, head = setting()
    bias = torch.randn(20)

    def read(rows: torch.Tensor, size: int) -> torch.Tensor:
        logits = F.linear(rows, head[:size], bias[:size]) * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    mass = read(features, 20).logsumexp(-1)
    target = (read(features, 12) - mass[:, None]).exp()
    own = read(guesses, 12).log_softmax(-1)
    expected = -(target * own).sum((-1, -2)) + top(target, own, 4)
    readout = Readout(head[:12], bias[:12], scale, cap)
    assert_same(distillation(guesses, features, mass, readout, LossWeights(0, 1, top=1, k=4), chunk=3), expected, guesses)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_a_shut_token_is_no_part_of_either_distribution(cap: float | None) -> None:
    """The last tokens of the readout are open to some positions only: each position by the plain formula over what it has."""
    guesses, features, _, head = setting()
    closed = torch.rand(features.shape[0], 3) < 0.5
    closed[0], closed[1] = True, False

    def read(rows: torch.Tensor, size: int) -> torch.Tensor:
        logits = rows @ head[:size].T
        return logits if cap is None else torch.tanh(logits / cap) * cap

    mass = read(features, 20).logsumexp(-1)
    shut = torch.cat([torch.zeros(len(closed), 9, dtype=torch.bool), closed], dim=1)  # [N, 12]
    target = (read(features, 12) - mass[:, None]).exp().masked_fill(shut, 0)
    own = read(guesses, 12).masked_fill(shut, -torch.inf).log_softmax(-1).masked_fill(shut, 0)
    expected = -(target * own).sum((-1, -2)) + top(target, own, 4)
    weights = LossWeights(0, 1, top=1, k=4)
    found = distillation(guesses, features, mass, Readout(head[:12], cap=cap), weights, closed, chunk=3)
    assert_same(found, expected, guesses)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_temperature_sharpens_or_flattens_what_is_learnt(temperature: float) -> None:
    """p^(1/T) over the draft vocabulary, with p's mass there; cut to the top k after that."""
    guesses, features, log_mass, head = setting()
    p = (features @ head.T).softmax(-1)[:, :12]
    powers = p ** (1 / temperature)
    target = powers / powers.sum(-1, keepdim=True) * p.sum(-1, keepdim=True)
    own = (guesses @ head[:12].T).log_softmax(-1)
    expected = -(target * own).sum((-1, -2)) + top(target, own, 4)
    weights = LossWeights(0, 1, top=1, k=4, temperature=temperature)
    assert_same(distillation(guesses, features, log_mass, Readout(head[:12]), weights, chunk=3), expected, guesses)


def test_a_perfect_guess_has_the_least_loss() -> None:
    guesses, features, log_mass, head = setting()
    perfect = features.expand(3, -1, -1).clone().requires_grad_()
    weights = LossWeights(0, 1)
    least = distillation(perfect, features, log_mass, Readout(head), weights)
    assert (least < distillation(guesses, features, log_mass, Readout(head), weights)).all()
    (slope,) = torch.autograd.grad(least.sum(), perfect)
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-5, rtol=0)


def test_steps_and_terms_are_weighted_and_positions_summed() -> None:
    guesses, features, log_mass, head = setting()
    readout, weights = Readout(head), LossWeights(1, 0.1)
    only_first = draft_loss(guesses, features, log_mass, readout, weights, torch.tensor([1.0, 0.0, 0.0]))
    alone = draft_loss(guesses[:1], features, log_mass, readout, weights, torch.ones(1))
    torch.testing.assert_close(only_first, alone)
    parts = [
        draft_loss(guesses[:, n], features[n], log_mass[n], readout, weights, torch.ones(3)) for n in (slice(2), slice(2, 7))
    ]
    torch.testing.assert_close(sum(parts), draft_loss(guesses, features, log_mass, readout, weights, torch.ones(3)))
    regression = draft_loss(features[None], features, log_mass, readout, LossWeights(1, 0), torch.ones(1))
    assert float(regression) == 0
