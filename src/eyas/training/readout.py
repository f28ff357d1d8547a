"""How a distribution is read off features: the target's LM head, as far as the draft vocabulary goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.target import Target
from eyas.training.data import Batch

SHUT = -1e4
"""The logit of a token that is shut: no probability, and finite, so that no probability times it is 0."""


@dataclass(frozen=True)
class Readout:
    """The LM head's rows for the draft vocabulary, and what the model does to its logits.

    Attributes:
        rows: [D, H]; their dtype is the one to multiply in.
        bias: [D], or None.
        scale: factor on the logits (Cohere, Granite).
        cap: they are soft-capped to ± cap (Gemma); None: not at all.
    """

    rows: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    def logits(self, features: Tensor, closed: Tensor | None = None) -> Tensor:
        """Logits [..., D] float32 of features [..., H]; ``closed`` [..., M] bool shuts some of the last M tokens."""
        logits = F.linear(features.to(self.rows.dtype), self.rows, self.bias).float()
        if self.scale != 1:
            logits *= self.scale
        logits = logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)
        if closed is not None:
            logits[..., -closed.shape[-1] :].masked_fill_(closed, SHUT)
        return logits

    def pull(self, slope: Tensor, flatness: Tensor | None) -> Tensor:
        """The gradient [..., H] in features from one in logits [..., D]; ``flatness``: `capping` at those logits."""
        if flatness is not None:
            slope = slope * flatness
        return (slope.to(self.rows.dtype) @ self.rows).float() * self.scale

    def capping(self, logits: Tensor) -> Tensor | None:
        """Derivative [..., D] of the soft cap where it gave ``logits``; None: there is no cap."""
        return None if self.cap is None else 1 - (logits / self.cap) ** 2


def read_head(target: Target, token_map: Tensor | None) -> Readout:
    """A target's readout over a draft vocabulary (target ids [D] int64; None: all).

    `eyas.target.Target.postprocess` is the same as a function of logits; its gradient needs the parts.
    """
    rows, bias = target.head.get_parameter("weight").detach(), getattr(target.head, "bias", None)
    bias = None if bias is None else bias.detach()
    if token_map is not None:
        rows, bias = rows[token_map.to(rows.device)], None if bias is None else bias[token_map.to(bias.device)]
    config = target.config
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return Readout(rows, bias, float(scale), getattr(config, "final_logit_softcapping", None))


def read_batch(target: Target, token_map: Tensor | None, batch: Batch) -> tuple[Readout, Tensor | None]:
    """The readout over a draft vocabulary [D] and M tokens more that a batch's texts hold.

    Drafting proposes a text's own tokens besides (`eyas.drafters.vocabulary`), so the head has to learn when to say them.
    Here a token counts as the text's own from the start, also before it first occurs.

    Returns:
        The readout over D + M tokens, and which of the M are not in a conversation, [B, M] bool; None: there are none.
    """
    if token_map is None:
        return read_head(target, None), None
    ids = batch.ids.where(batch.present, batch.ids[:, :1])  # filling is no token of the text
    own = ids.unique()
    own = own[~torch.isin(own, token_map)]  # [M]
    if not len(own):
        return read_head(target, token_map), None
    absent = torch.ones(len(ids), target.vocab_size, dtype=torch.bool, device=ids.device).scatter_(1, ids, False)  # [B, V]
    return read_head(target, torch.cat([token_map, own])), absent[:, own]


def draft_ids(token_map: Tensor | None, tokens: Tensor, vocab_size: int) -> Tensor:
    """Places in the draft vocabulary of target tokens; −1: not in it."""
    if token_map is None:
        return tokens
    places = torch.full((vocab_size,), -1, device=tokens.device)  # [V]
    places[token_map] = torch.arange(len(token_map), device=tokens.device)
    return places[tokens]
