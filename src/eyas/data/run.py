"""`eyas data` from its options to a file of conversations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from eyas.conversations import Conversations
from eyas.data.corpus import Corpus
from eyas.data.dialogue import OPENINGS, Desk, invented, prompted, read_openings, user_turn
from eyas.data.endpoint import Endpoint, converse_remotely
from eyas.data.local import converse
from eyas.engine import Engine
from eyas.errors import EyasError
from eyas.loading import load_target, load_tokenizer
from eyas.progress import progress_bar
from eyas.sampling import SamplingOptions


@dataclass(frozen=True)
class DataOptions:
    """What to make, from what, and how.

    Attributes:
        out: the JSONL file, continued where it exists.
        tokens: stop after so many tokens of answers; None: when the prompts are used up.
        temperatures: one of them is drawn for each conversation's answers.
        question_temperature: of invented requests.
        max_new_tokens: of an answer.
        rows: conversations at a time.
        openings: file of beginnings for invented requests.
        system: a system message for all conversations that have none.
        seed: of everything drawn.
        endpoint, model: an OpenAI-compatible server's base URL, and the model to ask it for; None: the target is loaded here.
        target, dtype, device, trust_remote_code: as for `eyas.load`.
    """

    out: Path
    tokens: int | None = None
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    question_temperature: float = 0.9
    max_new_tokens: int = 384
    rows: int = 32
    openings: Path = field(default=OPENINGS)
    system: str | None = None
    seed: int = 0
    endpoint: str | None = None
    model: str | None = None
    target: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "max_new_tokens", "rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EyasError(f"{name} is {value}; it must be at least 1")
        if not self.temperatures:
            raise EyasError("no temperature given; pass one, such as 0, or several as 0,0.7,1")
        for temperature in (*self.temperatures, self.question_temperature):
            SamplingOptions(temperature=temperature)


def make_conversations(options: DataOptions, prompts: Conversations | None, console: Console) -> Desk:
    """Hold conversations until the options' limit, or until the prompts are used up.

    Args:
        prompts: requests to answer; None: the target invents them.
        console: where progress is shown.

    Returns:
        The desk, which has counted what was done and what was dropped.

    Raises:
        EyasError: a setting that makes no sense, or a target, server or file that cannot be used.
    """
    if prompts is None and options.tokens is None:
        raise EyasError("--self never runs out of requests; say how many tokens of answers to make with --tokens")
    openings = read_openings(options.openings) if prompts is None else []
    if not options.out.parent.is_dir():
        raise EyasError(f"output {options.out}: there is no folder {options.out.parent}; make it first")
    writer = open_writer(options, prompts is None, console)
    corpus = Corpus(options.out, writer.name)
    try:
        if corpus.keys:
            console.print(f"{options.out} holds {len(corpus.keys)} conversations, {corpus.tokens} tokens of answers: going on")
        desk, total = make_desk(options, prompts, openings, writer, corpus)
        begun, made = time.monotonic(), 0
        with progress_bar(console, total) as update:

            def report(tokens: int) -> None:
                nonlocal made
                made += tokens
                speed = made / max(time.monotonic() - begun, 1e-9)
                done = corpus.tokens if options.tokens else desk.done + sum(desk.dropped.values())
                update(done, f"{desk.done} conversations, {corpus.tokens} tokens of answers, {speed:.0f} tokens/s")

            writer.write(desk, report)
    finally:
        corpus.close()
    return desk


@dataclass(frozen=True)
class Writer:
    """Whoever writes the texts.

    Attributes:
        name: of the model.
        tokenizer: its tokenizer; None where only a server knows it.
        write: writes every turn a desk has, and reports new tokens.
    """

    name: str
    tokenizer: Any
    write: Callable[[Desk, Callable[[int], None]], None]


def open_writer(options: DataOptions, invents: bool, console: Console) -> Writer:
    """Load the target, or reach the server that has it.

    Raises:
        EyasError: neither is there, or the server's chat template is needed and not known.
    """
    if options.endpoint is None:
        with console.status(f"loading {options.target or 'the embedded target'} …"):
            target = load_target(
                options.target,
                dtype=options.dtype,
                device=options.device,
                trust_remote_code=options.trust_remote_code,
                four_bit=False,
            )
        engine = Engine(target, None, "autoregressive")
        return Writer(target.name, target.tokenizer, lambda desk, report: converse(engine, desk, options.rows, report))
    server, tokenizer = Endpoint.open(options.endpoint, options.model), None
    if invents:
        if options.target is None:
            raise EyasError(
                "--self through an endpoint needs the model's chat template; pass --target (only its tokenizer is read)"
            )
        tokenizer = load_tokenizer(options.target, trust_remote_code=options.trust_remote_code)
    return Writer(server.model, tokenizer, lambda desk, report: converse_remotely(server, desk, options.rows, report))


def make_desk(
    options: DataOptions, prompts: Conversations | None, openings: list[str], writer: Writer, corpus: Corpus
) -> tuple[Desk, float]:
    """The desk with what is still to do, and what will be done in the end: tokens of answers, or conversations."""
    limits: dict[str, Any] = {"tokens": options.tokens, "question_temperature": options.question_temperature}
    if prompts is None:
        template = user_turn(writer.tokenizer, options.system)
        endless = invented(openings, options.temperatures, options.seed, corpus.keys, options.system)
        return Desk(endless, corpus, template, max_answer=options.max_new_tokens, **limits), float(options.tokens or 0)
    waiting = list(prompted(prompts.rows, options.temperatures, options.seed, corpus.keys, options.system))
    return Desk(iter(waiting), corpus, None, max_answer=options.max_new_tokens, **limits), float(options.tokens or len(waiting))
