"""The protocol: every method answers every question, interleaved in one process, and losslessness is checked on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eyas.bench.methods import BASELINE, Answer, Asked, Method
from eyas.bench.records import Journal, Record
from eyas.bench.tasks import Question
from eyas.engine import Engine
from eyas.errors import EyasError
from eyas.packing import MANY_ROWS

WARM_TOKENS = 16
ROUNDING = 2  # two ways of computing a logit in half precision differ by about a unit in the last place, each way


@dataclass(frozen=True)
class Protocol:
    """What all methods have in common.

    Attributes:
        max_new_tokens: of an answer.
        temperatures: each question is answered at every one of them.
        seed: of sampling.
    """

    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    seed: int = 0


def measure(
    engine: Engine,
    methods: dict[str, Method],
    questions: Sequence[Question],
    protocol: Protocol,
    journal: Journal,
    report: Callable[[float, str], None] = lambda done, what: None,
) -> list[dict[str, str]]:
    """Run what the journal does not hold yet.

    The order of the methods is drawn anew for every question, so that none is always first or always follows the same one.
    A later turn's prompt holds the *baseline's* earlier answers, so that all methods answer the same.

    Args:
        methods: by name; the baseline among them.
        report: called after each question with how many are done and what was done last.

    Returns:
        Questions that were skipped, with the reason.
    """
    done = {record.key: record for record in journal.records}
    names, skipped = list(methods), []
    warm = engine.render([{"role": "user", "content": "Hello, who are you?"}])
    pending = [
        (question, temperature)
        for question in questions
        for temperature in protocol.temperatures
        if any(key not in done for key in keys(question, temperature, names))
    ]
    if pending:
        for method in methods.values():
            for temperature in protocol.temperatures:
                method(warm, Asked(WARM_TOKENS, temperature, protocol.seed))
    before = len(questions) * len(protocol.temperatures) - len(pending)
    for number, (question, temperature) in enumerate(pending):
        order = random.Random(f"{question.task} {question.id} {temperature}").sample(names, len(names))
        try:
            ask(engine, methods, order, question, temperature, protocol, journal)
        except EyasError as error:
            left_out = {"task": question.task, "id": question.id, "reason": str(error)}
            skipped += [] if left_out in skipped else [left_out]  # once, whatever the temperatures
        report(before + number + 1, f"{question.task} {question.id}")
    return skipped


def keys(question: Question, temperature: float, names: Sequence[str]) -> list[tuple[str, str, int, float, str]]:
    """Keys of all records that a question needs."""
    return [(question.task, question.id, turn, temperature, name) for turn in range(len(question.turns)) for name in names]


def ask(
    engine: Engine,
    methods: dict[str, Method],
    order: Sequence[str],
    question: Question,
    temperature: float,
    protocol: Protocol,
    journal: Journal,
) -> None:
    """One question at one temperature, all its turns, by every method; recorded together or not at all.

    Raises:
        EyasError: a prompt does not fit the context.
    """
    messages: list[dict[str, str]] = []
    fresh: list[Record] = []
    for turn, text in enumerate(question.turns):
        asked = Asked(protocol.max_new_tokens, temperature, seed_of(question, turn, protocol.seed))
        messages.append({"role": "user", "content": text})
        ids = engine.render(messages)
        room = engine.target.context_limit - len(ids)
        if room < protocol.max_new_tokens:
            raise EyasError(f"its prompt of {len(ids)} tokens leaves {max(room, 0)} of the context for the answer")
        answers = {name: methods[name](ids, asked) for name in order}
        records = [
            record(question, turn, temperature, name, len(ids), answers[name])
            for name in methods  # in the asked-for order
        ]
        if temperature == 0:
            records = [compared(engine, ids, each, answers[BASELINE].tokens) for each in records]
        fresh += records
        assert engine.tokenizer is not None
        said = engine.tokenizer.decode(answers[BASELINE].tokens, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": str(said)})
    known = {each.key for each in journal.records}
    journal.add([each for each in fresh if each.key not in known])


def seed_of(question: Question, turn: int, seed: int) -> int:
    """A seed of each turn's own: shared numbers would make the answers alike."""
    return random.Random(f"{question.task} {question.id} {turn} {seed}").getrandbits(32)


def record(question: Question, turn: int, temperature: float, method: str, prompt: int, answer: Answer) -> Record:
    """An answer as it is remembered."""
    stats, seen = answer.statistics, {}
    if stats is not None:
        seen = {
            name: getattr(stats, name)
            for name in (
                "delivered",
                "accepted",
                "depths",
                "prefill_seconds",
                "draft_seconds",
                "verify_seconds",
                "rest_seconds",
            )
        }
    place: dict[str, Any] = {"task": question.task, "id": question.id, "turn": turn, "temperature": temperature}
    return Record(**place, method=method, prompt_tokens=prompt, tokens=answer.tokens, seconds=answer.seconds, **seen)


def compared(engine: Engine, ids: list[int], found: Record, baseline: list[int]) -> Record:
    """The record with its first divergence from the baseline, and the target's margin there."""
    place = first_difference(found.tokens, baseline)
    if place is None:
        return found
    if place >= min(len(found.tokens), len(baseline)):  # one is the beginning of the other: it stopped early
        return replace(found, divergence=place)
    margin, tolerance = log_margin(engine, ids, baseline[:place], baseline[place], found.tokens[place])
    return replace(found, divergence=place, margin=margin, tolerance=tolerance)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two texts part; None where they are the same."""
    if list(ours) == list(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


@torch.inference_mode()
def log_margin(engine: Engine, prompt: list[int], answer: list[int], first: int, second: int) -> tuple[float, float]:
    """How much more likely the target finds one token than another after a prompt and the beginning of an answer.

    The answer is run in pieces as small as decoding's: in 4 bits a long one would be multiplied by other weights.

    Returns:
        The difference of their log-probabilities, and how far rounding alone may move it: `ROUNDING` units in the last place
        of logits of this size in the target's dtype.
    """
    cache = engine.target.new_cache(1)
    _, logits = engine.target.prefill(cache, [prompt])
    for start in range(0, len(answer), MANY_ROWS - 1):
        _, logits = engine.target.prefill(cache, [answer[start : start + MANY_ROWS - 1]])
    one, other = float(logits[0, first]), float(logits[0, second])
    return one - other, ROUNDING * torch.finfo(engine.target.dtype).eps * max(abs(one), abs(other))
