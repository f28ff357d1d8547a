"""Holding conversations with a loaded target: one batch whose rows are refilled as they end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from eyas.data.dialogue import Desk, Turn
from eyas.decode import Request, decode, open_session
from eyas.engine import Engine
from eyas.errors import EyasError


def converse(engine: Engine, desk: Desk, rows: int, report: Callable[[int], None] = lambda tokens: None) -> None:
    """Write every turn the desk has, ``rows`` at a time.

    Plain decoding: a batch wide enough to fill the machine leaves no free arithmetic for drafts.

    Args:
        engine: the target.
        desk: hands out the turns.
        rows: of the batch.
        report: called after every delivery with the number of new tokens.
    """
    turns: dict[int, Turn] = {}  # by the identity of its request

    def refill(count: int) -> list[Request]:
        requests: list[Request] = []
        while len(requests) < count:
            taken = desk.take(count - len(requests))
            if not taken:
                break
            for turn in taken:
                try:
                    request = make_request(engine, desk, turn)
                except EyasError:
                    desk.drop(turn.dialogue, "prompts that do not fit the context or the template")
                    continue
                turns[id(request)] = turn
                requests.append(request)
        return requests

    requests = refill(rows)
    if not requests:
        return
    session = open_session(engine.target, requests, None)
    for delivery in decode(engine.target, session, None, requests, refill):
        report(len(delivery.token_ids))
        request = delivery.request
        if request.finish_reason is not None:
            desk.give(turns.pop(id(request)), request.text.text, request.finish_reason == "stop", len(request.ids))


def make_request(engine: Engine, desk: Desk, turn: Turn) -> Request:
    """The turn as the loop's request.

    Raises:
        EyasError: it does not fit into the context, or the chat template refuses it.
    """
    options: dict[str, Any] = {"temperature": turn.temperature, "seed": turn.seed, "max_new_tokens": turn.max_new_tokens}
    if turn.messages is not None:
        return engine.request(engine.render(turn.messages), method="autoregressive", **options)
    assert engine.tokenizer is not None and desk.template is not None
    ids = list(engine.tokenizer.encode(turn.text, add_special_tokens=False))
    stop = [desk.template.stop] if desk.template.stop else []
    request = engine.request(ids, method="autoregressive", stop=stop, **options)
    return dataclasses.replace(request, eos_ids=request.eos_ids | desk.template.ends)
