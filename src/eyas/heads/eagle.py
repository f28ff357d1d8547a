"""The EAGLE-1/2 draft head: one decoder layer on the target's own features (EAGLE, arXiv 2401.15077).

Draft position i joins the embedding of token t[i+1] with the target's feature f[i] (its last hidden state after the final
norm) and predicts feature f[i+1], from which the target's own LM head reads the distribution of token t[i+2]:

    x     = fc(concat[embed(t[i+1]), f[i]])       embedding first                      [H]
    x     = x + attention(x)                      no norm before the attention
    f[i+1] ≈ x + mlp(rmsnorm(x))                  no final norm: it imitates a feature that has had one

Parameter names are those of the published checkpoints, so ``state_dict`` is the file format.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of an EAGLE-1/2 head.

    Attributes:
        rope: transformers' ``rope_parameters``; the default base 10000 is what the published code uses when a checkpoint
            says nothing.
        fc_bias: whether ``fc`` has a bias (published files have both kinds).
        qkv_bias: whether the q, k and v projections have biases (heads for Qwen2 targets).
        draft_vocab_size: tokens the head can propose; None: the target's whole vocabulary.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    fc_bias: bool = False
    qkv_bias: bool = False
    draft_vocab_size: int | None = None


def head_like(config: Any, draft_vocab_size: int | None) -> HeadConfig:
    """A head of the target's own shape, from its transformers configuration."""
    return HeadConfig(
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        hidden_act=getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None) or "silu",
        rope=plain_rope(config),
        max_position_embeddings=config.max_position_embeddings,
        draft_vocab_size=draft_vocab_size,
    )


def plain_rope(config: Any) -> dict[str, Any]:
    """The configuration's rotary parameters; of several layer types' the full attention's."""
    found = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    return dict(found.get("full_attention", found))


def _joined(*layers: nn.Linear) -> nn.Linear:
    """One layer that gives the outputs of several, one after the other."""
    first = layers[0]
    out = sum(layer.out_features for layer in layers)
    joined = nn.Linear(first.in_features, out, bias=first.bias is not None, device="meta")
    joined.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]), requires_grad=False)
    if first.bias is not None:
        joined.bias = nn.Parameter(torch.cat([layer.bias.detach() for layer in layers]), requires_grad=False)
    return joined


class EagleAttention(nn.Module):
    """Grouped-query self-attention with rotary positions; the cache is a transformers ``Cache`` of one layer."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        width, narrow = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.qkv_proj: nn.Linear | None = None  # the three as one, in a fused head
        self.widths = [width, narrow, narrow]

    def fuse(self) -> None:
        """Make one projection of the three for queries, keys and values."""
        self.qkv_proj = _joined(self.q_proj, self.k_proj, self.v_proj)
        del self.q_proj, self.k_proj, self.v_proj

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, heads, n, D] and keys, values [B, kv heads, n, D] of ``x`` [B, n, H]."""
        if self.qkv_proj is None:
            parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        else:
            parts = self.qkv_proj(x).split(self.widths, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        return query, key, value

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None) -> Tensor:
        query, key, value = self.project(x, rotary)
        if cache is not None:
            key, value = cache.update(key, value, 0)
        if mask is None:
            key, value = (states.repeat_interleave(self.groups, dim=1) for states in (key, value))
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # [B, heads, n, D]
        else:  # the queries that share keys as rows of one head: nothing is copied
            rows = query.unflatten(1, (-1, self.groups)).flatten(2, 3)  # [B, kv heads, groups · n, D]
            rows = F.scaled_dot_product_attention(rows, key, value, mask.repeat(1, 1, self.groups, 1))
            out = rows.unflatten(2, (self.groups, -1)).flatten(1, 2)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class EagleMLP(nn.Module):
    """The gated feed-forward block of a Llama layer."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]
        self.gate_up_proj: nn.Linear | None = None  # both as one, in a fused head

    def fuse(self) -> None:
        """Make one projection of the two to the intermediate size."""
        self.gate_up_proj = _joined(self.gate_proj, self.up_proj)
        del self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (self.gate_proj(x), self.up_proj(x)) if self.gate_up_proj is None else self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(self.activation(gate) * up)
        return out


class EagleLayer(nn.Module):
    """A decoder layer without its input norm."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = EagleAttention(config)
        self.mlp = EagleMLP(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None) -> Tensor:
        return self.feed_forward(x + self.self_attn(x, rotary, mask, cache))

    def feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class EagleHead(nn.Module):
    """The draft network; embedding and LM head are the target's and not part of it."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope),
            )
        )

    @property
    def layer(self) -> EagleLayer:
        """The one decoder layer (a list of one in the published names)."""
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer)
        return layer

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EagleHead:
        """Move or cast the head; rotary frequencies stay float32: bfloat16 would turn far positions by a wrong angle."""
        exact = dict(self.rotary.named_buffers())
        super()._apply(fn, recurse)
        for name, frequencies in exact.items():
            setattr(self.rotary, name, frequencies.to(self.fc.weight.device))
        return self

    def join(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """The layer's input [B, n, H] from token embeddings and the features one position before them, both [B, n, H]."""
        joined: Tensor = self.fc(torch.cat([embeddings, features], dim=-1))
        return joined

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Predict the next features.

        Args:
            embeddings: target embeddings of tokens t[i+1], [B, n, H].
            features: features f[i] of the target, or this head's own guesses of them, [B, n, H].
            positions: draft positions i, [B, n] int64.
            mask: additive attention mask over cached and new rows, [B, 1, n, cached + n]; None: causal, without cached rows.
            cache: a one-layer transformers cache to read from and append to.

        Returns:
            Guesses of features f[i+1], [B, n, H].
        """
        x = self.join(embeddings, features)
        out: Tensor = self.layer(x, self.rotary(x, position_ids=positions), mask, cache)
        return out


def fused(head: EagleHead) -> EagleHead:
    """A copy of a head for inference: its matrices that read the same input are one, so that a level takes fewer calls."""
    clone = copy.deepcopy(head)
    clone.layer.self_attn.fuse()
    clone.layer.mlp.fuse()
    return clone
