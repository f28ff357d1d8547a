"""Evaluation that means something: real tree decoding of held-out prompts, through the same engine that users call."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.drafters.eagle import EagleDraft
from eyas.engine import Engine
from eyas.heads.eagle import EagleHead
from eyas.policies import DynamicTree
from eyas.statistics import Statistics
from eyas.target import Target


@dataclass(frozen=True)
class Decoded:
    """What greedy decoding with the paper's tree gave.

    Attributes:
        tau: tokens a step over all prompts, see `eyas.statistics.Statistics`.
        acceptance: conditional acceptance by depth; None where no step got there.
    """

    tau: float
    acceptance: list[float | None]

    def __str__(self) -> str:
        rates = " ".join("–" if rate is None else f"{rate:.2f}" for rate in self.acceptance)
        return f"decoded τ {self.tau:.3f} (accepted by depth {rates})"


def decode_prompts(
    target: Target, head: EagleHead, token_map: Tensor | None, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Decoded | None:
    """Decode prompts greedily with a 60-node tree of depth 6, whatever tree would pay here: figures stay comparable.

    Args:
        head: float32; a copy drafts, rounded as it will be when it is saved.
        token_map: target ids of the draft vocabulary [D] int64; None: all tokens.

    Returns:
        None where there is no prompt, or all answers ended with their first token.
    """
    if not prompts:
        return None
    cast = copy.deepcopy(head).to(torch.bfloat16).to(target.dtype).requires_grad_(False)  # as it will be read back
    engine = Engine(target, EagleDraft(target, cast, token_map))
    results = engine.generate(list(prompts), tree=DynamicTree(), temperature=0.0, max_new_tokens=max_new_tokens)
    if any(result.finish_reason == "interrupted" for result in results):
        raise KeyboardInterrupt  # half an evaluation must not decide which head is kept
    together = Statistics()
    for result in results:
        together.delivered += result.stats.delivered
        together.accepted += result.stats.accepted
        together.depths += result.stats.depths
    return None if together.tau is None else Decoded(together.tau, together.acceptance)
