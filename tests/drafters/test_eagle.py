"""The EAGLE drafter's part in sharing the numbers of sampling; what it drafts otherwise is tested with trees and the loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eyas.drafters.eagle import EagleDraft, EagleDrafter
from eyas.noise import Noise, SharedNoise
from eyas.policies import DynamicTree
from tests.drafts import engine, trained_head

IDS = [7, 9, 1, 30, 12]
ROOT = 5


@pytest.mark.parametrize("frequent", [None, torch.arange(3, 27, 2)], ids=["all tokens", "some"])
def test_every_level_races_with_its_own_numbers(frequent: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another level's numbers, none, or those of other tokens would leave the text as it is, and cost acceptance."""
    asked: list[int] = []
    noisy = SharedNoise.noisy

    def spy(self: SharedNoise, logits: Tensor, level: int, tokens: Tensor | None = None) -> Tensor:
        asked.append(level)
        return noisy(self, logits, level, tokens)

    monkeypatch.setattr(SharedNoise, "noisy", spy)
    target = engine("llama").target
    draft = EagleDraft(target, trained_head("llama"), frequent, own_tokens=0)
    features, _ = target.prefill(target.new_cache(1), [IDS])
    drafter, noise = EagleDrafter(draft, 1), SharedNoise([Noise(3)], [1.2], [4], target.vocab_size)
    drafter.commit([[*IDS, ROOT]], features)
    tree = drafter.propose(torch.tensor([ROOT]), DynamicTree(20, 3, 2), noise)
    assert asked == [1, 2, 3]
    logits = target.postprocess(draft.read(drafter.guess)).float()[0, 0]  # [D]
    tokens = torch.arange(target.vocab_size) if frequent is None else frequent
    scores = logits / 1.2 - Noise(3)(4, target.vocab_size)[tokens].log()  # new token 4 follows the root
    children = tree.tokens[0, 1:][tree.parents[0, 1:] == 0]
    assert set(children.tolist()) == set(tokens[scores.topk(2).indices].tolist())
    quiet = drafter.propose(torch.tensor([ROOT]), DynamicTree(20, 3, 2))
    assert asked == [1, 2, 3] and quiet.tokens.tolist() != tree.tokens.tolist()
