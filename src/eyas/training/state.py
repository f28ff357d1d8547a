"""The state of an unfinished run: everything that makes a resumed run equal an uninterrupted one."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from eyas.errors import EyasError, first_line
from eyas.files import replacing
from eyas.target import Target
from eyas.training.dataset import Dataset
from eyas.training.options import TrainOptions
from eyas.training.storage import data_digest, weights_digest

STATE_FILE = "trainer_state.pt"
VERSION = 2
FREE_OPTIONS = {"out", "resume", "save_every", "evaluate_every", "feature_memory", "cache_features"}
"""Options that may change when a run is resumed: they do not change what is learnt."""


def describe_run(target: Target, dataset: Dataset, options: TrainOptions) -> dict[str, Any]:
    """What must be the same for a run to be resumed: options, data and target, as plain values."""
    chosen = {field.name: getattr(options, field.name) for field in fields(options) if field.name not in FREE_OPTIONS}
    data = data_digest([*dataset.samples, *dataset.heldout])
    return {
        **chosen, "data": data, "target": target.name, "dtype": str(target.dtype), "weights": weights_digest(target),
        "hidden_size": target.hidden_size, "vocabulary": target.vocab_size,
    }  # fmt: skip


def check_unused(options: TrainOptions) -> None:
    """Refuse an output folder whose draft a new run would replace, unless that is asked for.

    Raises:
        EyasError: it holds a draft and no unfinished run.
    """
    held = (options.out / "model.safetensors").exists() and not (options.out / STATE_FILE).exists()
    if held and options.resume is not False:
        raise EyasError(
            f"output {options.out} already holds a draft, and no unfinished run to continue; pass another folder, or "
            "--no-resume to train anew and replace it"
        )


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write a state; it is complete or the one before stays.

    Raises:
        EyasError: it cannot be written, for example because the disk is full.
    """
    with replacing(folder / STATE_FILE, "state") as temporary, temporary.open("wb") as stream:
        torch.save({**state, "version": VERSION}, stream)
        stream.flush()
        os.fsync(stream.fileno())


def load_state(folder: Path, run: dict[str, Any]) -> dict[str, Any] | None:
    """The state of the unfinished run in a folder, tensors on the CPU; None: there is none.

    Args:
        run: what the run about to start is, see `describe_run`.

    Raises:
        EyasError: it is damaged, or of another run; the message names the first thing that differs.
    """
    file = folder / STATE_FILE
    if not file.exists():
        return None
    anew = "or pass --no-resume to start anew"
    try:
        state = torch.load(file, "cpu", weights_only=True)
        version, found = state["version"], state["run"]
    except Exception as error:  # a damaged file makes the reader raise all sorts
        raise EyasError(f"state {file} is corrupt ({first_line(error)}); remove it, {anew}") from error
    if version != VERSION:
        raise EyasError(f"state {file} was written by another version of Eyas; finish it with that one, {anew}")
    for name in sorted(run.keys() | found.keys()):
        if run.get(name) != found.get(name):
            raise EyasError(
                f"output {folder} holds an unfinished run whose {name} is {found.get(name)}, not {run.get(name)}; repeat its "
                f"options and data to continue it, {anew}"
            )
    return dict(state)


def remove_state(folder: Path) -> None:
    """Forget an unfinished run."""
    (folder / STATE_FILE).unlink(missing_ok=True)
