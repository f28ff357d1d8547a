"""The closed-form start."""

from __future__ import annotations

import torch

from eyas.heads.eagle import EagleHead, HeadConfig
from eyas.training.data import Sample, collate
from eyas.training.features import Knowledge
from eyas.training.start import start_from_regression


def test_a_linear_target_is_found() -> None:
    """Features made by f[i+1] = A e(t[i+1]) + B f[i] give fc = [A | B]: embedding first, shifted by one."""
    torch.manual_seed(0)
    size, length = 4, 60
    embedding, ids = torch.randn(32, size), torch.randint(32, (8, length))
    made = torch.cat([torch.randn(size, size), torch.randn(size, size) * 0.2], dim=1)  # [H, 2H]
    features = torch.zeros(8, length, size)
    for place in range(1, length):
        features[:, place] = torch.cat([embedding[ids[:, place]], features[:, place - 1]], dim=-1) @ made.T
    samples = [Sample(row, torch.ones(length, dtype=torch.bool)) for row in ids]
    observed = (collate(samples, list(range(8))), Knowledge(features, torch.zeros(8, length)))
    head = EagleHead(HeadConfig(size, 8, num_attention_heads=2, num_key_value_heads=1, head_dim=2, vocab_size=32))
    start_from_regression(head, [observed], embedding)
    torch.testing.assert_close(head.fc.weight.detach(), made, atol=0.02, rtol=0.05)
