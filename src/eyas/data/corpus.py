"""The growing file of conversations: append-only, one JSON object a line, whole lines or none, one writer at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from eyas.errors import EyasError

BEGINNING = b'{"id": "'  # of every row


class Corpus:
    """An output file that a killed run continues without loss or repeats.

    A row is ``{"id", "messages", "temperature", "finished", "tokens", "target"}``. What the file already holds is read at the
    start; a last line that a kill left incomplete is cut off.

    Args:
        path: the file; made if it does not exist.
        target: name of the model whose words it holds.

    Raises:
        EyasError: it cannot be written, is being written by another process, or holds something else than this target's rows.
    """

    def __init__(self, path: Path, target: str) -> None:
        self.path, self.target = path, target
        self.keys: set[str] = set()
        self.questions: set[str] = set()
        self.tokens = 0
        self.lock = FileLock(f"{path}.lock")
        try:
            self.lock.acquire(timeout=0)
            self.file = path.open("a+b")
        except Timeout:
            raise EyasError(f"output {path}: another process is writing it; wait for it or pass another file") from None
        except OSError as error:
            raise EyasError(f"output {path}: cannot be written ({error.strerror}); pass another file") from error
        try:
            self._read()
        except EyasError:
            self.close()
            raise

    def _read(self) -> None:
        self.file.seek(0)
        whole = 0  # bytes in complete lines
        for number, line in enumerate(self.file, start=1):
            if not line.endswith(b"\n") and line.startswith(BEGINNING[: len(line)]):
                break
            whole += len(line)
            try:
                row = json.loads(line)
                self._count(row)
                owner = row["target"]
            except (ValueError, TypeError, KeyError, StopIteration):
                raise EyasError(f"output {self.path}: line {number} is no row of 'eyas data'; pass another file") from None
            if owner != self.target:
                raise EyasError(
                    f"output {self.path}: it holds conversations of {owner}, not of {self.target}; pass another file"
                )
        self.file.truncate(whole)

    def _count(self, row: dict[str, Any]) -> None:
        self.keys.add(row["id"])
        self.questions.add(normalised(next(each["content"] for each in row["messages"] if each["role"] == "user")))
        self.tokens += row["tokens"]

    def add(self, row: dict[str, Any]) -> None:
        """Append one conversation; it is in the system's hands when this returns."""
        row = {**row, "target": self.target}
        self.file.write(json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n")
        self.file.flush()
        self._count(row)

    def close(self) -> None:
        """Bring everything to the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.lock.release()


def normalised(text: str) -> str:
    """What makes two requests the same: their words, whatever the case and the space between."""
    return " ".join(text.lower().split())
