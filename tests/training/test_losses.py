"""The loss and its hand-made gradient."""

from __future__ import annotations

import torch

from eyas.training.losses import draft_cross_entropy, draft_loss


def setting() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.randn(20, 6)  # the target's LM head, of which the first 12 tokens may be drafted
    features = torch.randn(7, 6)
    guesses = torch.randn(3, 7, 6, requires_grad=True)
    return guesses, features, (features @ head.T).logsumexp(-1), head


def plain(guesses: torch.Tensor, features: torch.Tensor, head: torch.Tensor, size: int) -> torch.Tensor:
    target = (features @ head.T).softmax(-1)[:, :size]
    return -(target * (guesses @ head[:size].T).log_softmax(-1)).sum(-1).mean(-1)


def test_cross_entropy_and_its_gradient_equal_the_plain_formula() -> None:
    guesses, features, log_mass, head = setting()
    weights = torch.tensor([1.0, 0.5, 0.25])
    expected = plain(guesses, features, head, 12)
    (slope,) = torch.autograd.grad(expected @ weights, guesses)
    found = draft_cross_entropy(guesses, features, log_mass, head[:12], chunk=3)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found @ weights, guesses)[0], slope)


def test_a_perfect_guess_has_the_least_loss() -> None:
    guesses, features, log_mass, head = setting()
    perfect = features.expand(3, -1, -1).clone().requires_grad_()
    least = draft_cross_entropy(perfect, features, log_mass, head)
    assert (least < draft_cross_entropy(guesses, features, log_mass, head)).all()
    (slope,) = torch.autograd.grad(least.sum(), perfect)
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-5, rtol=0)


def test_steps_and_terms_are_weighted() -> None:
    guesses, features, log_mass, head = setting()
    step_weights = torch.tensor([1.0, 0.0, 0.0])
    only_first = draft_loss(guesses, features, log_mass, head, 0.1, step_weights)
    alone = draft_loss(guesses[:1], features, log_mass, head, 0.1, torch.ones(1))
    torch.testing.assert_close(only_first, alone)
    regression = draft_loss(features[None], features, log_mass, head, 0.0, torch.ones(1))
    assert float(regression) == 0
