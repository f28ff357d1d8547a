"""The published loss: regression of the feature plus cross-entropy of the distributions read from it.

The cross-entropy runs over the draft vocabulary D. With p the target's distribution over its whole vocabulary and q the
head's over D, it is  -Σ_{v in D} p(v) log q(v):  a position counts as much as the draft vocabulary covers it, so where
the target wants a token the head cannot propose nothing is learnt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class DraftCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of each step, with its gradient found on the way.

    Logits over the vocabulary are the largest tensors of training by far; here they live for one chunk of rows only.
    """

    @staticmethod
    def forward(ctx: Any, guesses: Tensor, features: Tensor, log_mass: Tensor, rows: Tensor, chunk: int) -> Tensor:
        count = guesses.shape[1]
        losses = guesses.new_zeros(guesses.shape[0], dtype=torch.float32)  # [K]
        gradient = torch.empty_like(guesses)  # [K, N, H]
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            target = (features[part].to(rows.dtype) @ rows.T).float()  # [c, D]
            target = target.sub_(log_mass[part, None]).exp_()
            covered = target.sum(-1, keepdim=True)  # [c, 1]
            for step, guess in enumerate(guesses[:, part].to(rows.dtype)):
                logits = (guess @ rows.T).float()  # [c, D]
                dot = torch.linalg.vecdot(target, logits)  # [c]
                top = logits.amax(-1, keepdim=True)
                logits = logits.sub_(top).exp_()
                total = logits.sum(-1, keepdim=True)
                log_total = total.log().add_(top)  # [c, 1]
                losses[step] += (covered * log_total).sum() - dot.sum()
                slope = logits.mul_(covered / total).sub_(target)  # [c, D]
                gradient[step, part] = (slope.to(rows.dtype) @ rows).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.count = count
        return losses / count

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * (slopes[0] / ctx.count)[:, None, None], None, None, None, None


def draft_cross_entropy(guesses: Tensor, features: Tensor, log_mass: Tensor, rows: Tensor, chunk: int = 128) -> Tensor:
    """Mean cross-entropy over the draft vocabulary, a value for each step, [K].

    Args:
        guesses: the head's features at the supervised positions, [K, N, H].
        features: the target's, [N, H].
        log_mass: log Σ exp of the target's logits over its whole vocabulary, [N].
        rows: the target's LM head for the draft vocabulary, [D, H]; its dtype is the one to multiply in.
    """
    losses: Tensor = DraftCrossEntropy.apply(guesses, features, log_mass, rows, chunk)
    return losses


def draft_loss(
    guesses: Tensor,
    features: Tensor,
    log_mass: Tensor,
    rows: Tensor,
    weight: float,
    step_weights: Tensor,
    feature_weight: float = 1.0,
) -> Tensor:
    """``feature_weight`` · SmoothL1 + ``weight`` · cross-entropy, averaged over positions and weighted over steps."""
    regression = F.smooth_l1_loss(guesses, features.expand_as(guesses), reduction="none").mean((1, 2))  # [K]
    entropy = draft_cross_entropy(guesses, features, log_mass, rows)  # [K]
    combined = feature_weight * regression + weight * entropy
    return (combined * step_weights).sum() / step_weights.sum()
