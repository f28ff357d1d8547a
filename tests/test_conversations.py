"""Rows of many makes become one form; what cannot is skipped by its place, or refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.conversations import TrainingDataError, conversation, read_conversations

ASKED = [{"role": "user", "content": "a"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("raw", "messages"),
    [
        ({"messages": ANSWERED}, ANSWERED),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ANSWERED),
        ({"conversations": [{"from": "gpt", "value": "before"}, {"from": "human", "value": "a"}]}, ASKED),
        ({"messages": [{"role": "system", "content": "s"}, *ASKED]}, [{"role": "system", "content": "s"}, *ASKED]),
        ({"turns": ["a", "c"], "id": 81}, [*ASKED, {"role": "user", "content": "c"}]),
        ({"prompt": "a"}, ASKED),
        ({"question": "a", "answer": "b"}, ASKED),
        ({"instruction": "a", "input": "", "output": "b"}, ASKED),
        ({"instruction": "a", "input": "c"}, [{"role": "user", "content": "a\n\nc"}]),
        ("a", ASKED),
    ],
)
def test_every_make_is_understood(raw: Any, messages: list[dict[str, str]]) -> None:
    assert conversation(raw)["messages"] == messages


def test_what_else_a_row_says_of_its_answer_stays() -> None:
    assert conversation({"messages": ANSWERED, "finished": False, "source": "x"}) == {"messages": ANSWERED, "finished": False}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"answer": "b"}, "no .messages."),
        ({"messages": []}, "not a list with something"),
        ({"messages": [{"role": "user"}]}, "needs a text"),
        ({"messages": [{"role": "oracle", "content": "a"}]}, "unknown role 'oracle'"),
        ({"conversations": [{"from": "gpt", "value": "b"}]}, "no user turn"),
        ({"prompt": "  "}, "no user turn"),
        ({"prompt": "\ud800"}, "no valid Unicode"),
        (7, "of type int"),
    ],
)
def test_what_is_none_says_why(raw: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        conversation(raw)


def test_a_broken_line_is_skipped_by_number_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([json.dumps({"messages": ANSWERED}), "", "{broken", json.dumps({"prompt": "a\u2028b"})]))
    found = read_conversations(path)
    assert [len(row["messages"]) for row in found.rows] == [2, 1]
    assert len(found.skipped) == 1 and found.skipped[0].startswith("line 3: not JSON")
    with pytest.raises(TrainingDataError, match=r"data\.jsonl, line 3: not JSON"):
        read_conversations(path, strict=True)
    assert len(read_conversations(path, limit=1).rows) == 1


def test_text_has_a_prompt_a_line_and_json_a_list(tmp_path: Path) -> None:
    text, whole = tmp_path / "prompts.txt", tmp_path / "prompts.json"
    text.write_text("\ufeffa\n\n  b \n", encoding="utf-8")
    assert [row["messages"][0]["content"] for row in read_conversations(text).rows] == ["a", "b"]
    whole.write_text(json.dumps(["a", {"messages": ANSWERED}]))
    assert [len(row["messages"]) for row in read_conversations(whole).rows] == [1, 2]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.jsonl", b"", "no conversations"),
        ("bad.jsonl", b"{}\n", r"no conversations in it \(line 1: no .messages."),
        ("wild.txt", b"caf\xe9", "UTF-8"),
        ("object.json", b"{}", "list of conversations is expected"),
        ("broken.json", b"[", "not JSON"),
    ],
)
def test_unusable_files_are_refused_by_name(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TrainingDataError, match=rf"{name}.*{reason}"):
        read_conversations(tmp_path / name)


def test_a_missing_file_and_a_missing_library_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingDataError, match="no such file"):
        read_conversations(tmp_path / "nowhere.jsonl")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TrainingDataError, match=r"pip install 'eyas\[train\]'"):
        read_conversations("someone/prompts")


def test_a_data_set_is_read_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def load_dataset(name: str, split: str, streaming: bool) -> Any:
            assert (name, split, streaming) == ("someone/prompts", "test", True)
            yield {"prompt": "a"}
            yield {"prompt": "b"}

    monkeypatch.setitem(sys.modules, "datasets", Library)
    assert len(read_conversations("someone/prompts", split="test").rows) == 2
