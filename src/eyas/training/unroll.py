"""Several draft steps in one training pass, each seeing what drafting shows it (HASS; EAGLE-3's training-time test).

Step 1 reads the target's features. At step k, position i reads step k-1's own guess at i-1, and attends to the rows a
chain would find in the cache: true rows up to where the chain began, then one row of every step on the way.

    step 3 at position 4 attends to    step-1 rows 0 1 2,  the step-2 row 3,  itself (the step-3 row 4)

So a later step needs no k·n keys: its scores are those over the step-1 rows under a banded causal mask, and k-1 more.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.heads.eagle import EagleHead


def shift(rows: Tensor, places: int, dim: int) -> Tensor:
    """Rows moved ``places`` later along ``dim``, zeros moving in: out[i] = rows[i - places]."""
    if not places:
        return rows
    kept = rows.narrow(dim, 0, max(rows.shape[dim] - places, 0))
    empty = rows.new_zeros(()).expand(*rows.shape[:dim], min(places, rows.shape[dim]), *rows.shape[dim + 1 :])
    return torch.cat([empty, kept], dim=dim)


def step_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of step k = len(keys).

    Args:
        query: step k's queries, [B, heads, n, D].
        keys: keys of steps 1 to k, each [B, heads, n, D].
        values: likewise.

    Returns:
        [B, heads, n, D]
    """
    step, n = len(keys), query.shape[2]
    if step == 1:
        return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
    query = query * query.shape[-1] ** -0.5
    place = torch.arange(n, device=query.device)
    seen = place[None, :] <= place[:, None] - (step - 1)  # [n, n]
    scores = [(query @ keys[0].transpose(-1, -2)).masked_fill(~seen, -torch.inf)]  # [B, heads, n, n]
    for j in range(2, step + 1):  # the step-j row at position i - (step - j)
        score = (query * shift(keys[j - 1], step - j, dim=2)).sum(-1)  # [B, heads, n]
        scores.append(score.masked_fill(place < step - j, -torch.inf)[..., None])
    weights = torch.cat(scores, dim=-1).softmax(-1).to(query.dtype)  # [B, heads, n, n + k - 1]
    out = weights[..., :n] @ values[0]
    for j in range(2, step + 1):
        out = out + weights[..., n + j - 2, None] * shift(values[j - 1], step - j, dim=2)
    return out


def unroll(head: EagleHead, embeddings: Tensor, features: Tensor, steps: int, dropout: float = 0.0) -> list[Tensor]:
    """The guesses of 1 to ``steps`` draft steps at every position.

    Rows padded on the right need no mask: no earlier position reads them.

    Args:
        embeddings: target embeddings of tokens t[i+1], [B, n, H].
        features: the target's features f[i], [B, n, H].
        dropout: probability of dropping an element of what attention or feed-forward adds to the residual.

    Returns:
        Per step, guesses of f[i+1], [B, n, H]; at step k the first k - 1 positions mean nothing.
    """
    layer, attention = head.layer, head.layer.self_attn
    positions = torch.arange(embeddings.shape[1], device=embeddings.device)[None]  # [1, n]
    rotary = head.rotary(embeddings, position_ids=positions)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    guesses: list[Tensor] = []
    for _ in range(steps):
        joined = head.join(embeddings, features)  # [B, n, H]
        query, key, value = attention.project(joined, rotary)
        keys.append(key.repeat_interleave(attention.groups, dim=1))
        values.append(value.repeat_interleave(attention.groups, dim=1))
        attended = step_attention(query, keys, values).transpose(1, 2).flatten(2)  # [B, n, heads · D]
        hidden = joined + F.dropout(attention.o_proj(attended), dropout)
        guess = hidden + F.dropout(layer.mlp(layer.post_attention_layernorm(hidden)), dropout)
        guesses.append(guess)
        features = shift(guess, 1, dim=1)
    return guesses
