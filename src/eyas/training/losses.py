"""The losses: regression of the feature, and cross-entropies of the distributions read from it.

The cross-entropy runs over the tokens D that drafting may propose: the draft vocabulary and the text's own. With p the
target's distribution over its whole vocabulary and q the head's over D, it is  -Σ_{v in D} p(v) log q(v):  a position counts
as much as D covers it, so where the target wants a token the head cannot propose nothing is learnt.

For greedy decoding only the target's best token counts. A temperature T below 1 sharpens what is learnt: in the place of p
stands p^(1/T), normalised so that D has as much of it as of p.

The top-k loss (HASS, arXiv 2408.15766 §3.1) is the part of that sum that runs over the k tokens of D the target likes best:
drafting ranks the best tokens and hardly asks for the rest. Both together are one cross-entropy, with p weighted by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.training.options import TrainOptions
from eyas.training.readout import Readout

CHUNK = 128  # rows whose logits over the draft vocabulary live at a time


@dataclass(frozen=True)
class LossWeights:
    """What each term counts.

    Attributes:
        feature: SmoothL1 on features.
        entropy: cross-entropy over the draft vocabulary.
        top: its part over the target's ``k`` best tokens, on top of ``entropy``.
        k: see ``top``.
        temperature: T of the target's distribution.
    """

    feature: float
    entropy: float
    top: float = 0.0
    k: int = 10
    temperature: float = 1.0


def loss_weights(options: TrainOptions) -> LossWeights:
    """The terms of ``options.loss``."""
    if options.loss == "distribution":
        return LossWeights(0.0, 1.0, temperature=options.distill_temperature)
    top = options.top_k_weight if options.loss == "top-k" else 0.0
    return LossWeights(options.feature_weight, options.entropy_weight, top, options.top_k, options.distill_temperature)


class Distillation(torch.autograd.Function):
    """The summed cross-entropies of each step, with their gradient found on the way.

    Logits over the vocabulary are the largest tensors of training by far; here they live for one chunk of rows only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        guesses: Tensor,
        features: Tensor,
        log_mass: Tensor,
        readout: Readout,
        weights: LossWeights,
        closed: Tensor | None,
        chunk: int,
    ) -> Tensor:
        losses = guesses.new_zeros(guesses.shape[0], dtype=torch.float32)  # [K]
        gradient = torch.empty_like(guesses)  # [K, N, H]
        for start in range(0, guesses.shape[1], chunk):
            part = slice(start, start + chunk)
            shut = None if closed is None else closed[part]  # [c, M]
            target = readout.logits(features[part], shut).sub_(log_mass[part, None])  # [c, D], log p
            if weights.temperature == 1:
                target = target.exp_()
            else:
                mass = target.logsumexp(-1, keepdim=True).exp()  # [c, 1], of p in D
                target = target.div_(weights.temperature).softmax(-1).mul_(mass)
            best = target.topk(min(weights.k, target.shape[-1]), dim=-1) if weights.top else None  # [c, k]
            target *= weights.entropy
            if best is not None:
                target.scatter_add_(-1, best.indices, weights.top * best.values)
            covered = target.sum(-1, keepdim=True)  # [c, 1]
            for step, guess in enumerate(guesses[:, part]):
                logits = readout.logits(guess, shut)  # [c, D]
                flatness = readout.capping(logits)
                dot = torch.linalg.vecdot(target, logits)  # [c]
                highest = logits.amax(-1, keepdim=True)
                logits = logits.sub_(highest).exp_()
                total = logits.sum(-1, keepdim=True)
                log_total = total.log().add_(highest)  # [c, 1]
                losses[step] += (covered * log_total).sum() - dot.sum()
                slope = logits.mul_(covered / total).sub_(target)  # [c, D]
                gradient[step, part] = readout.pull(slope, flatness).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * slopes[0][:, None, None], None, None, None, None, None, None


def distillation(
    guesses: Tensor,
    features: Tensor,
    log_mass: Tensor,
    readout: Readout,
    weights: LossWeights,
    closed: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Weighted cross-entropies summed over the positions, a value for each step, [K].

    Args:
        guesses: the head's features at the supervised positions, [K, N, H].
        features: the target's, [N, H].
        log_mass: log Σ exp of the target's logits over its whole vocabulary, [N].
        readout: reads logits over the draft vocabulary off both.
        closed: which of the readout's last M tokens a position may not have, [N, M] bool; None: none.
    """
    losses: Tensor = Distillation.apply(guesses, features, log_mass, readout, weights, closed, chunk)
    return losses


def draft_loss(
    guesses: Tensor,
    features: Tensor,
    log_mass: Tensor,
    readout: Readout,
    weights: LossWeights,
    step_weights: Tensor,
    closed: Tensor | None = None,
) -> Tensor:
    """All terms, averaged over steps by ``step_weights`` [K] and *summed* over positions; arguments as `distillation`."""
    loss = distillation(guesses, features, log_mass, readout, weights, closed)  # [K]
    if weights.feature:
        regression = F.smooth_l1_loss(guesses, features.expand_as(guesses), reduction="none").mean(2).sum(1)  # [K]
        loss = loss + weights.feature * regression
    return (loss * step_weights).sum() / step_weights.sum()
