"""Greedy output on the real model equals transformers' own ``generate``, token for token, in float32.

Quick by default; EYAS_FULL=1 runs four questions of each task and 128 new tokens (about a quarter of an hour on two cores).
"""

from __future__ import annotations

import os

import pytest
import torch

from eyas.engine import Engine
from eyas.loading import load_draft
from eyas.options import METHODS
from eyas.target import Target
from tests.shared import TASKS, questions

FULL = bool(os.environ.get("EYAS_FULL"))
QUESTIONS, NEW_TOKENS = (4, 128) if FULL else (1, 24)
OWN_PROMPTS = (
    "Explain in two sentences why leaves change colour in autumn.",
    "Write a Python function that counts the vowels in a string.",
    "A baker sells 7 loaves an hour for 6 hours. How many loaves is that?",
    "Name three rivers in Africa.",
    "Summarize: The town council voted to keep the library open on Sundays after residents collected two thousand signatures.",
    "Hi",
)


@pytest.fixture(scope="module")
def engine(embedded_float32: Target) -> Engine:
    return Engine(embedded_float32, load_draft(None, embedded_float32))


LONE = ("eagle2", "autoregressive")


def reference(engine: Engine, prompt: list[int], new_tokens: int) -> list[int]:
    """What transformers' ``generate`` says."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = engine.target.model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def check(engine: Engine, texts: list[str], new_tokens: int) -> None:
    """Every method with all prompts in one ragged batch, and alone (in a short run only LONE: tiny models have them all)."""
    prompts = [engine.render([{"role": "user", "content": text}]) for text in texts]
    expected = [reference(engine, prompt, new_tokens) for prompt in prompts]
    for method in METHODS:
        if method == "model":  # there is no smaller one
            continue
        if FULL or method in LONE:
            alone = [engine.generate(prompt, max_new_tokens=new_tokens, method=method).token_ids for prompt in prompts]
            assert alone == expected, method
        batch = engine.generate(prompts, max_new_tokens=new_tokens, method=method)
        assert [result.token_ids for result in batch] == expected, f"{method}, in a batch"


@pytest.mark.slow
def test_own_prompts(engine: Engine) -> None:
    """Also where nothing but the repository is at hand."""
    check(engine, list(OWN_PROMPTS[: 6 if FULL else 3]), 24)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(QUESTIONS))
def test_questions_of_the_six_tasks(engine: Engine, number: int) -> None:
    """The paper's tasks: prompts from a line to a news article, six of them as one batch."""
    check(engine, [questions(task, number + 1)[number] for task in TASKS], NEW_TOKENS)
