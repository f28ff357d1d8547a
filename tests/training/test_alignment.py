"""Golden proof that mask, tokens and features line up: a planted target is imitated perfectly in real decoding.

The target's next token is a fixed function of the last one, and its feature is that token's own. In the training data the
first word of every answer is the target's, the rest is drawn blindly: so the next feature can only be read from the next
token's embedding, and what follows an answer's first word can only be learnt from the pair that makes the first draft.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eyas.conversations import Conversations
from eyas.drafters.eagle import EagleDraft
from eyas.engine import Engine
from eyas.heads.eagle import EagleHead, head_like
from eyas.loading import load_draft
from eyas.target import Target
from eyas.training import TrainOptions, train
from eyas.training.data import Sample, supervised_pairs
from eyas.training.decoding import decode_prompts
from tests.training.tiny import WORDS, make_tokenizer, quiet

FOLLOWER = {"<assistant>": "e", "e": "f", "f": "g", "g": "h", "h": "i", "i": "j", "j": "k", "k": "f"}
"""Answers begin with e, which comes nowhere else, and go round f to k."""


@pytest.fixture(scope="module")
def planted() -> Target:
    """Hidden states are the last token's one-hot embedding, scaled by the norm; the LM head is the function."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=16,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(16))
        model.lm_head.weight.zero_()
        for place, word in enumerate(WORDS):
            model.lm_head.weight[WORDS.index(FOLLOWER.get(word, "?")), place] = 3.0
    return Target(model, make_tokenizer(), "planted")


def conversations(count: int) -> Conversations:
    chooser, rows = random.Random(0), []
    for _ in range(count):
        asked = {"role": "user", "content": " ".join(chooser.choices("abcd", k=3))}
        answer = {"role": "assistant", "content": " ".join(["e", *chooser.choices("fghijk", k=10)])}
        rows.append({"messages": [asked, answer], "finished": False})
    return Conversations(rows)


def prompts(target: Target) -> list[list[int]]:
    asked = [[{"role": "user", "content": text}] for text in ("a b c", "d", "b b a c d")]
    return [Engine(target, None).render(messages) for messages in asked]


def test_a_constructed_head_is_accepted_whole(planted: Target) -> None:
    """fc copies the embedding to where the feature is: scaled by √H, as the norm scales a one-hot row."""
    head = EagleHead(head_like(planted.config, None))
    with torch.no_grad():
        for parameter in head.layer.parameters():
            parameter.zero_()
        head.fc.weight.copy_(torch.cat([torch.eye(16) * 4, torch.zeros(16, 16)], dim=1))
    found = decode_prompts(planted, head, None, prompts(planted), max_new_tokens=30)
    assert found is not None and set(found.acceptance) == {1.0}


def test_a_trained_head_is_accepted_whole(planted: Target, tmp_path: Path) -> None:
    """From random weights, with a reduced vocabulary, through the file and the public engine; the first draft included."""
    options = TrainOptions(
        out=tmp_path / "draft", epochs=12, start="random", loss="published", entropy_weight=1.0, learning_rate=0.01, steps=2,
        noise=0.0, batch_tokens=256, draft_vocab_size=8, evaluate_every=10**6, eval_prompts=0,
    )  # fmt: skip
    train(planted, conversations(60), None, options, quiet())
    engine = Engine(planted, load_draft(str(options.out), planted))
    for prompt in prompts(planted):
        result = engine.generate(prompt, method="chain", depth=4, max_new_tokens=11, temperature=0.0)
        assert [WORDS[token] for token in result.token_ids] == ["e", *"fghijk", *"fghi"]
        assert result.stats.accepted == [4, 4], "every draft of every step, from the first on"


def test_an_untrained_head_is_not(planted: Target) -> None:
    """The proof above can fail."""
    torch.manual_seed(0)
    head = EagleHead(head_like(planted.config, None))
    found = decode_prompts(planted, head, None, prompts(planted), max_new_tokens=30)
    assert found is None or found.tau < 7
    engine = Engine(planted, EagleDraft(planted, head.requires_grad_(False)))
    result = engine.generate(prompts(planted)[0], method="chain", depth=4, max_new_tokens=11, temperature=0.0)
    assert sum(result.stats.accepted) < 8


def test_a_mask_off_by_one_would_be_noticed(planted: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pair of the first draft, what follows an answer's first word is never learnt."""

    def late(sample: Sample) -> torch.Tensor:
        pairs = supervised_pairs(sample).clone()
        pairs[1:] &= pairs[:-1].clone()
        pairs[1:] &= pairs[:-1].clone()
        return pairs

    monkeypatch.setattr("eyas.training.data.supervised_pairs", late)
    monkeypatch.setattr("eyas.training.trainer.supervised_pairs", late)
    options = TrainOptions(
        out=tmp_path / "draft", epochs=12, start="random", entropy_weight=1.0, learning_rate=0.01, steps=2, noise=0.0,
        batch_tokens=256, draft_vocab_size=8, evaluate_every=10**6, eval_prompts=0,
    )  # fmt: skip
    train(planted, conversations(60), None, options, quiet())
    engine = Engine(planted, load_draft(str(options.out), planted))
    result = engine.generate(prompts(planted)[0], method="chain", depth=4, max_new_tokens=11, temperature=0.0)
    assert result.stats.accepted[0] < 4
