"""Conversations on their way: who speaks next, and what becomes of what was said.

A `Dialogue` is a conversation that is not finished; its next `Turn` is one piece of text the target has to write. The `Desk`
hands out turns and takes the texts back, whoever writes them: the local batch loop (`eyas.data.local`) or a server
(`eyas.data.endpoint`). A dialogue's next turn is handed out before a new dialogue is begun.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.data.corpus import Corpus, normalised
from eyas.errors import EyasError, first_line

OPENINGS = Path(__file__).parent / "openings.txt"
MARK = "EYAS-USER-TURN"
MAX_QUESTION = 512  # tokens of an invented request; longer ones are thrown away
HOPELESS = 1000  # conversations dropped without one that was any use


@dataclass
class Dialogue:
    """One conversation.

    Attributes:
        key: names it in the output, so that a resumed run knows it.
        messages: what has been said.
        questions: user turns still to come.
        opening: how a request the target invents begins; None: the requests are given.
        temperature: of the answers.
        seed: of its random numbers.
        tokens: tokens of answers so far.
    """

    key: str
    messages: list[dict[str, str]]
    questions: list[str]
    opening: str | None
    temperature: float
    seed: int
    tokens: int = 0


@dataclass(frozen=True)
class Turn:
    """A text the target has to write.

    Attributes:
        dialogue: the conversation it belongs to.
        messages: what to answer; None: continue ``text``.
        text: a prompt as it is, up to where the target continues a request.
        temperature, seed, max_new_tokens: how to write it.
    """

    dialogue: Dialogue
    messages: list[dict[str, str]] | None
    text: str
    temperature: float
    seed: int
    max_new_tokens: int


@dataclass
class Desk:
    """Hands out turns and collects what was said.

    Args:
        dialogues: the conversations to hold, begun one after another.
        corpus: where finished ones go.
        template: the target's user turn, for invented requests; None where they are given.
        tokens: begin no new conversation once so many answer tokens are written or under way; None: no limit.
        question_temperature: of invented requests.
        max_answer: tokens of an answer; longer ones are cut, and say so.
    """

    dialogues: Iterator[Dialogue]
    corpus: Corpus
    template: UserTurn | None = None
    tokens: int | None = None
    question_temperature: float = 0.9
    max_answer: int = 384
    done: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    under_way: int = 0
    _waiting: deque[Turn] = field(default_factory=deque)

    def take(self, count: int) -> list[Turn]:
        """At most ``count`` turns that can be written now."""
        turns: list[Turn] = []
        while len(turns) < count:
            if self._waiting:
                turns.append(self._waiting.popleft())
            elif self.tokens is not None and self.corpus.tokens + self.under_way >= self.tokens:
                break
            else:
                dialogue = next(self.dialogues, None)
                if dialogue is None:
                    break
                self.under_way += self.max_answer // 2  # a guess, until it is known
                turns.append(self._next(dialogue))
        return turns

    def _next(self, dialogue: Dialogue) -> Turn:
        seed = dialogue.seed + len(dialogue.messages)
        if dialogue.questions:
            dialogue.messages.append({"role": "user", "content": dialogue.questions.pop(0)})
            return Turn(dialogue, list(dialogue.messages), "", dialogue.temperature, seed, self.max_answer)
        assert self.template is not None and dialogue.opening is not None
        text = self.template.before + dialogue.opening
        return Turn(dialogue, None, text, self.question_temperature, seed, MAX_QUESTION)

    def give(self, turn: Turn, text: str, finished: bool, tokens: int) -> None:
        """Take what was written for a turn: ``finished`` where it ended by itself, after ``tokens`` tokens."""
        dialogue = turn.dialogue
        if turn.messages is None:
            question = ((dialogue.opening or "") + text).strip()
            if not finished:
                self.drop(dialogue, "requests that did not end")
            elif len(question.split()) < 2:
                self.drop(dialogue, "requests of less than two words")
            elif normalised(question) in self.corpus.questions:
                self.drop(dialogue, "requests there were before")
            else:
                self.corpus.questions.add(normalised(question))
                dialogue.questions.append(question)
                self._waiting.append(self._next(dialogue))
            return
        if not text.strip():
            self.drop(dialogue, "empty answers")
            return
        dialogue.messages.append({"role": "assistant", "content": text})
        dialogue.tokens += tokens
        if finished and dialogue.questions:
            self._waiting.append(self._next(dialogue))
        else:
            self._finish(dialogue, finished)

    def _finish(self, dialogue: Dialogue, finished: bool) -> None:
        self.under_way -= self.max_answer // 2
        self.done += 1
        self.corpus.add({
            "id": dialogue.key, "messages": dialogue.messages, "temperature": dialogue.temperature, "finished": finished,
            "tokens": dialogue.tokens,
        })  # fmt: skip

    def drop(self, dialogue: Dialogue, why: str) -> None:
        """Give a conversation up; what it has so far is kept if it holds an answer."""
        if dialogue.tokens:
            if dialogue.messages[-1]["role"] == "user":
                dialogue.messages.pop()
            self._finish(dialogue, finished=True)
            return
        self.under_way -= self.max_answer // 2
        self.dropped[why] = self.dropped.get(why, 0) + 1
        if not self.done and sum(self.dropped.values()) >= HOPELESS:
            raise EyasError(
                f"{HOPELESS} conversations came to nothing (mostly {max(self.dropped, key=self.dropped.__getitem__)})"
            )


@dataclass(frozen=True)
class UserTurn:
    """What a chat template puts around the user's first turn.

    Attributes:
        before: the rendered text up to it.
        ends: special tokens that end it.
        stop: text that ends it where no special token does, or None.
    """

    before: str
    ends: frozenset[int]
    stop: str | None


def user_turn(tokenizer: Any, system: str | None = None) -> UserTurn:
    """Read the user's turn off a chat template.

    Raises:
        EyasError: there is no template, or it does not repeat what the user says.
    """
    if tokenizer is None or not tokenizer.chat_template:
        raise EyasError("the target has no chat template to invent requests in; pass --prompts, or take an instruct model")
    messages = [*opening_messages(system), {"role": "user", "content": MARK}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of the model's authors and raise what they like
        raise EyasError(f"the target's chat template refuses these messages ({first_line(error)})") from error
    before, mark, after = text.partition(MARK)
    if not mark:
        raise EyasError("the target's chat template does not repeat what the user says; pass --prompts")
    following = tokenizer.encode(after, add_special_tokens=False)
    if following and following[0] in tokenizer.all_special_ids:
        return UserTurn(before, frozenset(following[:1]), None)
    return UserTurn(before, frozenset(), after.strip() or None)


def opening_messages(system: str | None) -> list[dict[str, str]]:
    """A conversation's beginning: the system message, if there is one."""
    return [{"role": "system", "content": system}] if system else []


