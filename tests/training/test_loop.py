"""Training from file to checkpoint on a tiny target."""

from __future__ import annotations

import dataclasses
import io
import random
from typing import Any

import pytest
import torch
from rich.console import Console

from eyas.checkpoint import build_head, read_checkpoint
from eyas.training import TrainOptions, train
from eyas.training.conversations import Conversations
from eyas.training.data import batches, to_samples
from eyas.training.loop import Trainer, learning_rate

Data = tuple[Conversations, Conversations]


@pytest.fixture(scope="module")
def data(tokenizer: Any, target: Any) -> tuple[Conversations, Conversations]:
    """Conversations whose answers are the tiny target's own greedy ones."""
    chooser = random.Random(0)
    rows = []
    for _ in range(24):
        messages = [{"role": "user", "content": " ".join(chooser.choices("abcdefgh", k=4))}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        answer = target.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        words = [word for word in tokenizer.convert_ids_to_tokens(answer.tolist()) if word != "<end>"] or ["a"]
        rows.append({"messages": [*messages, {"role": "assistant", "content": " ".join(words)}], "finished": False})
    return Conversations(rows[:20]), Conversations(rows[20:])


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> TrainOptions:
    return TrainOptions(
        out=tmp_path_factory.mktemp("out") / "draft", epochs=10,
        draft_vocab_size=12, batch_tokens=128, steps=2, learning_rate=5e-3, evaluate_every=20,
    )  # fmt: skip


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_training_lowers_the_loss_and_writes_a_loadable_draft(
    target: Any, tokenizer: Any, data: Data, options: TrainOptions
) -> None:
    samples = to_samples(data[0], tokenizer, {0}, options.max_length)
    trainer = Trainer(target, samples, [], {0}, options)
    (batch,) = list(batches(samples[:4], 1024))
    with torch.no_grad():
        before = float(trainer.loss(batch, trainer.source(batch)))
    trainer.run(quiet())
    with torch.no_grad():
        after = float(trainer.loss(batch, trainer.source(batch)))
    assert after < 0.8 * before
    checkpoint = read_checkpoint(options.out)
    head = build_head(checkpoint)
    assert checkpoint.token_map is not None and checkpoint.token_map.tolist() == trainer.token_map.tolist()
    for name, weight in trainer.average.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name].float(), weight.to(torch.bfloat16).float())


def test_the_report_says_what_was_kept_and_a_seed_repeats_it(
    target: Any, tokenizer: Any, data: Data, options: TrainOptions
) -> None:
    short = dataclasses.replace(options, epochs=3, dropout=0.1)
    first, again = (train(target, tokenizer, *data, short, quiet()) for _ in range(2))
    assert first is not None and first == again
    assert 1 <= first.chain <= first.tree <= 7
    other = train(target, tokenizer, *data, dataclasses.replace(short, seed=1), quiet())
    assert other != first


def test_training_leaves_the_target_alone(target: Any, tokenizer: Any, data: Data, options: TrainOptions) -> None:
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    train(target, tokenizer, *data, dataclasses.replace(options, epochs=1), quiet())
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


def test_the_time_limit_ends_training(target: Any, tokenizer: Any, data: Data, options: TrainOptions) -> None:
    limited = dataclasses.replace(options, epochs=100_000, minutes=0.02)
    assert train(target, tokenizer, data[0], None, limited, quiet()) is None


def test_the_learning_rate_rises_and_falls(options: TrainOptions) -> None:
    rates = [learning_rate(done / 100, options) for done in range(101)]
    peak = rates.index(max(rates))
    assert peak == 5 and rates[peak] == options.learning_rate
    assert rates[:6] == sorted(rates[:6]) and rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(options.learning_rate / 20)
