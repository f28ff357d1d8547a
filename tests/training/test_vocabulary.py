"""The reduced draft vocabulary."""

from __future__ import annotations

import torch

from eyas.training.data import Sample
from eyas.training.vocabulary import draft_vocabulary


def sample(ids: list[int], prompt: int) -> Sample:
    return Sample(torch.tensor(ids), torch.arange(len(ids)) >= prompt)


def test_the_most_frequent_written_tokens_are_chosen() -> None:
    samples = [sample([9, 9, 9, 5, 5, 7], prompt=3), sample([7, 5, 4], prompt=0)]  # 5: 3, 7: 2, 4: 1, the prompt's 9: 0
    assert draft_vocabulary(samples, 2, 10).tolist() == [5, 7]
    assert draft_vocabulary(samples, 3, 10).tolist() == [4, 5, 7]


def test_required_tokens_are_always_in_it() -> None:
    assert draft_vocabulary([sample([5, 5, 7, 7, 8], 0)], 2, 10, required={9}).tolist() == [5, 9]


def test_too_little_data_is_padded_with_the_lowest_ids() -> None:
    assert draft_vocabulary([sample([7], 0)], 4, 10).tolist() == [0, 1, 2, 7]
    assert draft_vocabulary([sample([7], 0)], 99, 10).tolist() == list(range(10))
