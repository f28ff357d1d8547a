"""Packed layers give the stock layers' numbers, bit for bit, and stay away where they cannot."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from eyas.conversations import Conversations
from eyas.errors import EyasError
from eyas.heads.eagle import EagleHead
from eyas.loading import load_target
from eyas.packing import PackedLinear, can_pack, is_packed, linear, pack_model, packed
from eyas.target import Target
from eyas.training.loop import train
from eyas.training.options import TrainOptions
from tests import families
from tests.drafts import engine, head_config, random_head
from tests.training.tiny import make_tokenizer

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


@needs_packing
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3_moe"])  # tied and untied heads, a head alone, experts
def test_a_packed_model_says_the_same(name: str) -> None:
    """Logits bit for bit, cached and not; the LM head's weight stays readable, as drafts and trainers read it."""
    stock = copy.deepcopy(families.model(name)).to(torch.bfloat16)
    model = copy.deepcopy(stock)
    pack_model(model)
    assert is_packed(model) and not is_packed(stock)
    head, weight = model.get_output_embeddings(), stock.get_output_embeddings().weight
    assert torch.equal(head.get_parameter("weight"), weight) and not head.get_parameter("weight").requires_grad
    ids = torch.tensor([[1, 5, 9, 2, 40, 7, 3]])
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, stock(ids).logits)
    assert families.greedy(model, [1, 5, 9], 12) == families.greedy(stock, [1, 5, 9], 12)
    assert Target(model, None, name).dtype == torch.bfloat16
    for forbidden, reason in (
        (lambda: model.state_dict(), "cannot be saved"),
        (lambda: model.float()(ids), "was given torch.float32"),
    ):
        with pytest.raises(EyasError, match=reason):
            forbidden()


@needs_packing
def test_loading_packs_unless_told_otherwise(tmp_path: Path) -> None:
    families.model("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    loaded = load_target(tmp_path, dtype="bfloat16", device="cpu")
    assert is_packed(loaded.model) and not is_packed(load_target(tmp_path, dtype="float32", device="cpu").model)
    assert not is_packed(load_target(tmp_path, dtype="bfloat16", device="cpu", packed=False).model)
    with pytest.raises(EyasError, match="load it with packed=False"):
        train(loaded, Conversations([], []), None, TrainOptions(out=tmp_path / "draft"))


def test_other_dtypes_are_left_as_they_are() -> None:
    head = EagleHead(head_config(engine("llama").target))
    assert packed(head) is head
    weight, bias = torch.randn(7, 5), torch.randn(7)
    layer = linear(weight, bias)
    assert isinstance(layer, nn.Linear) and not any(parameter.requires_grad for parameter in layer.parameters())
    x = torch.randn(3, 5)
    assert torch.equal(layer(x), nn.functional.linear(x, weight, bias))
