"""The knobs of training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas.errors import EyasError

STARTS = ("regression", "last-layer", "random")
LOSSES = ("published", "distribution", "top-k")
SCHEDULES = ("cosine", "linear")
DRAFT_VOCABULARY = 12288
"""Tokens a head may propose where nothing else is said and the target has more."""


@dataclass(frozen=True)
class TrainOptions:
    """What to train on, for how long and how.

    Attributes:
        out: folder of the draft checkpoint.
        epochs: passes over the data at most.
        minutes: time limit; the learning rate reaches its end by then. None: no limit.
        draft_vocab_size: most frequent tokens the head may propose; 0: the whole vocabulary; None: DRAFT_VOCABULARY of them,
            or all where the target has fewer.
        max_length: conversations are cut to this many tokens.
        batch_tokens: padded tokens a micro-batch.
        accumulate: micro-batches an optimiser step, all processes together.
        steps: draft steps unrolled.
        step_decay: weight of each step's loss relative to the one before.
        loss: ``"published"`` (feature regression and cross-entropy), ``"distribution"`` (cross-entropy alone), or ``"top-k"``
            (published, and the cross-entropy's part over the target's k best tokens, as HASS has it).
        entropy_weight: weight of the published loss's cross-entropy (published 0.1).
        feature_weight: weight of the feature regression (published 1).
        top_k: k of the top-k loss (HASS: 10).
        top_k_weight: its weight (HASS: 1).
        distill_temperature: of the target's distribution that is learnt; below 1 it is sharpened, for greedy decoding.
        start: where the weights come from: ``"regression"`` (least squares for ``fc``), ``"last-layer"`` (the same, and a copy
            of the target's last layer) or ``"random"``.
        from_draft: a draft checkpoint to train further, in place of ``start``; its draft vocabulary stays.
        learning_rate: peak; then it falls to a twentieth.
        schedule: how it falls, along a ``"cosine"`` or ``"linear"``.
        warmup: share of the run in which it rises.
        weight_decay: AdamW's, on matrices only.
        clip: largest norm of the gradient.
        noise: width of the uniform noise on the features, times 512 / length (published 0.2).
        dropout: on what attention and feed-forward add to the residual.
        average: decay of the running mean of the weights that is evaluated and kept; 0: the weights themselves.
        feature_memory: GiB of memory that the target's features may take; if they take more they are computed every time.
        cache_features: folder to keep the target's features in instead; None: none.
        evaluate_every: optimiser steps between evaluations.
        eval_prompts: held-out conversations decoded at each; 0: none.
        eval_tokens: new tokens each of them gets at most.
        save_every: optimiser steps between saved states of the run.
        resume: None: continue the unfinished run in ``out``, if there is one; True: the same, and say so if there is none;
            False: start anew.
        seed: of initial weights, order, noise and dropout.
    """

    out: Path
    epochs: int = 10
    minutes: float | None = None
    draft_vocab_size: int | None = None
    max_length: int = 2048
    batch_tokens: int = 2048
    accumulate: int = 1
    steps: int = 3
    step_decay: float = 0.8
    loss: str = "published"
    entropy_weight: float = 0.1
    feature_weight: float = 1.0
    top_k: int = 10
    top_k_weight: float = 1.0
    distill_temperature: float = 1.0
    start: str = "regression"
    from_draft: str | None = None
    learning_rate: float = 1e-3
    schedule: str = "cosine"
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 0.5
    noise: float = 0.2
    dropout: float = 0.0
    average: float = 0.0
    feature_memory: float = 8.0
    cache_features: Path | None = None
    evaluate_every: int = 500
    eval_prompts: int = 8
    eval_tokens: int = 64
    save_every: int = 500
    resume: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        checks: list[tuple[str, object, bool, str]] = [
            ("epochs", self.epochs, self.epochs >= 1, "at least 1"),
            ("minutes", self.minutes, self.minutes is None or self.minutes > 0, "above 0"),
            ("draft_vocab", self.draft_vocab_size, (self.draft_vocab_size or 0) >= 0, "at least 0"),
            ("batch_tokens", self.batch_tokens, self.batch_tokens >= 1, "at least 1"),
            ("accumulate", self.accumulate, self.accumulate >= 1, "at least 1"),
            ("max_length", self.max_length, self.max_length >= 3, "at least 3"),
            ("unroll", self.steps, self.steps >= 1, "at least 1"),
            ("step_decay", self.step_decay, self.step_decay > 0, "above 0"),
            ("loss", self.loss, self.loss in LOSSES, f"one of {', '.join(LOSSES)}"),
            ("start", self.start, self.start in STARTS, f"one of {', '.join(STARTS)}"),
            ("schedule", self.schedule, self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
            ("top_k", self.top_k, self.top_k >= 1, "at least 1"),
            ("top_k_weight", self.top_k_weight, self.top_k_weight > 0, "above 0"),
            ("distill_temperature", self.distill_temperature, self.distill_temperature > 0, "above 0"),
            ("learning_rate", self.learning_rate, self.learning_rate > 0, "above 0"),
            ("warmup", self.warmup, 0 <= self.warmup < 1, "at least 0 and below 1"),
            ("entropy_weight", self.entropy_weight, self.entropy_weight >= 0, "at least 0"),
            ("feature_weight", self.feature_weight, self.feature_weight >= 0, "at least 0"),
            ("weight_decay", self.weight_decay, self.weight_decay >= 0, "at least 0"),
            ("clip", self.clip, self.clip > 0, "above 0"),
            ("noise", self.noise, self.noise >= 0, "at least 0"),
            ("dropout", self.dropout, 0 <= self.dropout < 1, "at least 0 and below 1"),
            ("average", self.average, 0 <= self.average < 1, "at least 0 and below 1"),
            ("feature_memory", self.feature_memory, self.feature_memory >= 0, "at least 0"),
            ("eval_every", self.evaluate_every, self.evaluate_every >= 1, "at least 1"),
            ("eval_prompts", self.eval_prompts, self.eval_prompts >= 0, "at least 0"),
            ("eval_tokens", self.eval_tokens, self.eval_tokens >= 2, "at least 2"),
            ("save_every", self.save_every, self.save_every >= 1, "at least 1"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
        ]
        for name, value, good, rule in checks:
            if not good:
                raise EyasError(f"{name} is {value}; it must be {rule}")
        if self.from_draft is not None and self.start != "regression":
            raise EyasError(f"start is {self.start}, but the weights come from {self.from_draft}; leave out --start or --from")
