"""Two processes learn what one learns."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.checkpoint import read_checkpoint
from eyas.errors import EyasError
from eyas.training import TrainOptions, train
from eyas.training.curves import read_curves
from tests.training.tiny import answered, make_target, quiet, short_options


def run(rank: int, port: int, options: TrainOptions) -> None:
    """One of two processes, as ``accelerate launch --cpu --num_processes 2`` starts them."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    target = make_target()
    console = quiet()
    with pytest.raises(EyasError, match="accumulate is 1, so 2 processes"):
        train(target, answered(target, 20), None, replace(options, accumulate=1), console)
    found = train(target, answered(target, 20), None, options, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert (found is not None) == ("trained tokens" in said) == (rank == 0), "only the main process evaluates and speaks"


def test_two_processes_give_the_losses_and_the_draft_of_one(tmp_path: Path) -> None:
    """Three micro-batches a step for two processes, fewer in an epoch's last step; float32, noise and dropout included."""
    options = short_options(tmp_path / "two", accumulate=3, epochs=5, dropout=0.1, average=0.9)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(run, (port, options), nprocs=2)
    one = replace(options, out=tmp_path / "one")
    target = make_target()
    train(target, answered(target, 20), None, one, quiet())
    alone, together = read_curves(one.out), read_curves(options.out)
    assert [line["step"] for line in together] == [line["step"] for line in alone]
    pairs = [(single["loss"], double["loss"]) for single, double in zip(alone, together, strict=True) if "loss" in single]
    assert len(pairs) >= 9
    assert all(single == pytest.approx(double, rel=1e-4) for single, double in pairs)
    for name, weight in read_checkpoint(one.out).tensors.items():
        torch.testing.assert_close(read_checkpoint(options.out).tensors[name].float(), weight.float(), atol=2e-3, rtol=1e-2)
