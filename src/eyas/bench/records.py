"""What a run remembers: one record for each question, turn, temperature and method, and what it ran on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from eyas.errors import EyasError, first_line
from eyas.files import replacing
from eyas.machine import accelerator, processor

RUN, JOURNAL = "run.json", "records.jsonl"


@dataclass(frozen=True)
class Record:
    """One method's answer to one question.

    Attributes:
        task, id, turn: which question.
        temperature: of sampling; 0: greedy.
        method: as it was asked for.
        prompt_tokens: length of the prompt.
        tokens: the new tokens.
        seconds: wall time, prompt included.
        delivered, accepted, depths: for each step tokens delivered, draft tokens among them, depth of the tree; None for
            methods whose steps cannot be seen (other libraries).
        draft_seconds, verify_seconds, rest_seconds, prefill_seconds: where the time went; None likewise.
        divergence: where the tokens first differ from the baseline's (greedy only); None: nowhere.
        margin: there, the difference of the target's log-probabilities of the two tokens, as the target alone computes them.
        tolerance: how far rounding alone may move that margin; up to it, the parting is a near-tie.
    """

    task: str
    id: str
    turn: int
    temperature: float
    method: str
    prompt_tokens: int
    tokens: list[int]
    seconds: float
    delivered: list[int] | None = None
    accepted: list[int] | None = None
    depths: list[int] | None = None
    prefill_seconds: float | None = None
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    rest_seconds: float | None = None
    divergence: int | None = None
    margin: float | None = None
    tolerance: float | None = None

    @property
    def key(self) -> tuple[str, str, int, float, str]:
        """What it is the record of."""
        return (self.task, self.id, self.turn, self.temperature, self.method)

    @property
    def speed(self) -> float:
        """Delivered tokens a second of wall time."""
        return len(self.tokens) / self.seconds


@dataclass(frozen=True)
class Run:
    """A benchmark run, finished or not.

    Attributes:
        settings: what was asked for; a run is only continued with the same.
        environment: machine, versions, threads.
        records: what was measured.
        skipped: questions left out, with the reason.
        observed: what was seen of single draft nodes, see `eyas.bench.observe`.
    """

    settings: dict[str, Any]
    environment: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    observed: dict[str, Any] = field(default_factory=dict)


def environment(precision: str, device: torch.device) -> dict[str, Any]:
    """What a figure depends on besides the code."""
    versions = {}
    for name in ("eyas", "torch", "transformers", "tokenizers", "llama-cpp-python"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(), "versions": versions, "device": str(device), "processor": processor(),
        "cores": os.cpu_count(), "threads": torch.get_num_threads(), "dtype": precision,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "accelerator": accelerator(device),
    }  # fmt: skip


def write_run(path: Path, run: Run) -> None:
    """Write a run as one JSON file, whole or not at all."""
    with replacing(path, "run") as temporary:
        temporary.write_text(json.dumps(asdict(run), ensure_ascii=False) + "\n", encoding="utf-8")


def read_run(path: Path) -> Run:
    """Read a run; of one that was cut short what its journal holds.

    Raises:
        EyasError: it is missing, or no run.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        run = Run(**{**raw, "records": [Record(**record) for record in raw["records"]]})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EyasError(
            f"run {path}: cannot be read as a benchmark run ({first_line(error)}); pass a run.json of eyas bench"
        ) from error
    journalled, _ = read_journal(path.parent / JOURNAL) if path.name == RUN else ([], 0)
    return replace(run, records=journalled) if len(journalled) > len(run.records) else run


def read_journal(path: Path) -> tuple[list[Record], int]:
    """The records of a journal, none if there is no such file, and how many bytes its whole lines take.

    Raises:
        EyasError: it is damaged.
    """
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    try:
        return [Record(**json.loads(line)) for line in data[:whole].splitlines()], whole
    except (ValueError, TypeError) as error:
        raise EyasError(f"{path}: damaged ({first_line(error)}); remove it, or pass another --out") from error


class Journal:
    """The records of an unfinished run, a line each, so that a killed run goes on where it was.

    Args:
        path: the file; a last line that a kill left incomplete is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records, whole = read_journal(path)
        if path.exists() and whole < path.stat().st_size:
            os.truncate(path, whole)

    def add(self, records: Iterable[Record]) -> None:
        """Append records; they are in the system's hands when this returns."""
        fresh = list(records)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(record)) + "\n" for record in fresh)
        self.records += fresh
