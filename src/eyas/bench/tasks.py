"""What the benchmark asks: the paper's six tasks from the hub or a folder, or 48 questions of our own, the default."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eyas.errors import EyasError, first_line

OWN = Path(__file__).parent / "prompts.jsonl"
TASKS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm", "natural_questions")
MT_CATEGORIES = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}  # in Spec-Bench


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        task: the task it belongs to.
        id: its name within the task.
        turns: what the user says, one turn after another.
    """

    task: str
    id: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class HubTask:
    """Where a task lies on the hub, and how a row of it becomes the user's turns."""

    name: str
    subset: str | None
    split: str
    turns: Callable[[Mapping[str, Any]], Sequence[str]]


HUB = {
    "mt_bench": HubTask("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: row["prompt"]),
    "humaneval": HubTask(
        "openai/openai_humaneval", None, "test", lambda row: ["Complete the following Python function.\n\n" + row["prompt"]]
    ),
    "gsm8k": HubTask("openai/gsm8k", "main", "test", lambda row: [row["question"]]),
    "alpaca": HubTask(
        "tatsu-lab/alpaca", None, "train", lambda row: ["\n\n".join(filter(None, (row["instruction"], row["input"])))]
    ),
    "cnn_dm": HubTask("abisee/cnn_dailymail", "3.0.0", "test", lambda row: ["Summarize: " + row["article"]]),
    "natural_questions": HubTask("google-research-datasets/nq_open", None, "validation", lambda row: [row["question"]]),
}


def own_questions() -> list[Question]:
    """The built-in questions, six times eight."""
    return [question(json.loads(line), "") for line in OWN.read_text(encoding="utf-8").splitlines()]


def read_folder(folder: Path) -> list[Question]:
    """Questions from a folder of JSONL files.

    A file is a task of its name; a row has ``turns`` and ``id`` (or ``question_id``). In a file named ``question.jsonl`` the
    row's ``category`` is the task (Spec-Bench's layout, in which MT-bench's own categories are told from the others).

    Raises:
        EyasError: no such folder, no file in it, or a row of another form.
    """
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
    if not files:
        raise EyasError(
            f"tasks {folder}: no folder with .jsonl files; pass one, or leave --tasks-dir out for the built-in tasks"
        )
    found = []
    for file in files:
        try:
            lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise EyasError(f"tasks {file}: cannot be read as UTF-8 text ({first_line(error)})") from error
        if not lines:
            raise EyasError(f"tasks {file}: the file is empty; remove it, or put questions in it")
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                found.append(question({"id": number, **row}, _task_of(file, row)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise EyasError(f"tasks {file}, line {number}: no question with turns ({first_line(error)})") from error
    names = [(each.task, each.id) for each in found]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise EyasError(f"tasks {folder}: task {twice[0]} has two questions with id {twice[1]}; give each its own")
    return found


def _task_of(file: Path, row: Mapping[str, Any]) -> str:
    if file.stem != "question":
        return file.stem
    return "mt_bench" if row["category"] in MT_CATEGORIES else str(row["category"])


def question(row: Mapping[str, Any], task: str) -> Question:
    """A row of JSON as a question; its own ``task``, if it names one, comes first."""
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError('"turns" is no list of texts')
    return Question(str(row.get("task") or task), str(row.get("question_id", row.get("id"))), tuple(turns))


def read_hub(names: Iterable[str], per_task: int) -> list[Question]:
    """The first questions of the paper's tasks, from the hub.

    Raises:
        EyasError: the datasets library is missing, or the hub does not give them.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise EyasError("tasks from the hub need the datasets library; run: pip install 'eyas[bench]'") from None
    found = []
    for name in names:
        place = HUB[name]
        try:
            rows = load_dataset(place.name, place.subset, split=place.split, streaming=True)
            found += [Question(name, str(number), tuple(place.turns(row))) for number, row in enumerate(islice(rows, per_task))]
        except Exception as error:  # whatever the hub, the network or a changed data set makes the library raise
            raise EyasError(
                f"task {name}: the hub did not give {place.name} ({first_line(error)}); pass --tasks-dir, or leave --hub out"
            ) from error
    return found


def choose_questions(questions: Sequence[Question], names: Sequence[str] | None, per_task: int | None) -> list[Question]:
    """The named tasks' first questions, task by task in turn, so that a run cut short has seen a bit of each.

    Raises:
        EyasError: an unknown task; the nearest name is suggested.
    """
    by_task: dict[str, list[Question]] = {}
    for each in questions:
        by_task.setdefault(each.task, []).append(each)
    for name in names or ():
        nearest(name, list(by_task), "task")
    wanted = [by_task[name][:per_task] for name in by_task if not names or name in names]
    deepest = max(map(len, wanted), default=0)
    return [task[place] for place in range(deepest) for task in wanted if place < len(task)]


def nearest(name: str, known: Sequence[str], kind: str) -> str:
    """The name, if it is known.

    Raises:
        EyasError: it is not; says which known name is the nearest.
    """
    if name in known:
        return name
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    raise EyasError(f"{kind} {name} is unknown; {hint}")
