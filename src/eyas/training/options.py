"""The knobs of training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas.errors import EyasError


@dataclass(frozen=True)
class TrainOptions:
    """What to train on, for how long and how.

    Attributes:
        out: folder of the draft checkpoint.
        epochs: passes over the data at most.
        minutes: time limit; the learning rate reaches its end by then. None: no limit.
        draft_vocab_size: most frequent tokens the head may propose; None: the whole vocabulary.
        max_length: conversations are cut to this many tokens.
        batch_tokens: padded tokens a step.
        steps: draft steps unrolled.
        step_decay: weight of each step's loss relative to the one before.
        entropy_weight: weight of the cross-entropy (published 0.1).
        feature_weight: weight of the feature regression (published 1).
        learning_rate: peak; then it falls along a cosine to a twentieth.
        warmup: share of the run in which it rises.
        weight_decay: AdamW's, on matrices only.
        clip: largest norm of the gradient.
        noise: width of the uniform noise on the features, times 512 / length (published 0.2).
        dropout: on what attention and feed-forward add to the residual.
        average: decay of the running mean of the weights that is evaluated and kept; 0: the weights themselves.
        remember_features: keep the target's features in memory after the first epoch.
        evaluate_every: optimiser steps between evaluations.
        seed: of initial weights, order, noise and dropout.
    """

    out: Path
    epochs: int = 10
    minutes: float | None = None
    draft_vocab_size: int | None = 12288
    max_length: int = 2048
    batch_tokens: int = 2048
    steps: int = 3
    step_decay: float = 0.8
    entropy_weight: float = 0.1
    feature_weight: float = 1.0
    learning_rate: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 0.5
    noise: float = 0.2
    dropout: float = 0.0
    average: float = 0.0
    remember_features: bool = True
    evaluate_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        checks: list[tuple[str, float | None, bool, str]] = [
            ("epochs", self.epochs, self.epochs >= 1, "at least 1"),
            ("minutes", self.minutes, self.minutes is None or self.minutes > 0, "above 0"),
            ("draft_vocab", self.draft_vocab_size, self.draft_vocab_size is None or self.draft_vocab_size > 0, "above 0"),
            ("batch_tokens", self.batch_tokens, self.batch_tokens >= 1, "at least 1"),
            ("max_length", self.max_length, self.max_length >= 3, "at least 3"),
            ("unroll", self.steps, self.steps >= 1, "at least 1"),
            ("learning_rate", self.learning_rate, self.learning_rate > 0, "above 0"),
            ("warmup", self.warmup, 0 <= self.warmup < 1, "at least 0 and below 1"),
            ("entropy_weight", self.entropy_weight, self.entropy_weight >= 0, "at least 0"),
            ("weight_decay", self.weight_decay, self.weight_decay >= 0, "at least 0"),
            ("dropout", self.dropout, 0 <= self.dropout < 1, "at least 0 and below 1"),
            ("average", self.average, 0 <= self.average < 1, "at least 0 and below 1"),
            ("evaluate_every", self.evaluate_every, self.evaluate_every >= 1, "at least 1"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
        ]
        for name, value, good, rule in checks:
            if not good:
                raise EyasError(f"{name} is {value}; it must be {rule}")
