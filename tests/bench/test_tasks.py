"""Questions from every place, and what is told of those that cannot be used."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.bench.tasks import HUB, TASKS, Question, choose_questions, own_questions, read_folder, read_hub
from eyas.errors import EyasError
from tests.shared import SHARED


def test_the_built_in_questions_are_six_times_eight() -> None:
    found = own_questions()
    assert {task: sum(each.task == task for each in found) for task in TASKS} == dict.fromkeys(TASKS, 8)
    assert all(len(each.turns) == (2 if each.task == "mt_bench" else 1) for each in found)
    assert len({each.turns for each in found}) == 48


def write(path: Path, *rows: Any) -> None:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def test_a_folder_and_spec_benchs_layout(tmp_path: Path) -> None:
    write(tmp_path / "riddles.jsonl", {"id": 3, "turns": ["a", "b"]})
    write(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["c", "d"]},
        {"question_id": 300, "category": "rag", "turns": ["e"]},
    )
    assert read_folder(tmp_path) == [
        Question("mt_bench", "81", ("c", "d")), Question("rag", "300", ("e",)), Question("riddles", "3", ("a", "b")),
    ]  # fmt: skip


@pytest.mark.skipif(not (SHARED / "tasks").exists(), reason="the tasks are not here (set EYAS_SHARED)")
def test_the_shared_tasks() -> None:
    found = read_folder(SHARED / "tasks")
    assert len(found) == 240 and {each.task for each in found} == set(TASKS)


@pytest.mark.parametrize("row", [{"id": 1}, {"id": 1, "turns": []}, {"id": 1, "turns": "a"}, {"id": 1, "turns": [""]}, 7])
def test_a_row_of_another_form_is_named(tmp_path: Path, row: Any) -> None:
    write(tmp_path / "a.jsonl", {"id": 0, "turns": ["x"]}, row)
    with pytest.raises(EyasError, match=r"a\.jsonl, line 2"):
        read_folder(tmp_path)


def test_empty_and_missing_places(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(EyasError, match="no folder with"):
            read_folder(place)
    write(tmp_path / "a.jsonl", {"id": 1, "turns": ["x"]}, {"id": 1, "turns": ["y"]})
    with pytest.raises(EyasError, match="two questions with id 1"):
        read_folder(tmp_path)
    write(tmp_path / "a.jsonl", {"turns": ["x"]}, {"turns": ["y"]})
    assert [each.id for each in read_folder(tmp_path)] == ["1", "2"]
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(EyasError, match="the file is empty"):
        read_folder(tmp_path)


def test_questions_come_task_by_task_in_turn() -> None:
    found = [Question(task, str(n), ("x",)) for task in ("a", "b") for n in range(3)]
    assert [each.task + each.id for each in choose_questions(found, None, 2)] == ["a0", "b0", "a1", "b1"]
    assert [each.task + each.id for each in choose_questions(found, ["b"], None)] == ["b0", "b1", "b2"]
    with pytest.raises(EyasError, match=r"task mt_benhc is unknown; did you mean mt_bench\?"):
        choose_questions(own_questions(), ["mt_benhc"], None)


def test_the_hub_is_read_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "prompt": ["a", "b"], "question": "q", "article": "news", "instruction": "do", "input": "",
    }  # fmt: skip

    class Library:
        @staticmethod
        def load_dataset(name: str, subset: str | None, split: str, streaming: bool) -> Any:
            yield from [{**rows, "prompt": "def f():"} if "humaneval" in name else rows] * 5

    monkeypatch.setitem(sys.modules, "datasets", Library)
    found = read_hub(HUB, 2)
    assert len(found) == 12 and {each.task for each in found} == set(TASKS)
    turns = {each.task: each.turns for each in found}
    assert turns["mt_bench"] == ("a", "b") and turns["alpaca"] == ("do",) and turns["cnn_dm"] == ("Summarize: news",)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EyasError, match=r"pip install 'eyas\[bench\]'"):
        read_hub(["gsm8k"], 1)
