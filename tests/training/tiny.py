"""A tiny random target, a chat tokenizer made of a few words, and conversations between them."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eyas.conversations import Conversations
from eyas.target import Target
from eyas.training import TrainOptions

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other

WORDS = ["<end>", "<user>", "<assistant>", ".", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "?"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <end> . {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_tokenizer() -> Any:
    """A word a token."""
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", behavior="removed")
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="?")
    made.chat_template = TEMPLATE
    return made


def make_target(**changes: Any) -> Target:
    """Two layers of random weights."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": len(WORDS), "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 0,
        "tie_word_embeddings": True,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.4)
    return Target(model, make_tokenizer(), "tiny")


def answered(target: Target, count: int, seed: int = 0) -> Conversations:
    """Conversations whose answers are the target's own greedy ones."""
    chooser, tokenizer = random.Random(seed), make_tokenizer()
    rows = []
    for _ in range(count):
        messages = [{"role": "user", "content": " ".join(chooser.choices("abcdefgh", k=4))}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        answer = target.model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        words = [word for word in tokenizer.convert_ids_to_tokens(answer.tolist()) if word != "<end>"] or ["a"]
        rows.append({"messages": [*messages, {"role": "assistant", "content": " ".join(words)}], "finished": False})
    return Conversations(rows)


def short_options(out: Path, **changes: Any) -> TrainOptions:
    """A run of some dozens of steps."""
    options = {
        "out": out, "epochs": 4, "draft_vocab_size": 12, "batch_tokens": 64, "steps": 2, "learning_rate": 5e-3,
        "evaluate_every": 10, "eval_prompts": 2, "eval_tokens": 12, "save_every": 5,
    }  # fmt: skip
    return TrainOptions(**{**options, **changes})


def quiet() -> Console:
    """Swallows what training prints; its text is in ``.file``."""
    return Console(file=io.StringIO(), width=200)
