"""From conversations to what a run trains on, evaluates on, and decodes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from eyas.conversations import Conversations
from eyas.errors import EyasError
from eyas.target import Target
from eyas.training.data import Sample, to_samples
from eyas.training.options import TrainOptions

HELD_OUT_SHARE = 50  # one in so many conversations, if none are given
HELD_OUT_LEAST, HELD_OUT_MOST, HELD_OUT_PART = 4, 64, 5


@dataclass(frozen=True)
class Dataset:
    """The data of a run.

    Attributes:
        samples: trained on.
        heldout: evaluated on; may be empty.
        prompts: of held-out conversations, token ids up to the assistant's first turn.
        notes: what the user should know about the data, a line each.
    """

    samples: list[Sample]
    heldout: list[Sample]
    prompts: list[list[int]]
    notes: list[str]


def make_dataset(
    target: Target, data: Conversations, heldout: Conversations | None, options: TrainOptions, strict: bool = False
) -> Dataset:
    """Render, hold out, and take the prompts.

    Args:
        heldout: None: some of ``data`` are held out, always the same.
        strict: refuse a conversation that cannot be trained on, instead of leaving it out.

    Raises:
        EyasError: no chat template, or no conversation that can be trained on.
    """
    tokenizer: Any = target.tokenizer
    notes: list[str] = []
    if tokenizer is None or not tokenizer.chat_template:
        raise EyasError(f"target {target.name} has no chat template to tell the assistant's words by; take an instruct model")
    if heldout is None:
        data, heldout = hold_out(data)
        count, total = len(heldout.rows), len(heldout.rows) + len(data.rows)
        notes.append(f"{count} of {total} conversations are held out to evaluate on" if count else NO_HELDOUT)
    note = unseen_system(tokenizer, data, target.name)
    notes += [note] if note else []
    longest = min(options.max_length, target.context_limit)
    samples, skipped = to_samples(data, tokenizer, target.eos_ids, longest, "the training data", strict)
    others: list[Sample] = []
    if heldout.rows:
        others, more = to_samples(heldout, tokenizer, target.eos_ids, longest, "the held-out data", strict)
        skipped += more
    if skipped:
        notes.append(f"left out {len(skipped)} conversations, such as {skipped[0]}")
    return Dataset(samples, others, prompts(tokenizer, heldout, options, target.context_limit), notes)


NO_HELDOUT = "too few conversations to hold any out: nothing is evaluated, the last weights are kept"


def hold_out(data: Conversations) -> tuple[Conversations, Conversations]:
    """Split off a fiftieth (at least 4 conversations, at most 64, never more than a fifth), chosen by their number alone."""
    total = len(data.rows)
    count = min(max(total // HELD_OUT_SHARE, HELD_OUT_LEAST), HELD_OUT_MOST, total // HELD_OUT_PART)
    chosen = set(random.Random("held out").sample(range(total), count))
    parts = [[row for place, row in enumerate(data.rows) if (place in chosen) is held] for held in (False, True)]
    return Conversations(parts[0]), Conversations(parts[1])


def prompts(tokenizer: Any, heldout: Conversations, options: TrainOptions, context_limit: int) -> list[list[int]]:
    """Token ids of the first ``eval_prompts`` held-out conversations that leave room for an answer."""
    found: list[list[int]] = []
    for row in heldout.rows:
        if len(found) == options.eval_prompts:
            break
        roles = [message["role"] for message in row["messages"]]
        asked = row["messages"][: roles.index("assistant")] if "assistant" in roles else row["messages"]
        try:
            text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        except Exception:  # such a row was left out, and told, before
            continue
        ids = tokenizer.encode(text, add_special_tokens=False)
        if 0 < len(ids) <= context_limit - options.eval_tokens:
            found.append(ids)
    return found


def unseen_system(tokenizer: Any, data: Conversations, name: str) -> str | None:
    """A line to tell if the template drops system messages: the head then learns to answer without them, as it will draft."""
    for row in data.rows:
        opening = row["messages"][0]
        if opening["role"] == "system" and opening["content"].strip():
            try:
                text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
            except Exception:  # told when the row is rendered
                return None
            if opening["content"].strip() not in text:
                return f"the chat template of {name} leaves out system messages, so they are not trained with"
            return None
    return None
