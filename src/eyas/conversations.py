"""Conversations and prompts from files and data sets of many makes, one form out of them all.

A row becomes ``{"messages": [{"role", "content"}, …], "finished": bool, …}``. Understood are: OpenAI ``messages``; ShareGPT
``conversations`` (``from``/``value``); ``turns`` (a list of user turns, as MT-bench has them); a lone prompt under ``prompt``,
``instruction`` (with ``input``), ``question`` or ``text``; a line of plain text. A hub id is read with the
``datasets`` library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.errors import EyasError, first_line
from eyas.files import user_path

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "bot": "assistant", "system": "system"}
PROMPT_KEYS = ("prompt", "instruction", "question", "text")


class TrainingDataError(EyasError):
    """The data cannot be used; the message says which, why, and where."""


@dataclass(frozen=True)
class Conversations:
    """What was read.

    Attributes:
        rows: conversations, each a dictionary with ``messages``.
        skipped: rows that could not be used: where, and why.
    """

    rows: list[dict[str, Any]]
    skipped: list[str] = field(default_factory=list)


def read_conversations(
    source: str | Path, *, strict: bool = False, limit: int | None = None, split: str = "train"
) -> Conversations:
    """Read a file (.jsonl, .json, or text with a prompt a line) or a Hugging Face data set.

    Args:
        source: a path, or a data set's hub id.
        strict: refuse the first row that cannot be used, instead of leaving it out.
        limit: read at most so many usable rows.
        split: of a data set.

    Raises:
        TrainingDataError: it cannot be read, holds nothing usable, or (strict) has a bad row.
    """
    if limit is not None and limit < 1:
        raise TrainingDataError(f"limit is {limit}; it must be at least 1")
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for where, raw in _raw_rows(source, split):
        try:
            rows.append(conversation(raw))
        except ValueError as error:
            if strict:
                raise TrainingDataError(
                    f"{source}, {where}: {error}; mend it, or leave out --strict to skip such rows"
                ) from None
            skipped.append(f"{where}: {error}")
        if limit is not None and len(rows) == limit:
            break
    if not rows:
        reason = f" ({skipped[0]})" if skipped else ""
        raise TrainingDataError(f"{source}: no conversations in it{reason}; see 'eyas data --help' for what it may hold")
    return Conversations(rows, skipped)


def left_out(*read: Conversations | None) -> list[str]:
    """A line for each source with rows that could not be read."""
    skipped = [found.skipped for found in read if found is not None and found.skipped]
    return [f"left out {len(lines)} rows that cannot be used, such as {lines[0]}" for lines in skipped]


def conversation(raw: object) -> dict[str, Any]:
    """One row in the one form; further keys such as ``finished`` and ``temperature`` stay.

    Raises:
        ValueError: it is none; the message says why.
    """
    if isinstance(raw, ValueError):
        raise raw
    if isinstance(raw, str):
        raw = {"prompt": raw}
    if not isinstance(raw, Mapping):
        raise ValueError(f"a JSON object or a text is expected, but this is of type {type(raw).__name__}")
    if "messages" in raw:
        messages = [_message(each, "role", "content") for each in _entries(raw, "messages")]
    elif "conversations" in raw:
        messages = [_message(each, "from", "value") for each in _entries(raw, "conversations")]
    elif "turns" in raw:
        messages = [_message({"role": "user", "content": turn}, "role", "content") for turn in _entries(raw, "turns")]
    else:
        key = next((name for name in PROMPT_KEYS if isinstance(raw.get(name), str)), None)
        if key is None:
            raise ValueError(f'no "messages", "conversations", "turns" or prompt among its keys ({", ".join(map(str, raw))})')
        more = raw.get("input") if key == "instruction" else None
        messages = [{"role": "user", "content": f"{raw[key]}\n\n{more}" if isinstance(more, str) and more else raw[key]}]
    while messages and messages[0]["role"] == "assistant":
        del messages[0]  # ShareGPT conversations often begin in the middle
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise ValueError("no user turn with text in it")
    try:
        json.dumps(messages, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a text that is no valid Unicode") from None
    return {**{name: raw[name] for name in ("finished", "temperature", "id") if name in raw}, "messages": messages}


def _entries(raw: Mapping[str, Any], key: str) -> list[Any]:
    entries = raw[key]
    if not isinstance(entries, list) or not entries:
        raise ValueError(f'"{key}" is not a list with something in it')
    return entries


def _message(entry: object, role_key: str, text_key: str) -> dict[str, str]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get(role_key), str) or not isinstance(entry.get(text_key), str):
        raise ValueError(f'every message needs a text each under "{role_key}" and "{text_key}"')
    role = ROLES.get(entry[role_key])
    if role is None:
        raise ValueError(f"a message of unknown role {entry[role_key]!r}; known are {', '.join(sorted(ROLES))}")
    return {"role": role, "content": entry[text_key]}


def _raw_rows(source: str | Path, split: str) -> Iterator[tuple[str, object]]:
    """Rows as they stand, each with where it is; a line that is no JSON comes as the error."""
    path = user_path(source)
    if path.is_file():
        yield from _file_rows(path)
    elif path.exists() or str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise TrainingDataError(f"{source}: no such file; pass a .jsonl, .json or text file, or the hub id of a data set")
    else:
        yield from _hub_rows(str(source), split)


def _file_rows(path: Path) -> Iterator[tuple[str, object]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingDataError(f"{path}: cannot be read as UTF-8 text ({first_line(error)}); check or convert it") from error
    if path.suffix == ".json":
        try:
            whole = json.loads(text)
        except ValueError as error:
            raise TrainingDataError(f"{path}: not JSON ({error}); mend it, or name it .jsonl if it has a row a line") from error
        if not isinstance(whole, list):
            raise TrainingDataError(f"{path}: a JSON {type(whole).__name__} where a list of conversations is expected")
        yield from ((f"row {number}", row) for number, row in enumerate(whole, start=1))
        return
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: strings may hold other line separators
        if not line.strip():
            continue
        row: object = line.strip()
        if path.suffix == ".jsonl":
            try:
                row = json.loads(line)
            except ValueError as error:
                row = ValueError(f"not JSON ({error})")
        yield f"line {number}", row


def _hub_rows(name: str, split: str) -> Iterator[tuple[str, object]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise TrainingDataError(
            f"{name}: no such file, and reading a data set needs the datasets library; run: pip install 'eyas[train]'"
        ) from None
    try:
        rows = load_dataset(name, split=split, streaming=True)
        yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))
    except Exception as error:  # whatever the hub, the network or the data set's own layout makes the library raise
        raise TrainingDataError(f"{name}: no such file, and the hub did not give it ({first_line(error)})") from error
