"""A tiny random target and a chat tokenizer made of a few words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other

WORDS = ["<end>", "<user>", "<assistant>", ".", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "?"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <end> . {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", behavior="removed")
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="?")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="session")
def target() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(WORDS), max_position_embeddings=128, bos_token_id=None, eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.4)
    return model
