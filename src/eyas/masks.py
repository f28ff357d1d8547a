"""Additive attention masks over a committed prefix and the nodes of a tree."""

from __future__ import annotations

import torch
from torch import Tensor


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn ``visible`` [B, n, keys] bool into a mask [B, 1, n, keys] that is 0 where visible and the lowest number elsewhere.

    This is the form that every transformers attention of a decoder accepts, eager or sdpa.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def tree_visibility(prefix: Tensor, relation: Tensor) -> Tensor:
    """What each new node sees: the committed prefix, and the new nodes related to it.

    Args:
        prefix: [B, start] bool, `RowCache.prefix_mask`.
        relation: [B, n, n] bool, ancestor-or-self (causal for a chain).

    Returns:
        [B, n, start + n] bool.
    """
    return torch.cat([prefix[:, None, :].expand(-1, relation.shape[1], -1), relation], dim=2)


def within_window(prefix_length: int, positions: Tensor, window: int) -> Tensor:
    """Which keys lie in each node's sliding window: query position − key position < window.

    Args:
        prefix_length: stored prefix rows; row j holds position j.
        positions: [B, n] int64 positions of the new nodes.
        window: window size in tokens, the token itself included.

    Returns:
        [B, n, prefix_length + n] bool.
    """
    stored = torch.arange(prefix_length, device=positions.device).expand(len(positions), -1)
    keys = torch.cat([stored, positions], dim=1)  # [B, prefix + n]
    return positions[:, :, None] - keys[:, None, :] < window
