"""An interrupted and resumed run equals the uninterrupted one, and a failure costs the steps since the last state."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.checkpoint import read_checkpoint
from eyas.conversations import Conversations
from eyas.errors import EyasError
from eyas.target import Target
from eyas.training import TrainOptions, train
from eyas.training.curves import read_curves
from eyas.training.state import STATE_FILE
from eyas.training.storage import DiskStore
from eyas.training.trainer import Trainer
from tests.training.tiny import answered, quiet, short_options


class Killed(BaseException):
    """Stands for a process that just ends."""


def break_at(monkeypatch: pytest.MonkeyPatch, number: int, action: Any) -> None:
    """Do something in place of the optimiser step after ``number`` steps."""
    step = Trainer.step

    def broken(self: Trainer, *arguments: Any) -> float:
        if self.steps_done == number:
            action()
        return step(self, *arguments)

    monkeypatch.setattr(Trainer, "step", broken)


def die() -> None:
    raise Killed


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    return short_options(tmp_path / "draft", average=0.9, dropout=0.1, accumulate=2, epochs=6)


@pytest.mark.parametrize("feature_memory", [8, 0], ids=["remembered", "computed"])
def test_a_resumed_run_equals_the_uninterrupted_one(
    target: Target,
    data: Conversations,
    options: TrainOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    feature_memory: float,
) -> None:
    """Killed twice between two states, within an epoch: losses, evaluations and the draft are the same to the last bit."""
    options = replace(options, feature_memory=feature_memory)
    whole = replace(options, out=tmp_path / "whole")
    expected = train(target, data, None, whole, quiet())
    for number in (7, 13):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            break_at(patch, number, die)
            train(target, data, None, options, quiet())
        assert read_curves(options.out)[-1]["step"] == number, "the lines since the last state are there, to be dropped"
    console = quiet()
    assert train(target, data, None, options, console) == expected
    assert "continuing after step 10" in console.file.getvalue()  # type: ignore[attr-defined]
    assert read_curves(options.out) == read_curves(whole.out)
    for name, tensor in read_checkpoint(whole.out).tensors.items():
        assert torch.equal(tensor, read_checkpoint(options.out).tensors[name])
    assert not (options.out / STATE_FILE).exists() and (options.out / "curves.jsonl").exists()


def test_features_on_disk_serve_a_resumed_run(
    target: Target, data: Conversations, options: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target runs over a sample once; the losses are those of features kept in memory."""
    whole = replace(options, out=tmp_path / "whole")
    train(target, data, None, whole, quiet())
    disk = replace(options, cache_features=tmp_path / "features")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        break_at(patch, 13, die)
        train(target, data, None, disk, quiet())
    assert len(list((tmp_path / "features").rglob("*.safetensors"))) == 16
    monkeypatch.setattr(DiskStore, "__setitem__", lambda *_: pytest.fail("computed again"))
    train(target, data, None, disk, quiet())
    assert read_curves(disk.out) == read_curves(whole.out)


def test_the_stored_draft_vocabulary_is_used(
    target: Target, data: Conversations, options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        break_at(patch, 7, die)
        train(target, data, None, options, quiet())
    monkeypatch.setattr("eyas.training.trainer.draft_vocabulary", lambda *_: pytest.fail("rebuilt"))
    train(target, data, None, options, quiet())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(
    target: Target, data: Conversations, options: TrainOptions, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    console, before = quiet(), signal.getsignal(number)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        break_at(patch, 7, lambda: os.kill(os.getpid(), number))
        train(target, data, None, options, console)
    assert signal.getsignal(number) is before
    assert "stopped after step 8; the same command continues" in console.file.getvalue()  # type: ignore[attr-defined]
    assert torch.load(options.out / STATE_FILE, weights_only=True)["steps_done"] == 8
    assert train(target, data, None, options, quiet()) is not None


def test_another_run_is_not_resumed(
    target: Target, data: Conversations, options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other options or data are refused by name; what does not change the outcome may change; --no-resume starts anew."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        break_at(patch, 7, die)
        train(target, data, None, options, quiet())
    with pytest.raises(EyasError, match=r"unfinished run whose learning_rate is 0\.005, not 0\.1; .*--no-resume"):
        train(target, data, None, replace(options, learning_rate=0.1), quiet())
    with pytest.raises(EyasError, match="unfinished run whose data is"):
        train(target, answered(target, 20, seed=5), None, options, quiet())
    console = quiet()
    train(target, data, None, replace(options, resume=False, evaluate_every=7), console)
    for resume in (None, True):  # it has finished: its draft is not to be lost by repeating the command
        with pytest.raises(EyasError, match="already holds a draft, and no unfinished run"):
            train(target, data, None, replace(options, resume=resume), quiet())
    assert "continuing" not in console.file.getvalue()  # type: ignore[attr-defined]
    assert read_curves(options.out)[0]["step"] == 1


def test_a_damaged_state_is_refused(target: Target, data: Conversations, options: TrainOptions) -> None:
    options.out.mkdir()
    (options.out / STATE_FILE).write_bytes(b"rubbish")
    with pytest.raises(EyasError, match=r"trainer_state\.pt is corrupt .*--no-resume"):
        train(target, data, None, options, quiet())


def test_a_full_disk_leaves_the_old_state_and_draft(
    target: Target, data: Conversations, options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, no debris; with room again the run goes on."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    options = replace(options, evaluate_every=5)
    for name, failing in (("eyas.training.state.torch.save", "state"), ("eyas.checkpoint.save_file", "draft")):
        with monkeypatch.context() as patch, pytest.raises(EyasError, match=rf"{failing} .*No space left on device"):
            break_at(patch, 7, lambda name=name, patch=patch: patch.setattr(name, full))  # type: ignore[misc]
            monkeypatch.setattr("eyas.training.trainer.Evaluation.score", property(lambda self: self.step))
            train(target, data, None, replace(options, resume=failing == "draft"), quiet())
        assert torch.load(options.out / STATE_FILE, weights_only=True)["steps_done"] == 5
        assert read_checkpoint(options.out).kind == "eagle"
        assert not list(options.out.glob(".*"))
    assert train(target, data, None, options, quiet()) is not None
