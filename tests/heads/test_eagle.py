"""The EAGLE-1/2 head against the same arithmetic written out number by number, with and without a cache."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.cache import RowCache
from eyas.heads.eagle import EagleHead, HeadConfig, fused
from eyas.masks import additive
from tests.drafts import random_head

SIZES: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "vocab_size": 16,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one key head": {"num_key_value_heads": 1},
    "all heads": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 10},
    "fc bias": {"fc_bias": True},
    "qkv bias": {"qkv_bias": True},
    "eps": {"rms_norm_eps": 0.5},
    "gelu": {"hidden_act": "gelu"},
    "theta": {"rope": {"rope_type": "default", "rope_theta": 50.0}},
    "scaled": {"rope": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}},
}


def make(**changes: Any) -> EagleHead:
    return random_head(HeadConfig(**{**SIZES, **changes}), seed=1)


def inputs(head: EagleHead, batch: int = 2, n: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    embeddings = torch.randn(batch, n, head.config.hidden_size, generator=generator)
    return embeddings, torch.randn(batch, n, head.config.hidden_size, generator=generator)


def rotate(vector: list[float], position: int, theta: float, factor: float) -> list[float]:
    """Rotary embedding, pair (j, j + D/2) by its own angle."""
    half, out = len(vector) // 2, list(vector)
    for j in range(half):
        angle = position / factor / theta ** (2 * j / len(vector))
        low, high = vector[j], vector[j + half]
        out[j] = low * math.cos(angle) - high * math.sin(angle)
        out[j + half] = high * math.cos(angle) + low * math.sin(angle)
    return out


def slow_head(head: EagleHead, embeddings: Tensor, features: Tensor, positions: list[int]) -> Tensor:
    """One row's output [n, H] by loops in double precision: each position sees itself and those before it."""
    config, weights = head.config, {key: value.double() for key, value in head.state_dict().items()}

    def linear(name: str, x: Tensor) -> Tensor:
        out = weights[f"{name}.weight"] @ x
        return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out

    theta, factor = config.rope["rope_theta"], config.rope.get("factor", 1.0)
    size, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    keys: list[list[list[float]]] = []
    values: list[Tensor] = []
    outputs = []
    for embedding, feature, position in zip(embeddings.double(), features.double(), positions, strict=True):
        x = linear("fc", torch.cat([embedding, feature]))
        q, k, v = (linear(f"layers.0.self_attn.{part}_proj", x) for part in "qkv")
        keys.append([rotate(one.tolist(), position, theta, factor) for one in k.split(size)])
        values.append(v)
        mixed = []
        for number, one in enumerate(q.split(size)):
            query, group = rotate(one.tolist(), position, theta, factor), number // groups
            scores = [sum(a * b for a, b in zip(query, key[group], strict=True)) / math.sqrt(size) for key in keys]
            weight = [math.exp(score - max(scores)) for score in scores]
            shares = [w / sum(weight) for w in weight]
            mixed.append(sum(share * value.split(size)[group] for share, value in zip(shares, values, strict=True)))
        x = x + linear("layers.0.self_attn.o_proj", torch.cat(mixed))
        norm = x / (x.pow(2).mean() + config.rms_norm_eps).sqrt() * weights["layers.0.post_attention_layernorm.weight"]
        gate, up = linear("layers.0.mlp.gate_proj", norm), linear("layers.0.mlp.up_proj", norm)
        act = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) if config.hidden_act == "gelu" else gate / (1 + (-gate).exp())
        outputs.append(x + linear("layers.0.mlp.down_proj", act * up))
    return torch.stack(outputs)


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_equals_the_arithmetic_written_out(shape: str) -> None:
    """A swapped concatenation, an input norm too many, a wrong rotation: all draft, only worse, and nothing else would tell."""
    head = make(**SHAPES[shape])
    embeddings, features = inputs(head)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [3, 4, 5, 6, 7, 8, 9]])
    out = head(embeddings, features, positions)
    for row in range(2):
        expected = slow_head(head, embeddings[row], features[row], positions[row].tolist())
        torch.testing.assert_close(out[row].double(), expected, atol=1e-4, rtol=1e-4)


