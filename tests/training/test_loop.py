"""Training from conversations to checkpoint on a tiny target."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from eyas.checkpoint import build_head, read_checkpoint
from eyas.conversations import Conversations
from eyas.errors import EyasError
from eyas.target import Target
from eyas.training import TrainOptions, train
from eyas.training.curves import read_curves
from eyas.training.data import groups
from eyas.training.dataset import make_dataset
from eyas.training.order import learning_rate, steps
from eyas.training.trainer import Trainer
from tests.training.tiny import TEMPLATE, answered, make_target, quiet, short_options


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    return short_options(tmp_path / "draft")


def trainer_for(target: Target, data: Conversations, heldout: Conversations, options: TrainOptions) -> Trainer:
    dataset = make_dataset(target, data, heldout, options)
    return Trainer(Accelerator(cpu=True, mixed_precision="no"), target, dataset, options, quiet())


def losses(options: TrainOptions) -> list[float]:
    return [line["loss"] for line in read_curves(options.out) if "loss" in line]


def test_training_lowers_the_loss_and_writes_a_loadable_draft(
    target: Target, data: Conversations, heldout: Conversations, options: TrainOptions
) -> None:
    found = train(target, data, heldout, replace(options, epochs=8), quiet())
    curve = losses(options)
    assert sum(curve[-5:]) < 0.9 * sum(curve[:5])
    assert found is not None and found.decoded is not None
    assert 1 <= found.report.chain <= found.report.tree <= 7
    assert 1 <= found.decoded.tau <= 7 and len(found.decoded.acceptance) == 6
    assert found.decoded.tau == max(line["tau"] for line in read_curves(options.out) if "tau" in line)
    checkpoint = read_checkpoint(options.out)
    assert checkpoint.token_map is not None and len(checkpoint.token_map) == 12
    build_head(checkpoint)
    recorded = {"target": "tiny", "chat_template": TEMPLATE, "steps": found.step}
    assert checkpoint.raw["eyas"] == recorded


def test_the_checkpoint_is_the_running_mean(
    target: Target, data: Conversations, heldout: Conversations, options: TrainOptions
) -> None:
    trainer = trainer_for(target, data, heldout, replace(options, average=0.9))
    for step in steps(trainer.dataset.samples, options):
        trainer.step(step, 1e-3)
    trainer.finish()
    stored = build_head(read_checkpoint(options.out)).state_dict()
    for name, weight in trainer.average.state_dict().items():
        assert torch.equal(stored[name].float(), weight.to(torch.bfloat16).float())
    assert not torch.equal(trainer.average.fc.weight, trainer.head.fc.weight)


def test_a_seed_repeats_a_run(target: Target, data: Conversations, options: TrainOptions, tmp_path: Path) -> None:
    """Bit for bit, whatever the process's own random numbers, which stay untouched."""
    runs = []
    for place, seed in enumerate((0, 0, 1)):
        torch.manual_seed(place)
        before = torch.get_rng_state()
        chosen = replace(options, out=tmp_path / str(place), epochs=2, dropout=0.1, seed=seed)
        train(target, data, None, chosen, quiet())
        assert torch.equal(before, torch.get_rng_state())
        runs.append(losses(chosen))
    assert runs[0] == runs[1] != runs[2]


def test_a_step_is_the_mean_over_the_positions_of_all_its_micro_batches(
    target: Target, data: Conversations, heldout: Conversations, options: TrainOptions
) -> None:
    """Gradient and loss of accumulated micro-batches are those of one batch that holds them all."""
    options = replace(options, noise=0.0)
    many = trainer_for(target, data, heldout, replace(options, accumulate=3))
    step = next(steps(many.dataset.samples, many.options))
    counts = [sum(many.trained[place] for place in group) for group in step.groups]
    assert len(set(counts)) > 1, "the micro-batches differ in size"
    one = trainer_for(target, data, heldout, options)
    whole = replace(step, groups=[[place for group in step.groups for place in group]])
    assert many.step(step, 1e-3) == pytest.approx(one.step(whole, 1e-3), rel=1e-5)
    moments = [trainer.optimiser.state_dict()["state"] for trainer in (many, one)]
    for number in moments[0]:
        torch.testing.assert_close(moments[0][number]["exp_avg"], moments[1][number]["exp_avg"], rtol=1e-4, atol=1e-6)


def test_training_leaves_the_target_alone(target: Target, data: Conversations, options: TrainOptions) -> None:
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    train(target, data, None, replace(options, epochs=1), quiet())
    assert all(torch.equal(weight, before[name]) for name, weight in target.model.state_dict().items())


