"""The output file: whole lines, no repeats, one writer, one target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.data.corpus import BEGINNING, Corpus
from eyas.errors import EyasError


def row(key: str, question: str = "a b", tokens: int = 3) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "c"}]
    return {"id": key, "messages": messages, "temperature": 0.0, "finished": True, "tokens": tokens}


def test_what_was_added_is_there_again_when_reopened(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    first = Corpus(path, "tiny")
    first.add(row("x", "Ä  b"))
    first.add(row("y", "c"))
    first.close()
    again = Corpus(path, "tiny")
    assert (again.keys, again.tokens, again.questions) == ({"x", "y"}, 6, {"ä b", "c"})
    again.close()
    assert path.read_bytes().startswith(BEGINNING)
    assert [json.loads(line)["target"] for line in path.read_text().splitlines()] == ["tiny", "tiny"]


def test_a_line_that_a_kill_left_incomplete_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    first = Corpus(path, "tiny")
    first.add(row("x"))
    first.close()
    whole = path.read_bytes()
    for cut in (1, 20, len(whole) - 1):
        path.write_bytes(whole + whole[:cut])
        again = Corpus(path, "tiny")
        again.add(row("y"))
        again.close()
        assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["x", "y"]


@pytest.mark.parametrize(
    "content", [b"text\n", b"{}\n", b'{"messages": []}\n', b"[1]\n", b"text", b'{"messages": []}', b'[{"id": "']
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(content)
    with pytest.raises(EyasError, match=r"c\.jsonl: line 1 is no row"):
        Corpus(path, "tiny")
    assert path.read_bytes() == content


def test_another_targets_file_is_refused(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "c.jsonl", "tiny")
    corpus.add(row("x"))
    corpus.close()
    with pytest.raises(EyasError, match="conversations of tiny, not of large"):
        Corpus(tmp_path / "c.jsonl", "large")


def test_requests_are_known_again_behind_a_system_message(tmp_path: Path) -> None:
    first = Corpus(tmp_path / "c.jsonl", "tiny")
    system = {"role": "system", "content": "s"}
    first.add({**row("x"), "messages": [system, *row("x")["messages"]]})
    first.close()
    again = Corpus(tmp_path / "c.jsonl", "tiny")
    assert again.questions == {"a b"}
    again.close()


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "c.jsonl", "tiny")
    with pytest.raises(EyasError, match="another process"):
        Corpus(tmp_path / "c.jsonl", "tiny")
    corpus.close()
    Corpus(tmp_path / "c.jsonl", "tiny").close()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="cannot be written"):
        Corpus(tmp_path, "tiny")