def read_openings(path: Path) -> list[str]:
    """Openings, one a line; ``#`` begins a comment, ``\\n`` is a line break, ``{empty}`` nothing at all.

    Raises:
        EyasError: unreadable, or none in it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EyasError(f"openings {path}: cannot be read as UTF-8 text ({error}); check the path") from error
    openings = [line.replace("\\n", "\n") for line in lines if line.strip() and not line.startswith("#")]
    if not openings:
        raise EyasError(f"openings {path}: there are none in it; write one a line")
    return ["" if opening.strip() == "{empty}" else opening for opening in openings]


def invented(
    openings: Sequence[str], temperatures: Sequence[float], seed: int, known: Iterable[str], system: str | None = None
) -> Iterator[Dialogue]:
    """Endless conversations whose requests the target invents; those after the last ``known`` one."""
    prefix = f"self-{seed}-"
    numbers = [int(key.removeprefix(prefix)) for key in known if key.startswith(prefix)]
    number = max(numbers, default=-1)
    while True:
        number += 1
        key = f"{prefix}{number}"
        chance = random.Random(key)
        opening, temperature = chance.choice(openings), chance.choice(temperatures)
        yield Dialogue(key, opening_messages(system), [], opening, temperature, chance.getrandbits(40))


def prompted(
    rows: Sequence[Mapping[str, Any]],
    temperatures: Sequence[float],
    seed: int,
    known: Iterable[str],
    system: str | None = None,
) -> Iterator[Dialogue]:
    """Conversations with the given requests, answered anew; those not ``known`` yet, each once."""
    seen = set(known)
    for row in rows:
        own = [message for message in row["messages"] if message["role"] == "system"]
        questions = [message["content"] for message in row["messages"] if message["role"] == "user"]
        asked = json.dumps([own, questions], ensure_ascii=False).encode("utf-8")
        key = "prompt-" + hashlib.blake2b(asked, digest_size=8).hexdigest()
        if key in seen:
            continue
        seen.add(key)
        chance = random.Random(f"{seed} {key}")
        opening = [dict(message) for message in own] or opening_messages(system)
        yield Dialogue(key, opening, questions, None, chance.choice(temperatures), chance.getrandbits(40))
