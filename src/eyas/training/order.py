"""In which order a run goes through its data, from the start or from any place in it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eyas.training.data import Sample, groups
from eyas.training.options import TrainOptions


@dataclass(frozen=True)
class Position:
    """How far a run has got.

    Attributes:
        epoch: passes over the data that are complete, or all but.
        place: micro-batches of the next pass that are done.
        number: micro-batches of the whole run that are done.
    """

    epoch: int = 0
    place: int = 0
    number: int = 0


@dataclass(frozen=True)
class Step:
    """One optimiser step.

    Attributes:
        groups: for each micro-batch the places of its samples in the data.
        number: of the first micro-batch, in the whole run.
        share: of all epochs that lies before it.
        after: where the run is once it is done.
    """

    groups: list[list[int]]
    number: int
    share: float
    after: Position


def steps(samples: Sequence[Sample], options: TrainOptions, position: Position = Position()) -> Iterator[Step]:
    """The run's optimiser steps from ``position`` on. An epoch's last step may have fewer micro-batches than the others."""
    number = position.number
    for epoch in range(position.epoch, options.epochs):
        order = groups(samples, options.batch_tokens, random.Random(f"{options.seed} {epoch}"))
        for place in range(position.place if epoch == position.epoch else 0, len(order), options.accumulate):
            chosen = order[place : place + options.accumulate]
            share = (epoch + place / len(order)) / options.epochs
            yield Step(chosen, number, share, Position(epoch, place + len(chosen), number + len(chosen)))
            number += len(chosen)


def learning_rate(done: float, options: TrainOptions) -> float:
    """The rate when the share ``done`` of the run is over: a linear rise, then a fall to a twentieth."""
    if done < options.warmup:
        return options.learning_rate * max(done / options.warmup, 0.01)
    fallen = (done - options.warmup) / (1 - options.warmup)
    left = 0.5 * (1 + math.cos(math.pi * fallen)) if options.schedule == "cosine" else 1 - fallen
    return options.learning_rate * (0.05 + 0.95 * left)
