"""Where the material that is not part of the repository lies: tests that need it skip, with a word, where it is absent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(os.environ.get("EYAS_SHARED", Path(__file__).parents[2] / "shared"))
TASKS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm", "natural_questions")


def shared(*parts: str) -> Path:
    """A path in the shared material, or a skip."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{'/'.join(parts)} is not here (set EYAS_SHARED)")
    return path


def questions(task: str, count: int) -> list[str]:
    """The first turns of the first questions of one of the paper's tasks."""
    lines = shared("tasks", f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:count]]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
