"""The methods a run compares: ours under one loop, and other libraries' own, each behind ``run(ids, …) -> Answer``.

A method is named by a word and, for ours, a tree: ``eagle2`` (adaptive), ``eagle2:60/6/10`` (fixed: tokens, depth,
width), ``chain:5``, ``ngram:16/8/4``. The paper's ablations are ``eagle2-confidence`` and ``eagle2-no-rerank``; for the
adaptive tree there is ``eagle2-no-lookup``, where the draft alone proposes, and ``eagle2-uncoupled``, whose draft knows
nothing of the numbers of sampling; ``eagle2-coupled:60/6/10`` is a fixed tree whose draft does (`eyas.noise`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eyas.bench.tasks import nearest
from eyas.engine import Engine
from eyas.errors import EyasError
from eyas.options import METHODS, SETTINGS
from eyas.statistics import Statistics

VARIANTS: dict[str, dict[str, Any]] = {
    "eagle2-no-lookup": {"lookup": 0},
    "eagle2-uncoupled": {"coupled": False},
    "eagle2-coupled": {"coupled": True},
}
BASELINE = "autoregressive"
PUBLISHED = "60/6/10"  # tokens, depth, width of the paper's tree for a 7B target
ABLATIONS: dict[str, dict[str, Any]] = {
    "eagle2-confidence": {"rank_by": "confidence"},
    "eagle2-no-rerank": {"rerank": False},
    "eagle2-neither": {"rank_by": "confidence", "rerank": False},
}
NEUTRAL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
"""For all methods alike, whatever the model's generation_config says."""
PEERS = ("transformers", "transformers-static", "transformers-lookup", "transformers-assisted", "llama.cpp", "llama.cpp-lookup")
KNOWN = (*METHODS, *VARIANTS, *ABLATIONS, *PEERS)


@dataclass(frozen=True)
class Answer:
    """What a method said.

    Attributes:
        tokens: new token ids.
        seconds: wall time, prompt included.
        statistics: counts and times of its steps; None where another library hides them.
    """

    tokens: list[int]
    seconds: float
    statistics: Statistics | None


@dataclass(frozen=True)
class Asked:
    """How every method is asked: the same for all.

    Attributes:
        max_new_tokens: the limit.
        temperature: 0: greedy.
        seed: of sampling.
    """

    max_new_tokens: int
    temperature: float
    seed: int


Method = Callable[[list[int], Asked], Answer]


def make_method(name: str, engine: Engine) -> Method:
    """The method of a name, ready to run.

    Raises:
        EyasError: unknown, of an impossible tree, or in need of something that is not there.
    """
    word, _, shape = name.partition(":")
    nearest(word, KNOWN, "method")
    if word in PEERS:
        if shape:
            raise EyasError(f"method {name}: {word} is another library's and takes no tree; leave :{shape} out")
        from eyas.bench.peers import make_peer

        return make_peer(word, engine)
    if word in ABLATIONS:
        method, settings = "eagle2", {**tree_settings(name, "eagle2", shape or PUBLISHED), **ABLATIONS[word]}
    elif word in VARIANTS:
        needed = PUBLISHED if word == "eagle2-coupled" else ""  # the adaptive tree is coupled as it is
        method, settings = "eagle2", {**tree_settings(name, "eagle2", shape or needed), **VARIANTS[word]}
    else:
        method, settings = word, tree_settings(name, word, shape)
    engine.request([0], method=method, **settings)  # what is wrong with it is told now
    engine.new_drafter(method)

    def run(ids: list[int], asked: Asked) -> Answer:
        options = {**NEUTRAL, "temperature": asked.temperature, "seed": asked.seed, "max_new_tokens": asked.max_new_tokens}
        started = time.perf_counter()
        result = engine.generate(ids, method=method, **settings, **options)
        if result.finish_reason == "interrupted":
            raise KeyboardInterrupt  # half an answer must not count
        if engine.target.device.type != "cpu":
            torch.accelerator.synchronize(engine.target.device)
        return Answer(result.token_ids, time.perf_counter() - started, result.stats)

    return run


def tree_settings(name: str, word: str, shape: str) -> dict[str, int]:
    """The numbers after a method's colon as tree settings.

    Raises:
        EyasError: they are none, or too many.
    """
    if not shape:
        return {}
    wanted = [key for key in SETTINGS.get(word, ()) if key in ("tokens", "depth", "width")]
    try:
        numbers = [int(part) for part in shape.split("/")]
        return dict(zip(wanted, numbers, strict=True))
    except ValueError:
        form = f"{word}:{'/'.join(wanted)}" if wanted else f"{word} alone"
        raise EyasError(f"method {name}: its tree is not of the form {form}; write for example eagle2:60/6/10") from None
