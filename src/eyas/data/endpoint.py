"""Holding conversations through an OpenAI-compatible server, so that a vLLM or SGLang cluster can do the work."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from queue import SimpleQueue
from threading import Thread
from typing import Any

from eyas.data.dialogue import Desk, Turn
from eyas.errors import EyasError, first_line

TRIES = 6
REFUSED = (400, 413, 422)  # of one request, such as a prompt too long; the server may well take the next
TIMEOUT = 600.0  # seconds for one answer


class RefusedError(EyasError):
    """The server refuses one request for what it is."""


@dataclass(frozen=True)
class Endpoint:
    """A server that speaks OpenAI's protocol.

    Attributes:
        url: its base, such as ``http://localhost:8000/v1``.
        model: the model to ask for.
        key: sent as a bearer token; from EYAS_API_KEY or OPENAI_API_KEY.
        pause: seconds before a second try, doubled for each further one.
    """

    url: str
    model: str
    key: str | None = None
    pause: float = 1.0

    @classmethod
    def open(cls, url: str, model: str | None = None, pause: float = 1.0) -> Endpoint:
        """Reach the server; without a model named, take the first it serves.

        Raises:
            EyasError: it cannot be reached, or serves no such model.
        """
        key = os.environ.get("EYAS_API_KEY") or os.environ.get("OPENAI_API_KEY")
        base = cls(url.rstrip("/"), model or "", key, pause)
        if not url.startswith(("http://", "https://")):
            raise EyasError(f"endpoint {url}: not a URL; pass one such as http://localhost:8000/v1")
        names = [entry.get("id") for entry in base.ask("models", None).get("data") or []]
        if not names or (model and model not in names):
            raise EyasError(f"endpoint {url}: serves {', '.join(map(str, names)) or 'no model'}; name one with --model")
        return cls(base.url, model or str(names[0]), key, pause)

    def ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """One call, tried again where the server is busy or away for a moment.

        Raises:
            EyasError: it refuses, or stays away.
        """
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(TRIES):
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(f"{self.url}/{path}", data, headers), timeout=TIMEOUT
                ) as answer:
                    found = json.loads(answer.read())
                if not isinstance(found, dict):
                    raise ValueError("not a JSON object")
                return found
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.reason}: {error.read(300).decode(errors='replace')}"
                if error.code not in (408, 409, 429) and error.code < 500:
                    advice = "set EYAS_API_KEY" if error.code in (401, 403) else "check the URL and --model"
                    kind = RefusedError if error.code in REFUSED else EyasError
                    raise kind(f"endpoint {self.url} refuses ({' '.join(reason.split())}); {advice}") from None
            except (OSError, ValueError, HTTPException) as error:
                reason = first_line(error)
            if attempt < TRIES - 1:
                time.sleep(self.pause * 2**attempt)
        raise EyasError(f"endpoint {self.url}: no answer in {TRIES} tries ({reason}); what is done is kept, run it again later")

    def write(self, turn: Turn, stop: str | None) -> tuple[str, bool, int]:
        """One turn's text, whether it ended by itself, and its tokens."""
        body: dict[str, Any] = {
            "model": self.model, "temperature": turn.temperature, "seed": turn.seed, "max_tokens": turn.max_new_tokens,
        }  # fmt: skip
        if turn.messages is not None:
            found = self.ask("chat/completions", {**body, "messages": turn.messages})
        else:
            found = self.ask("completions", {**body, "prompt": turn.text, **({"stop": [stop]} if stop else {})})
        try:
            choice = found["choices"][0]
            text = choice["message"]["content"] if turn.messages is not None else choice["text"]
            tokens = (found.get("usage") or {}).get("completion_tokens") or len((text or "").split())
            return text or "", choice.get("finish_reason") == "stop", int(tokens)
        except (KeyError, IndexError, TypeError) as error:
            raise EyasError(f"endpoint {self.url}: its answer is not of OpenAI's form ({error!r}); check the URL") from error


def converse_remotely(endpoint: Endpoint, desk: Desk, rows: int, report: Callable[[int], None] = lambda tokens: None) -> None:
    """Write every turn the desk has, ``rows`` calls at a time; see `eyas.data.local.converse`.

    Raises:
        EyasError: the server stays away, or refuses whatever it is asked.
    """
    stop = desk.template.stop if desk.template else None
    asked: SimpleQueue[Turn] = SimpleQueue()
    answered: SimpleQueue[tuple[Turn, tuple[str, bool, int] | Exception]] = SimpleQueue()

    def work() -> None:
        while True:
            turn = asked.get()
            try:
                answered.put((turn, endpoint.write(turn, stop)))
            except Exception as error:  # handed to the thread that can act on it
                answered.put((turn, error))

    for _ in range(rows):
        Thread(target=work, daemon=True).start()  # daemons: Ctrl-C does not wait for answers under way
    running = 0
    while True:
        for turn in desk.take(rows - running):
            asked.put(turn)
            running += 1
        if not running:
            return
        turn, found = answered.get()
        running -= 1
        if isinstance(found, RefusedError):
            desk.drop(turn.dialogue, "prompts that the server refuses")
            if not desk.done and desk.dropped.get("prompts that the server refuses", 0) >= rows:
                raise found
        elif isinstance(found, Exception):
            raise found
        else:
            text, finished, tokens = found
            report(tokens)
            desk.give(turn, text, finished, tokens)
