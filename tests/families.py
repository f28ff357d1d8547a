"""Tiny random float32 models, one for each architecture family, and their own greedy continuations as reference.

All have a vocabulary of 48 tokens, no end token, and a context of 96; windows are 8 tokens. Weights are drawn large enough
for logits to be well separated, norms and biases away from their trivial values, so that a skipped one shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY, CONTEXT, WINDOW = 48, 96, 8
PLAIN: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = {
    **PLAIN, "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4}
CAPPED: dict[str, Any] = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "tie_word_embeddings": True})),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "tie_word_embeddings": True})),
    "qwen2_window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**{**SIZES, "num_hidden_layers": 3}, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**{**SIZES, "tie_word_embeddings": True}, **CAPPED, sliding_window=WINDOW, attn_implementation="eager")
    ),  # eager attention is the one that soft-caps
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **{**SIZES, "tie_word_embeddings": True, "num_hidden_layers": 3},
            query_pre_attn_scalar=8,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        )
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(**PLAIN, vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_inner=64, n_positions=CONTEXT)
    ),
    "gptneox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)),
}
WINDOWED = ("mistral", "qwen2_window", "gemma2", "gemma3")


@cache
def model(name: str) -> PreTrainedModel:
    """The family's model; shared by all tests, so none may change it."""
    made = draw_weights(FAMILIES[name]())
    if name.startswith("gemma"):  # they scale embeddings up: a tied head would only ever repeat the last token
        with torch.no_grad():
            made.get_input_embeddings().weight.mul_(0.08)
            made.model.norm.weight.add_(12.0)
    return made


def draw_weights(model: PreTrainedModel, seed: int = 5) -> PreTrainedModel:
    """Large random weights for a model, and norms and biases off their trivial values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.4, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.float().eval()


def prompts(count: int, seed: int = 0, shortest: int = 1, longest: int = 12, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Random prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    """What transformers' own ``generate`` continues a prompt with, by its most likely tokens."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0, **options
    )
    return out[0, len(prompt) :].tolist()
