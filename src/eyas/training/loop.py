"""The training loop: batches in, a draft checkpoint out."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from eyas.checkpoint import check_writable, save_head
from eyas.errors import EyasError
from eyas.heads.eagle import EagleHead, HeadConfig
from eyas.target import end_tokens
from eyas.training.conversations import Conversations
from eyas.training.data import Batch, Sample, batches, to_samples
from eyas.training.evaluate import Report, evaluate
from eyas.training.features import FeatureSource, Knowledge
from eyas.training.losses import draft_loss
from eyas.training.options import TrainOptions
from eyas.training.start import start_from_regression
from eyas.training.unroll import unroll
from eyas.training.vocabulary import draft_vocabulary


def train(
    model: Any,
    tokenizer: Any,
    data: Conversations,
    heldout: Conversations | None,
    options: TrainOptions,
    console: Console | None = None,
    name: str | None = None,
) -> Report | None:
    """Train a draft head for a target and write it to ``options.out``.

    Args:
        model: the target, a transformers causal language model.
        tokenizer: its tokenizer, with a chat template.
        data: conversations to train on.
        heldout: conversations to evaluate on; None: no evaluation, the last weights are kept.
        console: where progress goes; None: standard error.
        name: what to call the target in the checkpoint; None: its configuration's name.

    Returns:
        The kept head's held-out report, or None without held-out data.
    """
    console = console or Console(stderr=True)
    check_writable(options.out)
    check_trainable(model, tokenizer)
    model.eval().requires_grad_(False)
    ends = set(end_tokens(model, tokenizer))
    samples = to_samples(data, tokenizer, ends, options.max_length, "the training data")
    others = to_samples(heldout, tokenizer, ends, options.max_length, "the held-out data") if heldout else []
    trainer = Trainer(model, samples, others, ends, options)
    trainer.target_name = name or trainer.target_name
    console.print(
        f"{len(samples)} conversations, {sum(int(sample.written.sum()) for sample in samples)} trained tokens, "
        f"draft vocabulary {len(trainer.token_map)}"
    )
    return trainer.run(console)


def check_trainable(model: Any, tokenizer: Any) -> None:
    """Refuse what a head would be trained on otherwise than it is used.

    Raises:
        EyasError: no chat template, or a target that scales its embeddings or transforms its logits.
    """
    config, name = model.config.get_text_config(), model.config.name_or_path or type(model).__name__
    if tokenizer is None or not tokenizer.chat_template:
        raise EyasError(f"target {name} has no chat template to tell the assistant's words by; take an instruct model")
    transformed = [key for key in ("logit_scale", "logits_scaling", "final_logit_softcapping") if getattr(config, key, None)]
    if transformed or type(model.get_input_embeddings()) is not torch.nn.Embedding:
        raise EyasError(f"target {name} scales its embeddings or logits; training a draft for it is not supported yet")


def head_like(config: Any, draft_vocab_size: int | None) -> HeadConfig:
    """A head of the target's own shape, from its transformers configuration."""
    return HeadConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        hidden_act=getattr(config, "hidden_act", "silu"),
        rope=dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}),
        max_position_embeddings=config.max_position_embeddings,
        draft_vocab_size=draft_vocab_size,
    )


