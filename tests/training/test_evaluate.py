"""The walk that turns held-out ranks into a guess of τ."""

from __future__ import annotations

import torch

from eyas.training.evaluate import _walk


def test_a_walk_jumps_over_what_it_accepted_and_starts_after_an_answers_first_token() -> None:
    accepted = torch.tensor([[9, 9, 2, 9, 9, 0, 1, 9, 9, 9, 3]])
    inside = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1]]).bool()
    # first answer: pairs 1 to 7; roots at 2 (accepts 2), 5 (0), 6 (1); second: pairs 9, 10; root at 10 (3)
    assert _walk(accepted, inside) == (3 + 1 + 2 + 4, 4)


def test_nothing_to_walk() -> None:
    assert _walk(torch.zeros(2, 5), torch.zeros(2, 5).bool()) == (0, 0)
    assert _walk(torch.zeros(1, 3), torch.tensor([[False, True, False]])) == (0, 0)
