"""Packed layers give the stock layers' numbers, bit for bit, and stay away where they cannot."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from eyas.conversations import Conversations
from eyas.decode import check_size
from eyas.errors import EyasError
from eyas.heads.eagle import EagleHead
from eyas.loading import load_target
from eyas.packing import (
    GROUP,
    MANY_ROWS,
    FourBitLinear,
    PackedLinear,
    can_pack,
    can_stay_four_bits,
    four_bits,
    is_four_bit,
    is_packed,
    linear,
    pack_model,
    packed,
)  # fmt: skip
from eyas.target import Target
from eyas.training.loop import train
from eyas.training.options import TrainOptions
from eyas.tree import DraftTree, root_tree
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


def four_bit_weight(rows: int = 32, columns: int = 64, kind: str = "Q4_1") -> torch.Tensor:
    """As such a .gguf file gives it: in each group of 32 multiples of a step above a least value."""
    torch.manual_seed(0)
    numbers, step = torch.randint(1, 15, (rows, columns // GROUP, GROUP)).float(), torch.rand(rows, columns // GROUP, 1) + 0.5
    if kind == "Q4_0":
        numbers[..., 0] = 0
        return ((numbers - 8) * step * torch.tensor([1.0, -1.0])[torch.randint(0, 2, step.shape)]).flatten(1)
    numbers[..., 0], numbers[..., 1] = 0, 15
    return ((numbers - 15 * torch.rand(step.shape)) * step).flatten(1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bits_are_found_where_they_are(kind: str) -> None:
    weight = four_bit_weight(kind=kind)
    for stored in (weight, weight.bfloat16()):
        found = four_bits(stored)
        assert found is not None
        numbers, step, least = found
        back = numbers.unflatten(1, (-1, GROUP)) * step[..., None] + least[..., None]
        torch.testing.assert_close(back.flatten(1), weight, atol=0.1 if stored.dtype == torch.bfloat16 else 1e-5, rtol=0)
        assert numbers.min() == 0 and numbers.max() == 15
    assert four_bits(torch.zeros(4, GROUP)) is not None, "a group of one value"
    assert four_bits(torch.randn(4, GROUP)) is None and four_bits(weight[:, :40]) is None


needs_four_bits = pytest.mark.skipif(
    not can_stay_four_bits(torch.zeros(32, GROUP, dtype=torch.bfloat16)), reason="this torch or CPU multiplies no 4-bit weights"
)


@needs_four_bits
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1,), (2, 3), (1, MANY_ROWS)])
def test_a_four_bit_layer_multiplies_the_files_weights(shape: tuple[int, ...], biased: bool) -> None:
    weight, bias = four_bit_weight(), torch.randn(32).bfloat16() if biased else None
    layer, x = FourBitLinear(weight.bfloat16(), bias), torch.randn(*shape, 64).bfloat16()
    with torch.inference_mode():
        exact = nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
        torch.testing.assert_close(layer(x).float(), exact, atol=0.02 * float(exact.std()), rtol=0.02)


@needs_four_bits
def test_a_four_bit_row_does_not_depend_on_its_company() -> None:
    """What a node's layers give is the same alone and in any tree."""
    layer, x = FourBitLinear(four_bit_weight().bfloat16()), torch.randn(61, 64).bfloat16()
    with torch.inference_mode():
        whole = layer(x)
        assert all(
            torch.equal(layer(x[first : first + n]), whole[first : first + n])
            for first in range(0, 40, 7)
            for n in (1, 2, 5, 13)
        )
        batch = torch.stack([x, x.flip(0), x])  # 183 rows, and still few of each text
        assert torch.equal(layer(batch), torch.stack([layer(row) for row in batch]))


@needs_four_bits
def test_a_model_keeps_only_what_is_of_four_bits() -> None:
    model = copy.deepcopy(families.model("llama")).to(torch.bfloat16)
    layer = model.model.layers[0].mlp.gate_proj
    layer.weight = nn.Parameter(four_bit_weight(*layer.weight.shape).bfloat16(), requires_grad=False)
    twin = copy.deepcopy(model)
    pack_model(model, four_bit=True)
    pack_model(twin)
    assert is_four_bit(model) and is_packed(model) and not is_four_bit(twin)
    kinds = [type(part) for part in model.modules() if isinstance(part, (FourBitLinear, PackedLinear))]
    assert kinds.count(FourBitLinear) == 1
    with pytest.raises(EyasError, match="cannot be saved"):
        model.state_dict()


def test_four_bits_are_refused_where_there_are_none(tmp_path: Path) -> None:
    families.model("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(EyasError, match="cannot stay in 4 bits"):
        load_target(tmp_path, dtype="4bit", device="cpu")


@needs_four_bits
def test_a_tree_too_large_for_four_bits_is_refused() -> None:
    """From MANY_ROWS nodes on it would be verified with other weights than plain decoding has."""
    model = copy.deepcopy(families.model("llama")).to(torch.bfloat16)
    layer = model.model.layers[0].mlp.gate_proj
    layer.weight = nn.Parameter(four_bit_weight(*layer.weight.shape).bfloat16(), requires_grad=False)
    pack_model(model, four_bit=True)
    target = Target(model, None, "tiny")
    zeros = torch.zeros(1, MANY_ROWS, dtype=torch.int64)
    tree = DraftTree(zeros, zeros, zeros.float(), zeros.clamp(max=1), 1)
    with pytest.raises(EyasError, match="too large"):
        check_size(target, tree)
    check_size(target, root_tree(torch.tensor([1])))
