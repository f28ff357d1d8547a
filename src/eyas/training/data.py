"""Conversations as token ids with a mask that says which tokens the assistant wrote.

The text is the tokenizer's own chat template. An assistant turn is found by differencing renderings: what
``messages[:k]`` gives with the generation prompt is the prompt; what ``messages[:k + 1]`` adds to it is the answer, of
which everything up to the first end token is the assistant's own (templates put a newline or more after it).

    text   <|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ Hello <|im_end|> ⏎
    written     0        0   0  0     0      0      0           0     0   1       1      0
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.conversations import Conversations, TrainingDataError
from eyas.errors import first_line


@dataclass(frozen=True)
class Sample:
    """One conversation.

    Attributes:
        ids: token ids, [L] int64.
        written: whether the assistant wrote the token, [L] bool.
    """

    ids: Tensor
    written: Tensor


def render(row: Mapping[str, Any], tokenizer: Any, end_ids: Collection[int]) -> Sample:
    """Tokenise one row as decoding meets it: the prompt by itself, then what the answer adds to it.

    A template may render earlier turns otherwise once they are not the last (leaving out what was thought, for example): the
    sample then ends before the turn that rewrites them.

    Args:
        row: ``messages`` and optionally ``finished``; false: the last answer was cut, its end token is not the model's.
        tokenizer: a transformers tokenizer with a chat template.
        end_ids: the target's end tokens.
    """
    messages = row["messages"]
    ids: list[int] = []
    written: list[bool] = []
    done = ""  # the rendered text that ids hold
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
        if not (prompt.startswith(done) and whole.startswith(prompt)):
            if ids:
                break
            raise TrainingDataError(f"the chat template does not render turns one after another:\n{whole}")
        prompt_ids = tokenizer.encode(prompt[len(done) :], add_special_tokens=False)
        answer_ids = continuation(tokenizer, prompt[len(done) :], prompt_ids, whole[len(prompt) :])
        end = next((place for place, token in enumerate(answer_ids) if token in end_ids), None)
        if end is None:
            own = len(answer_ids)
        elif turn == len(messages) - 1 and row.get("finished") is False:
            own = end
        else:
            own = end + 1
        ids += prompt_ids + answer_ids
        written += [False] * len(prompt_ids) + [True] * own + [False] * (len(answer_ids) - own)
        done = whole
    return Sample(torch.tensor(ids, dtype=torch.long), torch.tensor(written, dtype=torch.bool))


def continuation(tokenizer: Any, prompt: str, prompt_ids: list[int], answer: str) -> list[int]:
    """Token ids of an answer as they follow its prompt.

    Tokenised by itself a text may begin otherwise than in the middle of one (SentencePiece tokenizers put a space before it).
    """
    together: list[int] = tokenizer.encode(prompt + answer, add_special_tokens=False)
    if together[: len(prompt_ids)] == prompt_ids:
        return together[len(prompt_ids) :]
    alone: list[int] = tokenizer.encode(answer, add_special_tokens=False)  # the seam has fused: as decoding splits it
    return alone


def to_samples(
    conversations: Conversations,
    tokenizer: Any,
    end_ids: Collection[int],
    max_length: int,
    name: str = "the data",
    strict: bool = False,
) -> tuple[list[Sample], list[str]]:
    """All conversations cut to ``max_length`` tokens, and one line for each one left out: where it is, and why.

    Raises:
        TrainingDataError: none has a token to train on (the message shows the first one as rendered), or (strict) one has not.
    """
    samples: list[Sample] = []
    skipped: list[str] = []
    for number, row in enumerate(conversations.rows, start=1):
        try:
            sample = render(row, tokenizer, end_ids)
        except Exception as error:  # templates are programs of the model's authors and raise what they like
            skipped.append(f"conversation {number}: {first_line(error)}")
        else:
            sample = Sample(sample.ids[:max_length], sample.written[:max_length])
            if bool(supervised_pairs(sample).any()):
                samples.append(sample)
                continue
            skipped.append(f"conversation {number}: no assistant token to train on within {max_length} tokens")
        if strict:
            raise TrainingDataError(f"{name}, {skipped[-1]}; mend it, or leave out --strict to skip such rows")
    if samples:
        return samples, skipped
    if not conversations.rows:
        raise TrainingDataError(f"{name}: no conversations in it; pass some that the assistant answers")
    if "no assistant token" not in skipped[0]:
        raise TrainingDataError(f"{name}: none can be used ({skipped[0]}); check the data against the chat template")
    try:
        text = tokenizer.apply_chat_template(conversations.rows[0]["messages"], tokenize=False)
    except Exception as error:  # as above
        text = f"(the chat template refuses it: {first_line(error)})"
    raise TrainingDataError(f"{name}: no assistant token to train on. The first conversation reads:\n{text}")


def supervised_pairs(sample: Sample) -> Tensor:
    """Which draft pairs of a sample are trained, [L - 2] bool.

    Pair i = (feature i, token i + 1) imitates the target at i + 1, whose next token is i + 2: it is trained if the
    assistant wrote token i + 2.

        token     0 u   1 u   2 a   3 a   4 end       the prompt is u u; decoding draws token 2 from the prefill
        pair      0:a   1:a   2:end                   pair 1 = (feature 1, token 2) makes the first draft, token 3
    """
    return sample.written[2:]


@dataclass(frozen=True)
class Batch:
    """Samples padded on the right.

    Attributes:
        index: the samples' places in the data, [B].
        ids: token ids, [B, L] int64, padded with 0.
        present: whether the place holds a token, [B, L] bool.
        supervised: whether the pair is trained, [B, L - 2] bool.
    """

    index: list[int]
    ids: Tensor
    present: Tensor
    supervised: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(self.index, self.ids.to(device), self.present.to(device), self.supervised.to(device))


def collate(samples: Sequence[Sample], index: list[int]) -> Batch:
    """Pad the chosen samples to the longest."""
    chosen = [samples[place] for place in index]
    length = max(len(sample.ids) for sample in chosen)
    ids = torch.zeros(len(chosen), length, dtype=torch.long)
    present = torch.zeros(len(chosen), length, dtype=torch.bool)
    supervised = torch.zeros(len(chosen), length - 2, dtype=torch.bool)
    for row, sample in enumerate(chosen):
        ids[row, : len(sample.ids)] = sample.ids
        present[row, : len(sample.ids)] = True
        supervised[row, : len(sample.ids) - 2] = supervised_pairs(sample)
    return Batch(index, ids, present, supervised)


def groups(samples: Sequence[Sample], tokens: int, generator: random.Random | None = None, pool: int = 256) -> list[list[int]]:
    """One epoch: the samples of each micro-batch, alike in length, at most ``tokens`` padded tokens (or one longer sample).

    Args:
        generator: shuffles the samples, sorts each ``pool`` of them by length, shuffles the groups. None: all sorted.
    """
    order = list(range(len(samples)))
    if generator is not None:
        generator.shuffle(order)
    else:
        pool = max(len(order), 1)
    found: list[list[int]] = []
    for start in range(0, len(order), pool):
        group: list[int] = []
        for place in sorted(order[start : start + pool], key=lambda item: -len(samples[item].ids)):
            if group and len(samples[group[0]].ids) * (len(group) + 1) > tokens:  # the first is the longest
                found.append(group)
                group = []
            group.append(place)
        found.append(group)
    if generator is not None:
        generator.shuffle(found)
    return found
