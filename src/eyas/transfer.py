"""From host to device without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Host values as a tensor on a device; unlike ``torch.tensor(values, device=...)`` it does not wait for queued work."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def padded(rows: list[list[int]], device: torch.device) -> Tensor:
    """Rows of host integers as [B, longest] int64, filled up with 0."""
    width = max(map(len, rows))
    return upload([row + [0] * (width - len(row)) for row in rows], device)
