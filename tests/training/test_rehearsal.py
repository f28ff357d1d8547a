"""What is told before a run, and what is held out; nothing is trained or written."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from eyas.conversations import Conversations
from eyas.errors import EyasError
from eyas.target import Target
from eyas.training import TrainOptions, rehearse, train
from eyas.training.data import render
from eyas.training.dataset import hold_out, make_dataset
from eyas.training.preview import show_sample
from tests.training.tiny import answered, make_tokenizer, quiet, short_options

TALK = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]}


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    return short_options(tmp_path / "draft")


@pytest.mark.parametrize("colour", [True, False])
def test_the_preview_marks_exactly_the_trained_tokens(tokenizer: Any, colour: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=colour, color_system="truecolor" if colour else None, width=200)
    show_sample(render(TALK, tokenizer, {0}), tokenizer, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("\x1b[1;32mc d <end>\x1b[0m" if colour else "⟦c d <end>⟧") in said
    assert "10 tokens, 3 of them trained" in said


def test_the_plan_adds_up_and_nothing_is_written(target: Target, data: Conversations, options: TrainOptions) -> None:
    lines = rehearse(target, data, None, replace(options, accumulate=2), preview=False, strict=False)
    told = dict(line.split(maxsplit=1) for line in lines if line.startswith(("head", "data")))
    parameters = 2 * 32 * 32 + 32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48 + 32  # fc, q and o, k and v, the MLP, a norm
    assert told["head"] == f"{parameters:,} parameters, draft vocabulary 12"
    assert lines[0] == "4 of 20 conversations are held out to evaluate on"
    assert not options.out.exists()
    console = quiet()
    train(target, data, None, replace(options, accumulate=2), console)
    steps = next(line.split()[-1] for line in lines if line.startswith("optimiser steps"))
    assert f"step {steps}: " in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("total", "count"), [(4, 0), (5, 1), (20, 4), (199, 4), (300, 6), (10_000, 64)])
def test_a_fiftieth_is_held_out(total: int, count: int) -> None:
    rows = [{"messages": [], "id": number} for number in range(total)]
    kept, held = hold_out(Conversations(rows))
    assert len(held.rows) == count
    assert sorted(row["id"] for row in [*kept.rows, *held.rows]) == list(range(total))
    assert hold_out(Conversations(rows)) == (kept, held)


def test_prompts_end_where_the_assistant_speaks(target: Target, options: TrainOptions, heldout: Conversations) -> None:
    """As many as asked for; none that leaves no room."""
    long = {"messages": [{"role": "user", "content": "a " * 120}, {"role": "assistant", "content": "b"}]}
    held = Conversations([long, *heldout.rows])
    found = make_dataset(target, answered(target, 5), held, replace(options, eval_prompts=3)).prompts
    assert len(found) == 3
    words = target.tokenizer.convert_ids_to_tokens(found[0])
    assert words[0] == "<user>" and words[-1] == "<assistant>"


def test_a_template_without_a_system_role_is_told_and_the_mask_is_right(target: Target, options: TrainOptions) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% for message in messages %}", "{% for message in messages if message['role'] != 'system' %}"
    )
    mute = Target(target.model, tokenizer, "mute")
    rows = [{"messages": [{"role": "system", "content": "k k"}, *TALK["messages"]]} for _ in range(5)]
    dataset = make_dataset(mute, Conversations(rows), None, options)
    assert any("leaves out system messages" in note for note in dataset.notes)
    assert torch.equal(dataset.samples[0].written, render(TALK, tokenizer, {0}).written)
    assert not any("system" in note for note in make_dataset(target, Conversations(rows), None, options).notes)


def test_strict_refuses_what_is_left_out_otherwise(target: Target, data: Conversations, options: TrainOptions) -> None:
    rows = Conversations([*data.rows, {"messages": TALK["messages"][:1]}])
    dataset = make_dataset(target, rows, None, options)
    assert any(note.startswith("left out 1 conversations, such as") for note in dataset.notes)
    with pytest.raises(EyasError, match=r"no assistant token.*mend it"):
        make_dataset(target, rows, None, options, strict=True)


def test_a_target_without_a_template_is_refused(target: Target, data: Conversations, options: TrainOptions) -> None:
    with pytest.raises(EyasError, match="no chat template"):
        make_dataset(Target(target.model, None, "mute"), data, None, options)
