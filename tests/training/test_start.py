"""Where training starts from."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eyas.errors import EyasError
from eyas.heads.eagle import EagleHead, HeadConfig
from eyas.target import Target
from eyas.training.data import Batch, Sample, collate
from eyas.training.features import Knowledge, observe
from eyas.training.start import fc_from_regression, starting_head
from tests.training.tiny import make_target


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
    fc_from_regression(head, [observed], lambda tokens: embedding[tokens])
    torch.testing.assert_close(head.fc.weight.detach(), made, atol=0.02, rtol=0.05)


def observed_by(target: Target) -> list[tuple[Batch, Knowledge]]:
    samples = [Sample(torch.arange(1, 16), torch.ones(15, dtype=torch.bool))]
    batch = collate(samples, [0])
    return [(batch, observe(target, batch))]


def test_the_last_layer_is_copied() -> None:
    target = make_target()
    head = starting_head(target, "last-layer", 12, observed_by(target))
    layer = target.model.model.layers[-1].state_dict()
    for name, weight in head.layer.state_dict().items():
        assert torch.equal(weight, layer[name])
    regression = starting_head(target, "regression", 12, observed_by(target))
    assert torch.equal(head.fc.weight, regression.fc.weight)


def test_biases_of_the_last_layer_are_copied_too() -> None:
    config = Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=16, max_position_embeddings=128,
    )  # fmt: skip
    target = Target(Qwen2ForCausalLM(config).eval(), None, "tiny")
    torch.nn.init.normal_(target.model.model.layers[-1].self_attn.k_proj.bias)
    head = starting_head(target, "last-layer", None, observed_by(target))
    assert torch.equal(head.layer.self_attn.k_proj.bias, target.model.model.layers[-1].self_attn.k_proj.bias)


@pytest.mark.parametrize("kind", ["gemma", "qwen3"])
def test_a_layer_of_another_make_is_refused(kind: str) -> None:
    """Gemma's norms multiply by 1 + weight, Qwen3 norms queries and keys."""
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": 16, "max_position_embeddings": 128,
    }  # fmt: skip
    config, made = {"gemma": (GemmaConfig, GemmaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[kind]
    target = Target(made(config(**sizes)).eval(), None, "tiny")
    with pytest.raises(EyasError, match="start is last-layer, but"):
        starting_head(target, "last-layer", None, observed_by(target))
