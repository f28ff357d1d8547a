"""Turns are handed out and taken back in order, whatever becomes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from eyas.data.corpus import Corpus
from eyas.data.dialogue import OPENINGS, Desk, UserTurn, invented, prompted, read_openings, user_turn
from eyas.errors import EyasError

ASKED = [{"messages": [{"role": "user", "content": text}]} for text in ("a", "b", "a", "c")]
TEMPLATE = UserTurn("<user> ", frozenset({0}), None)


@pytest.fixture
def corpus(tmp_path: Path) -> Iterator[Corpus]:
    opened = Corpus(tmp_path / "c.jsonl", "tiny")
    yield opened
    opened.close()


def said(messages: list[dict[str, str]]) -> list[str]:
    return [f"{message['role'][0]} {message['content']}" for message in messages]


def test_every_prompt_is_answered_once_and_known_ones_never(corpus: Corpus) -> None:
    dialogues = list(prompted(ASKED, [0.0, 1.0], 0, []))
    assert [dialogue.questions for dialogue in dialogues] == [["a"], ["b"], ["c"]]
    left = list(prompted(ASKED[::-1], [0.0, 1.0], 0, [dialogues[0].key, dialogues[2].key]))
    assert left == [dialogues[1]], "a dialogue depends on its prompt and the seed alone"
    assert [each.key for each in prompted(ASKED, [0.0], 1, [])] == [each.key for each in dialogues]


def test_a_longer_conversation_is_answered_turn_by_turn(corpus: Corpus) -> None:
    row = {"messages": [{"role": role, "content": text} for role, text in
                        (("system", "s"), ("user", "a"), ("assistant", "old"), ("user", "b"))]}  # fmt: skip
    desk = Desk(prompted([row], [0.0], 0, []), corpus)
    (first,) = desk.take(5)
    assert said(first.messages or []) == ["s s", "u a"] and desk.take(5) == []
    desk.give(first, "new", True, 4)
    (second,) = desk.take(5)
    assert said(second.messages or []) == ["s s", "u a", "a new", "u b"] and second.seed != first.seed
    desk.give(second, "last", False, 6)
    assert desk.take(5) == [] and desk.done == 1 and corpus.tokens == 10
    assert '"finished": false' in corpus.path.read_text()


def test_an_invented_request_is_answered(corpus: Corpus) -> None:
    desk = Desk(invented(["Write a"], [0.0], 0, []), corpus, TEMPLATE, tokens=1)
    (ask,) = desk.take(3)
    assert (ask.messages, ask.text) == (None, "<user> Write a") and ask.temperature == 0.9
    desk.give(ask, " poem. ", True, 3)
    (answer,) = desk.take(3)
    assert said(answer.messages or []) == ["u Write a poem."] and answer.temperature == 0.0
    desk.give(answer, "Roses", True, 2)
    assert desk.take(1) == [] and corpus.tokens == 2


@pytest.mark.parametrize(
    ("text", "finished", "why"),
    [(" b c", False, "did not end"), ("", True, "two words"), (" Same  thing", True, "there were before")],
)
def test_requests_that_are_no_use_are_dropped_and_counted(corpus: Corpus, text: str, finished: bool, why: str) -> None:
    corpus.questions.add("write same thing")
    desk = Desk(invented(["Write"], [0.0], 0, []), corpus, TEMPLATE, tokens=1)
    desk.give(desk.take(1)[0], text, finished, 3)
    assert [why in reason for reason in desk.dropped] == [True] and desk.done == 0
    assert desk.take(1)[0].dialogue.key == "self-0-1", "the next one takes its place"


def test_no_more_is_begun_than_the_limit_needs(corpus: Corpus) -> None:
    desk = Desk(invented(["Write a"], [0.0], 0, []), corpus, TEMPLATE, tokens=1000, max_answer=100)
    assert len(desk.take(64)) == 20


def test_a_resumed_run_invents_what_comes_next() -> None:
    first = list(islice(invented(["x", "y"], [0.0, 1.0], 5, []), 4))
    assert next(invented(["x", "y"], [0.0, 1.0], 5, ["self-5-0", "self-5-2", "self-7-9"])) == first[3]
    openings = {dialogue.opening for dialogue in islice(invented(read_openings(OPENINGS), [0.0], 0, []), 200)}
    assert len(openings) > 60 and "" in openings


def test_an_empty_answer_ends_the_conversation_with_what_it_has(corpus: Corpus) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    desk = Desk(prompted([row], [0.0], 0, []), corpus)
    desk.give(desk.take(1)[0], "x", True, 1)
    desk.give(desk.take(1)[0], " ", True, 1)
    assert (desk.done, desk.dropped, desk.under_way) == (1, {}, 0)
    assert said(json.loads(corpus.path.read_text())["messages"]) == ["u a", "a x"]


def test_the_users_turn_is_read_off_the_template(tokenizer: Any) -> None:
    turn = user_turn(tokenizer, system="b")
    assert turn.before == "<system> b <end> . <user> " and turn.ends == {0} and turn.stop is None
    tokenizer_without = type("T", (), {"chat_template": None})()
    with pytest.raises(EyasError, match="no chat template"):
        user_turn(tokenizer_without)


def test_openings_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "o.txt"
    path.write_text("# comment\n\nWrite a\n{empty}\nSum:\\n\\nOn\n")
    assert read_openings(path) == ["Write a", "", "Sum:\n\nOn"]
    path.write_text("# nothing\n")
    with pytest.raises(EyasError, match="none in it"):
        read_openings(path)
    with pytest.raises(EyasError, match="cannot be read"):
        read_openings(tmp_path / "nowhere")