def test_every_shape_differs() -> None:
    """An option that is not honoured by head and reference alike would pass above."""
    outputs = []
    for shape in ("grouped", "eps", "gelu", "theta", "scaled"):
        head = make(**SHAPES[shape])  # same weights: same seed, same shapes
        outputs.append(head(*inputs(head), torch.arange(7).expand(2, -1)))
    for place, one in enumerate(outputs):
        assert all(not torch.allclose(one, other, atol=1e-3) for other in outputs[:place])


def test_cached_forward_equals_uncached() -> None:
    """Rows appended in pieces, as drafting does, must give what one forward gives."""
    head = make(qkv_bias=True)
    embeddings, features = inputs(head, n=9)
    positions = torch.arange(9).expand(2, -1)
    whole = head(embeddings, features, positions)
    cache, pieces, begin = RowCache(1, 2), [], 0
    for count in (4, 1, 3, 1):
        end = begin + count
        mask = None
        if begin:
            seen = torch.arange(end) <= torch.arange(begin, end)[:, None]  # [count, end]
            mask = additive(seen.expand(2, -1, -1), torch.float32)
        pieces.append(head(embeddings[:, begin:end], features[:, begin:end], positions[:, begin:end], mask, cache))
        cache.keep([list(range(count))] * 2)
        begin = end
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_a_masked_row_is_not_seen() -> None:
    """Tree nodes hide their siblings by the mask alone."""
    head = make()
    embeddings, features = inputs(head, batch=1, n=4)
    positions = torch.tensor([[0, 1, 2, 2]])  # the last two are siblings
    mask = torch.tril(torch.ones(4, 4, dtype=torch.bool))
    mask[3, 2] = False
    out = head(embeddings, features, positions, additive(mask[None], torch.float32))
    kept = [0, 1, 3]
    alone = head(embeddings[:, kept], features[:, kept], torch.tensor([[0, 1, 2]]))
    torch.testing.assert_close(out[:, 3], alone[:, 2], atol=1e-5, rtol=1e-5)


def test_parameters_are_the_published_ones() -> None:
    """The state dict is the file format: a renamed parameter could not be read by anyone."""
    plain = {
        "fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.v_proj.weight", "layers.0.self_attn.o_proj.weight", "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight", "layers.0.post_attention_layernorm.weight",
    }  # fmt: skip
    assert set(make().state_dict()) == plain
    biases = {"fc.bias", *(f"layers.0.self_attn.{part}_proj.bias" for part in "qkv")}
    assert set(make(fc_bias=True, qkv_bias=True).state_dict()) == plain | biases


def test_far_positions_keep_their_angle_in_half_precision() -> None:
    """A head cast to bfloat16 together with its rotary frequencies would turn position 1000 by a radian too much."""
    head, x = make(), torch.zeros(1, 1, SIZES["hidden_size"])
    positions = torch.tensor([[1000]])
    exact = head.rotary(x, position_ids=positions)
    for cast in (make().to(torch.bfloat16), make().half().float(), make().to("cpu", torch.bfloat16)):
        rotated = cast.rotary(x, position_ids=positions)
        assert all(torch.equal(one, other) for one, other in zip(rotated, exact, strict=True))
    assert make().to(torch.bfloat16).fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["grouped", "all heads", "qkv bias"])
def test_a_fused_head_guesses_the_same_and_leaves_the_original_alone(name: str) -> None:
    head = make(**SHAPES[name])
    names, one = list(head.state_dict()), fused(head)
    assert list(head.state_dict()) == names and len(one.state_dict()) < len(names)
    embeddings, features = inputs(head)
    positions, mask = torch.arange(7).expand(2, -1), additive(torch.ones(2, 7, 7).tril().bool(), torch.float32)
    with torch.inference_mode():
        for some in (None, mask):
            expected = head(embeddings, features, positions, some)
            torch.testing.assert_close(one(embeddings, features, positions, some), expected, atol=1e-6, rtol=1e-6)
