"""What the target knows at every position: its features and the normaliser of its own distribution.

Computed by the frozen target under ``no_grad``: every time anew, or once and kept, in memory or on disk. A kept token costs
2·H + 4 bytes in bfloat16 and spares the target's forward in every later epoch. What is kept is computed in batches that
depend on the data alone, not on the order of training, so that a resumed run sees the same numbers to the last bit.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.target import Target
from eyas.training.data import Batch, Sample, collate, groups

OBSERVED_ROWS = 64  # rows whose logits over the target's whole vocabulary live at a time


@dataclass(frozen=True)
class Knowledge:
    """The target on a batch.

    Attributes:
        features: last hidden states after the final norm, [B, L, H].
        log_mass: log of the sum of exp(logits) over the whole vocabulary, [B, L] float32.
    """

    features: Tensor
    log_mass: Tensor


Store = MutableMapping[int, Knowledge]
"""Knowledge of single samples by their place in the data, unpadded: [L, H] and [L]."""


@torch.no_grad()
def observe(target: Target, batch: Batch, chunk: int = OBSERVED_ROWS) -> Knowledge:
    """Run the target over a batch."""
    out = target.model(
        input_ids=batch.ids,
        attention_mask=batch.present.long(),
        output_hidden_states=True,
        use_cache=False,
        logits_to_keep=1,
    )
    features = out.hidden_states[-1]  # [B, L, H]
    log_mass = [target.score(rows).float().logsumexp(-1) for rows in features.flatten(0, 1).split(chunk)]  # each [chunk]
    return Knowledge(features, torch.cat(log_mass).view(features.shape[:2]))


class FeatureSource:
    """The target's knowledge of a list of samples.

    Args:
        samples: all there are.
        batch_tokens: padded tokens that the target is given at a time when it fills the store.
        store: keeps what has been computed; None: computed anew every time.
    """

    def __init__(self, target: Target, samples: Sequence[Sample], batch_tokens: int, store: Store | None) -> None:
        self.target, self.samples, self.store = target, samples, store
        self.group_of = {place: group for group in groups(samples, batch_tokens) for place in group}

    def __call__(self, batch: Batch) -> Knowledge:
        """The target on a batch that lies on its device."""
        if self.store is None:
            return observe(self.target, batch)
        for place in batch.index:
            if place not in self.store:
                self._fill(self.group_of[place])
        rows = [self.store[place] for place in batch.index]
        features = torch.nn.utils.rnn.pad_sequence([row.features for row in rows], batch_first=True)
        log_mass = torch.nn.utils.rnn.pad_sequence([row.log_mass for row in rows], batch_first=True)
        return Knowledge(features.to(batch.ids.device), log_mass.to(batch.ids.device))

    def _fill(self, group: list[int]) -> None:
        assert self.store is not None
        found = observe(self.target, collate(self.samples, group).to(self.target.device))
        for row, place in enumerate(group):
            length = len(self.samples[place].ids)
            self.store[place] = Knowledge(
                found.features[row, :length].cpu().clone(), found.log_mass[row, :length].cpu().clone()
            )
