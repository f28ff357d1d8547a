"""From options to a file, with the tiny target and with a server of our own."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eyas.conversations import Conversations, conversation, read_conversations
from eyas.data import DataOptions, make_conversations, run
from eyas.data.dialogue import Desk
from eyas.data.endpoint import TRIES, Endpoint
from eyas.engine import Engine
from eyas.errors import EyasError

PROMPTS = Conversations([conversation(" ".join("abcdefgh"[place:])) for place in range(7)])


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    monkeypatch.setattr(run, "load_target", lambda *_, **__: engine.target)
    monkeypatch.setattr(run, "load_tokenizer", lambda *_, **__: engine.tokenizer)


def make(options: DataOptions, prompts: Conversations | None = None) -> Desk:
    return make_conversations(options, prompts, Console(file=io.StringIO()))


def rows(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in found}) == len(found), "a repeat"
    return {row["id"]: row for row in found}


@pytest.mark.parametrize("width", [1, 3, 16])
def test_answers_are_the_targets_own_whatever_the_batch(tmp_path: Path, engine: Engine, width: int) -> None:
    options = DataOptions(out=tmp_path / "c.jsonl", max_new_tokens=9, rows=width, temperatures=(0.0, 1.0))
    desk = make(options, PROMPTS)
    found = rows(options.out)
    assert desk.done + sum(desk.dropped.values()) == 7 and len(found) == desk.done >= 4
    assert {row["temperature"] for row in found.values()} == {0.0, 1.0}
    for row in found.values():
        if row["temperature"] == 0:
            alone = engine.chat(row["messages"][:1], max_new_tokens=9)
            assert (row["messages"][1]["content"], row["tokens"]) == (alone.text, len(alone.token_ids))
            assert row["finished"] == (alone.finish_reason == "stop")


def test_a_killed_run_goes_on_without_loss_or_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after every conversation: the file ends up as that of the run that was left alone."""
    whole = DataOptions(out=tmp_path / "whole.jsonl", max_new_tokens=9, rows=3)
    make(whole, PROMPTS)
    parts = DataOptions(out=tmp_path / "parts.jsonl", max_new_tokens=9, rows=3)
    give = Desk.give

    def fatal(desk: Desk, *arguments: Any) -> None:
        give(desk, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Desk, "give", fatal)
    for _ in range(9):
        try:
            make(parts, PROMPTS)
        except KeyboardInterrupt:
            with parts.out.open("a") as file:
                file.write('{"id": "half a li')
    monkeypatch.setattr(Desk, "give", give)
    make(parts, PROMPTS)
    assert rows(parts.out) == rows(whole.out)


def test_the_target_invents_and_answers(tmp_path: Path) -> None:
    openings = tmp_path / "o.txt"
    openings.write_text("a\nb c\n{empty}\n")
    options = DataOptions(out=tmp_path / "c.jsonl", tokens=150, max_new_tokens=12, rows=4, openings=openings)
    desk = make(options)
    found = rows(options.out)
    assert desk.corpus.tokens >= 100 and all(row["messages"][0]["content"].strip() for row in found.values())
    assert len({row["messages"][0]["content"] for row in found.values()}) == len(found)
    more = make(DataOptions(**{**vars(options), "tokens": 260}))
    assert found.items() <= rows(options.out).items() and more.corpus.tokens > desk.corpus.tokens
    assert len(read_conversations(options.out, strict=True).rows) == len(rows(options.out))


def test_a_prompt_longer_than_the_context_is_dropped_and_told(tmp_path: Path) -> None:
    prompts = Conversations([conversation("a " * 200), *PROMPTS.rows[:2]])
    desk = make(DataOptions(out=tmp_path / "c.jsonl", max_new_tokens=5, rows=2), prompts)
    assert desk.dropped["prompts that do not fit the context or the template"] == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": 0}, "tokens is 0"), ({"rows": 0}, "rows is 0"), ({"temperatures": ()}, "no temperature"),
        ({"temperatures": (-1.0,)}, "temperature is -1"), ({"question_temperature": float("nan")}, "temperature is nan"),
    ],
)  # fmt: skip
def test_bad_options(change: dict[str, Any], named: str) -> None:
    with pytest.raises(EyasError, match=named):
        DataOptions(out=Path("x"), **change)