def test_the_time_limit_ends_training(target: Target, data: Conversations, options: TrainOptions) -> None:
    limited = replace(options, epochs=100_000, minutes=0.01, eval_prompts=0, evaluate_every=10**6)
    found = train(target, data, None, limited, quiet())
    assert found is not None and found.decoded is None


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_learning_rate_rises_and_falls(options: TrainOptions, schedule: str) -> None:
    options = replace(options, schedule=schedule)
    rates = [learning_rate(done / 100, options) for done in range(101)]
    peak = rates.index(max(rates))
    assert peak == 5 and rates[peak] == options.learning_rate
    assert rates[:6] == sorted(rates[:6]) and rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(options.learning_rate / 20)
    drops = [before - after for before, after in pairwise(rates[5:])]
    assert (max(drops) - min(drops) < 1e-9) is (schedule == "linear")


def test_every_start_and_loss_trains(target: Target, data: Conversations, options: TrainOptions) -> None:
    for changes in ({"start": "last-layer", "loss": "top-k"}, {"start": "random", "loss": "distribution"}):
        chosen = replace(options, epochs=2, resume=False, **changes)
        train(target, data, None, chosen, quiet())
        curve = losses(chosen)
        assert sum(curve[-5:]) < sum(curve[:5])


def test_a_draft_is_trained_further_with_its_own_vocabulary(
    target: Target, data: Conversations, options: TrainOptions, tmp_path: Path
) -> None:
    train(target, data, None, replace(options, epochs=1), quiet())
    first = read_checkpoint(options.out)
    further = replace(options, out=tmp_path / "further", from_draft=str(options.out), epochs=1, draft_vocab_size=5)
    train(target, data, None, further, quiet())
    second = read_checkpoint(further.out)
    assert first.token_map is not None and second.token_map is not None
    assert first.token_map.tolist() == second.token_map.tolist()
    assert losses(further)[0] < losses(options)[0]
    other = make_target(hidden_size=16)
    with pytest.raises(EyasError, match=r"made for a target of hidden size 32, but tiny has 16"):
        train(other, data, None, replace(further, out=tmp_path / "other"), quiet())


def test_the_whole_vocabulary_needs_no_map(target: Target, data: Conversations, options: TrainOptions) -> None:
    for size in (0, None):
        train(target, data, None, replace(options, draft_vocab_size=size, epochs=1, resume=False), quiet())
        assert read_checkpoint(options.out).token_map is None


def test_what_makes_no_sense_is_refused(target: Target, data: Conversations, options: TrainOptions) -> None:
    with pytest.raises(EyasError, match="draft_vocab is 17, but tiny has 16 tokens"):
        train(target, data, None, replace(options, draft_vocab_size=17), quiet())
    with pytest.raises(EyasError, match="no conversations"):
        train(target, Conversations([]), None, options, quiet())
    asked = Conversations([{"messages": row["messages"][:1]} for row in data.rows])
    with pytest.raises(EyasError, match="no assistant token to train on"):
        train(target, asked, None, options, quiet())
    bad: dict[str, Any] = {"loss": "luck", "start": "luck", "schedule": "luck", "accumulate": 0, "save_every": 0}
    for name, value in bad.items():
        with pytest.raises(EyasError, match=name):
            replace(options, **{name: value})
    assert not options.out.exists()


def test_a_run_that_diverges_stops_at_once(target: Target, data: Conversations, options: TrainOptions) -> None:
    with pytest.raises(EyasError, match=r"the loss of step \d+ is (nan|inf); .*lower --learning-rate"):
        train(target, data, None, replace(options, learning_rate=1e30, warmup=0.0), quiet())
    assert all(value < float("inf") for value in losses(options))


def test_too_few_conversations_to_hold_any_out(target: Target, options: TrainOptions) -> None:
    console = quiet()
    assert train(target, answered(target, 3), None, options, console) is None
    assert "too few" in console.file.getvalue() and read_checkpoint(options.out).kind == "eagle"  # type: ignore[attr-defined]


def test_steps_cover_every_epoch_and_go_on_from_anywhere(target: Target, data: Conversations, options: TrainOptions) -> None:
    samples = make_dataset(target, data, None, options).samples
    options = replace(options, accumulate=2)
    whole = list(steps(samples, options))
    seen = [place for step in whole for group in step.groups for place in group]
    assert sorted(seen) == sorted(list(range(len(samples))) * options.epochs)
    numbers = [step.number + micro for step in whole for micro in range(len(step.groups))]
    assert numbers == list(range(len(numbers))) and len(groups(samples, 64)) > 2
    for place, step in enumerate(whole):
        assert list(steps(samples, options, step.after)) == whole[place + 1 :]
