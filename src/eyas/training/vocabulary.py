"""The reduced draft vocabulary: the tokens the head may propose.

Every draft forward scores each of its nodes against the whole draft vocabulary, which for a small target costs more
than the head itself; a few thousand frequent tokens cover nearly all text. Verification always uses the whole
vocabulary, so the choice changes speed only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from eyas.training.data import Sample


def draft_vocabulary(samples: Sequence[Sample], size: int, vocab_size: int, required: Collection[int] = ()) -> Tensor:
    """Target ids of the tokens the assistant wrote most often, ascending, [min(size, vocab_size)] int64.

    On equal counts, and when the data hold fewer tokens than asked for, the lower id comes first: byte-pair
    vocabularies number their tokens by falling frequency.

    Args:
        required: tokens that are always in it, such as the end tokens.
    """
    written = torch.cat([sample.ids[sample.written] for sample in samples])
    counts = torch.bincount(written, minlength=vocab_size)
    counts[list(required)] = len(written) + 1
    ranked = counts.sort(descending=True, stable=True).indices
    return ranked[:size].sort().values
