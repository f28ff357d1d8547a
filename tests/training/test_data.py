"""Rendering, the mask, its alignment with the draft's pairs, and batches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from eyas.conversations import Conversations
from eyas.errors import EyasError
from eyas.training.data import Sample, collate, continuation, groups, render, supervised_pairs, to_samples


def conversation(*turns: str, **more: Any) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(turns)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)], **more}


def words(tokenizer: Any, ids: torch.Tensor) -> list[str]:
    return tokenizer.convert_ids_to_tokens(ids.tolist())


def test_the_answer_and_its_end_token_are_written_by_the_assistant(tokenizer: Any) -> None:
    sample = render(conversation("a b", "c d"), tokenizer, {0})
    assert words(tokenizer, sample.ids) == ["<user>", "a", "b", "<end>", ".", "<assistant>", "c", "d", "<end>", "."]
    assert words(tokenizer, sample.ids[sample.written]) == ["c", "d", "<end>"]


def test_every_answer_of_a_longer_conversation_counts(tokenizer: Any) -> None:
    sample = render(conversation("a", "b", "c", "d"), tokenizer, {0})
    assert words(tokenizer, sample.ids[sample.written]) == ["b", "<end>", "d", "<end>"]


def test_a_cut_answer_has_no_end_token_of_its_own(tokenizer: Any) -> None:
    sample = render(conversation("a", "b", "c", "d e", finished=False), tokenizer, {0})
    assert words(tokenizer, sample.ids[sample.written]) == ["b", "<end>", "d", "e"]


def test_the_prompt_is_what_decoding_is_given(tokenizer: Any) -> None:
    sample = render(conversation("a b", "c d"), tokenizer, {0})
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    assert sample.ids[: len(prompt)].tolist() == prompt
    assert not sample.written[: len(prompt)].any() and sample.written[len(prompt)]


def test_the_pair_of_the_first_draft_is_trained(tokenizer: Any) -> None:
    """Decoding: the prefill over T tokens draws token T; the pair (feature T - 1, token T) drafts token T + 1."""
    sample = render(conversation("a b", "c d"), tokenizer, {0})
    prompt = int(sample.written.nonzero()[0])  # T
    pairs = supervised_pairs(sample)
    assert pairs[prompt - 1], "the first draft after the prompt"
    assert pairs.nonzero().flatten().tolist() == [prompt - 2, prompt - 1, prompt]  # predict c, d, <end>


def test_no_trainable_token_is_refused_with_the_rendered_sample(tokenizer: Any) -> None:
    with pytest.raises(EyasError, match=r"no assistant token(.|\n)*<user> a b <end>"):
        to_samples(Conversations([conversation("a b")]), tokenizer, {0}, max_length=64)


def test_rows_that_cannot_be_used_are_told_or_refused(tokenizer: Any) -> None:
    """A turn the template refuses, and a conversation without an answer; the others are used."""

    class Picky:
        encode = staticmethod(tokenizer.encode)

        def apply_chat_template(self, messages: list[Any], **options: Any) -> str:
            if messages[0]["role"] == "system":
                raise ValueError("System role not supported")
            return tokenizer.apply_chat_template(messages, **options)

    system = {"messages": [{"role": "system", "content": "a"}, *conversation("a", "b")["messages"]]}
    rows = Conversations([conversation("a", "b"), system, conversation("a")])
    samples, skipped = to_samples(rows, Picky(), {0}, max_length=64)
    assert len(samples) == 1
    assert skipped == [
        "conversation 2: System role not supported",
        "conversation 3: no assistant token to train on within 64 tokens",
    ]
    with pytest.raises(EyasError, match="conversation 2: System role not supported"):
        to_samples(rows, Picky(), {0}, max_length=64, strict=True)
    with pytest.raises(EyasError, match=r"none can be used \(conversation 1: System role"):
        to_samples(Conversations([system]), Picky(), {0}, max_length=64)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any) -> None:
    class Rewriting:
        def apply_chat_template(self, messages: list[Any], **options: Any) -> str:
            return f"{len(messages)} turns"

    with pytest.raises(EyasError, match="one after another"):
        render(conversation("a", "b"), Rewriting(), {0})


def samples_of(*lengths: int) -> list[Sample]:
    return [Sample(torch.full((n,), n), torch.ones(n, dtype=torch.bool)) for n in lengths]


def test_groups_hold_every_sample_once_within_the_budget() -> None:
    samples = samples_of(*range(3, 40))
    for generator in (None, random.Random(0)):
        found = groups(samples, 100, generator, pool=16)
        assert all(collate(samples, group).ids.numel() <= 100 for group in found)
        assert sorted(place for group in found for place in group) == list(range(len(samples)))


def test_the_order_follows_the_seed() -> None:
    samples = samples_of(*range(3, 40))
    first, again, other = (groups(samples, 100, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_padding_is_never_trained() -> None:
    batch = collate(samples_of(4, 7), [0, 1])
    assert batch.ids.tolist() == [[4, 4, 4, 4, 0, 0, 0], [7] * 7]
    assert batch.present.sum(1).tolist() == [4, 7]
    assert batch.supervised.sum(1).tolist() == [2, 5]


def test_an_answer_is_tokenised_as_it_follows_its_prompt() -> None:
    """SentencePiece puts a space before a text that stands by itself: the answer's first token would be another one."""

    class Spaced:
        def encode(self, text: str, **_: Any) -> list[int]:
            return [0, *map(ord, text)]

    class Fusing(Spaced):
        def encode(self, text: str, **_: Any) -> list[int]:
            return [ord(letter) for letter in text.replace("pa", "X")]

    assert continuation(Spaced(), "p", [0, ord("p")], "ab") == [ord("a"), ord("b")]
    assert continuation(Fusing(), "p", [ord("p")], "ab") == [ord("a"), ord("b")], "the seam has fused"


def test_turns_before_a_rewritten_one_are_kept(tokenizer: Any) -> None:
    """Templates of thinking models drop the thought from every answer but the last."""

    class Thinking:
        encode = staticmethod(tokenizer.encode)

        def apply_chat_template(self, messages: list[Any], add_generation_prompt: bool = False, **_: Any) -> str:
            said = ""
            for place, message in enumerate(messages):
                thought = "k " if message["role"] == "assistant" and place == len(messages) - 1 else ""
                said += f"<{message['role']}> {thought}{message['content']} <end> . "
            return said + ("<assistant> " if add_generation_prompt else "")

    sample = render(conversation("a", "b", "c", "d"), Thinking(), {0})
    assert words(tokenizer, sample.ids[sample.written]) == ["k", "b", "<end>"]