class Trainer:
    """A head, its optimiser and the frozen parts of the target that it needs."""

    def __init__(
        self, model: Any, samples: Sequence[Sample], heldout: Sequence[Sample], ends: set[int], options: TrainOptions
    ) -> None:
        self.options = options
        self.target_name = model.config.name_or_path or type(model).__name__
        self.samples, self.heldout = samples, heldout
        self.source = FeatureSource(model, samples, options.remember_features)
        self.heldout_source = FeatureSource(model, heldout, remember=True)
        self.embedding: Tensor = model.get_input_embeddings().weight.detach()  # [V, H]
        lm_head: Tensor = model.get_output_embeddings().weight.detach()  # [V, H]
        size = options.draft_vocab_size or len(lm_head)
        self.token_map = draft_vocabulary(samples, size, len(lm_head), ends)  # [D]
        self.rows = lm_head[self.token_map.to(lm_head.device)].clone()  # [D, H]
        torch.manual_seed(options.seed)
        self.head = EagleHead(head_like(model.config.get_text_config(), len(self.token_map))).to(lm_head.device)
        self.average = copy.deepcopy(self.head)
        self.optimiser = torch.optim.AdamW(
            [
                {"params": [p for p in self.head.parameters() if p.ndim > 1], "weight_decay": options.weight_decay},
                {"params": [p for p in self.head.parameters() if p.ndim == 1], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
        )
        self.step_weights = torch.tensor([options.step_decay**step for step in range(options.steps)])
        self.step_weights = self.step_weights.to(lm_head.device)
        self.steps_done = 0

    def run(self, console: Console) -> Report | None:
        """Train to the end and write the best head."""
        options = self.options
        best: Report | None = None
        first = batches(self.samples, options.batch_tokens, random.Random(f"{options.seed} 0"))
        moved = (batch.to(self.embedding.device) for batch in first)
        start_from_regression(self.head, ((batch, self.source(batch)) for batch in moved), self.embedding)
        self.average.load_state_dict(self.head.state_dict())
        columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("training", total=1.0)
            for batch, done in self.schedule():
                loss = self.step(batch, learning_rate(done, options))
                progress.update(task, completed=done, description=f"step {self.steps_done} loss {loss:.3f}")
                if self.steps_done % options.evaluate_every == 0:
                    best = self.keep_best(best, console)
        return self.keep_best(best, console)

    def schedule(self) -> Iterator[tuple[Batch, float]]:
        """Every batch of the run and the share of the run before it, by steps or by time, whichever is further."""
        options, start = self.options, time.monotonic()
        for epoch in range(options.epochs):
            order = list(batches(self.samples, options.batch_tokens, random.Random(f"{options.seed} {epoch}")))
            for place, batch in enumerate(order):
                minutes = (time.monotonic() - start) / 60
                done = max((epoch + place / len(order)) / options.epochs, minutes / options.minutes if options.minutes else 0)
                if done >= 1:
                    return
                yield batch.to(self.embedding.device), done

    def step(self, batch: Batch, rate: float) -> float:
        """One optimiser step; returns the loss."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        loss = self.loss(batch, self.source(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.options.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.steps_done += 1
        decay = min(self.options.average, self.steps_done / (self.steps_done + 10))
        with torch.no_grad():
            for mean, current in zip(self.average.parameters(), self.head.parameters(), strict=True):
                mean.lerp_(current, 1 - decay)
        return float(loss.detach())

    def loss(self, batch: Batch, knowledge: Knowledge) -> Tensor:
        """The loss of one batch."""
        options, n = self.options, batch.supervised.shape[1]
        inputs = knowledge.features[:, :n]  # [B, n, H]; pair i reads f[i]
        if options.noise:
            inputs = inputs + (torch.rand_like(inputs) - 0.5) * (options.noise * 512 / batch.ids.shape[1])
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.dtype != torch.float32):
            guesses = unroll(self.head, self.embedding[batch.ids[:, 1 : n + 1]], inputs, options.steps, options.dropout)
        chosen = torch.stack([guess[batch.supervised] for guess in guesses]).float()  # [K, N, H]
        after = batch.supervised  # pair i imitates f[i + 1]
        features = knowledge.features[:, 1 : n + 1][after].float()  # [N, H]
        log_mass = knowledge.log_mass[:, 1 : n + 1][after]  # [N]
        return draft_loss(
            chosen, features, log_mass, self.rows, options.entropy_weight, self.step_weights, options.feature_weight
        )

    def evaluate(self) -> Report:
        """Measure the averaged head on the held-out conversations."""
        moved = (batch.to(self.embedding.device) for batch in batches(self.heldout, self.options.batch_tokens))
        observed = ((batch, self.heldout_source(batch)) for batch in moved)
        return evaluate(self.average, observed, self.embedding, self.rows, self.token_map)

    def keep_best(self, best: Report | None, console: Console) -> Report | None:
        """Evaluate, and write the head if it is the best so far."""
        report = self.evaluate() if self.heldout else None
        if report is not None:
            console.print(f"step {self.steps_done}: {report}")
        if report is None or best is None or report.tree > best.tree:
            save_head(self.average, self.options.out, self.token_map, {"eyas": {"target": self.target_name}})
            return report
        return best


def learning_rate(done: float, options: TrainOptions) -> float:
    """The rate when the share ``done`` of the run is over: a linear rise, then a cosine to a twentieth."""
    if done < options.warmup:
        return options.learning_rate * max(done / options.warmup, 0.01)
    fall = (done - options.warmup) / (1 - options.warmup)
    return options.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * fall)))
