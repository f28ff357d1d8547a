"""Packed layers give the stock layers' numbers, bit for bit, and stay away where they cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eyas.heads.eagle import EagleHead
from eyas.packing import PackedLinear, can_pack, linear, packed
from tests.drafts import engine, head_config, random_head

needs_packing = pytest.mark.skipif(not can_pack(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="no bfloat16 oneDNN here")


@needs_packing
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 10, 1), (61,)])
def test_the_numbers_are_the_stock_layers(shape: tuple[int, ...], biased: bool) -> None:
    torch.manual_seed(0)
    stock = nn.Linear(48, 80, bias=biased, dtype=torch.bfloat16)
    x = torch.randn(*shape, 48).bfloat16()
    with torch.inference_mode():
        assert torch.equal(PackedLinear(stock.weight, stock.bias)(x), stock(x))
        assert torch.equal(linear(stock.weight, stock.bias)(x), stock(x))


@needs_packing
def test_a_packed_head_guesses_the_same_and_leaves_the_original_alone() -> None:
    head = random_head(head_config(engine("llama").target)).to(torch.bfloat16)
    other = packed(head)
    assert isinstance(other.fc, PackedLinear) and isinstance(other.layer.mlp.down_proj, PackedLinear)
    assert not any(isinstance(part, PackedLinear) for part in head.modules())
    embeddings, features = torch.randn(2, 1, 4, 32).bfloat16()
    positions = torch.arange(4)[None]
    with torch.inference_mode():
        assert torch.equal(other(embeddings, features, positions), head(embeddings, features, positions))


def test_other_dtypes_are_left_as_they_are() -> None:
    head = EagleHead(head_config(engine("llama").target))
    assert packed(head) is head
    weight, bias = torch.randn(7, 5), torch.randn(7)
    layer = linear(weight, bias)
    assert isinstance(layer, nn.Linear) and not any(parameter.requires_grad for parameter in layer.parameters())
    x = torch.randn(3, 5)
    assert torch.equal(layer(x), nn.functional.linear(x, weight, bias))