def test_what_cannot_be_done_is_told_before_any_work(tmp_path: Path) -> None:
    for options, prompts, named in (
        (DataOptions(out=tmp_path / "c"), None, "--tokens"),
        (DataOptions(out=tmp_path / "no" / "c"), PROMPTS, "make it first"),
        (DataOptions(out=tmp_path / "c", endpoint="nowhere"), PROMPTS, "not a URL"),
    ):
        with pytest.raises(EyasError, match=named):
            make(options, prompts)
    assert not (tmp_path / "c").exists()


class Server(BaseHTTPRequestHandler):
    """Answers like a server of one model, but is busy every third time."""

    calls = 0
    bodies: list[dict[str, Any]]

    def log_message(self, *_: Any) -> None: ...

    def reply(self, status: int, found: Any) -> None:
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Server.calls += 1
        if Server.calls % 3 == 0:
            return self.reply(503, {})
        if self.headers.get("Authorization") == "Bearer wrong":
            return self.reply(401, {"error": "bad key"})
        long = len(body["messages"][0]["content"]) > 14 if "messages" in body else False
        if self.headers.get("Authorization") == "Bearer broken" or (
            self.headers.get("Authorization") == "Bearer full" and long
        ):
            return self.reply(400, {"error": "too long"})
        Server.bodies.append(body)
        if self.path == "/v1/completions":
            choice = {"text": f" d {Server.calls}", "finish_reason": "stop"}
        else:
            said = body["messages"][-1]["content"]
            choice = {"message": {"content": f"you said {said}"}, "finish_reason": "length"}
        self.reply(200, {"choices": [choice], "usage": {"completion_tokens": 5}})


@pytest.fixture
def url() -> Iterator[str]:
    Server.calls, Server.bodies = 0, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Endpoint.open
    monkeypatch.setattr(Endpoint, "open", lambda url, model: opened(url, model, pause=0.001))


def test_a_server_answers_prompts(tmp_path: Path, url: str, hasty: None) -> None:
    options = DataOptions(out=tmp_path / "c.jsonl", endpoint=url, rows=3, max_new_tokens=7)
    make(options, PROMPTS)
    found = rows(options.out)
    assert len(found) == 7 and {row["target"] for row in found.values()} == {"served"}
    assert all(row["messages"][1]["content"] == "you said " + row["messages"][0]["content"] for row in found.values())
    assert not any(row["finished"] for row in found.values())
    assert {body["max_tokens"] for body in Server.bodies} == {7} and {body["model"] for body in Server.bodies} == {"served"}


def test_a_server_invents_requests_in_the_targets_template(tmp_path: Path, url: str, hasty: None) -> None:
    options = DataOptions(out=tmp_path / "c.jsonl", endpoint=url, tokens=10, rows=2, target="tiny", max_new_tokens=10)
    make(options)
    prompts = [body["prompt"] for body in Server.bodies if "prompt" in body]
    assert prompts and all(prompt.startswith("<user> ") for prompt in prompts)
    with pytest.raises(EyasError, match="pass --target"):
        make(DataOptions(out=tmp_path / "d.jsonl", endpoint=url, tokens=10))


def test_a_server_that_refuses_or_is_away_is_told(
    tmp_path: Path, url: str, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EyasError, match="serves served; name one"):
        Endpoint.open(url, "other")
    monkeypatch.setenv("EYAS_API_KEY", "wrong")
    with pytest.raises(EyasError, match=r"refuses \(401.*EYAS_API_KEY"):
        make(DataOptions(out=tmp_path / "c.jsonl", endpoint=url), PROMPTS)
    monkeypatch.setenv("EYAS_API_KEY", "full")
    desk = make(DataOptions(out=tmp_path / "d.jsonl", endpoint=url, rows=3), PROMPTS)
    assert desk.dropped == {"prompts that the server refuses": 1} and desk.done == 6
    monkeypatch.setenv("EYAS_API_KEY", "broken")
    with pytest.raises(EyasError, match=r"refuses \(400"):
        make(DataOptions(out=tmp_path / "e.jsonl", endpoint=url, rows=3), PROMPTS)
    with pytest.raises(EyasError, match=f"no answer in {TRIES} tries"):
        Endpoint.open("http://127.0.0.1:9/v1", None)
