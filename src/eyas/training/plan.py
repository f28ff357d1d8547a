"""What a run will take, told before it starts: steps, memory, disk."""

from __future__ import annotations

import torch

from eyas.heads.eagle import EagleHead, HeadConfig
from eyas.target import Target
from eyas.training.dataset import Dataset
from eyas.training.features import OBSERVED_ROWS
from eyas.training.losses import CHUNK
from eyas.training.options import TrainOptions
from eyas.training.order import steps
from eyas.training.storage import GIB, feature_bytes

HEAD_BYTES = 20  # a parameter, float32: weight, gradient, two moments of AdamW, running mean
STATE_BYTES = 16  # the same on disk, without the gradient
DRAFT_BYTES = 2  # bfloat16


def make_plan(target: Target, dataset: Dataset, config: HeadConfig, options: TrainOptions) -> list[tuple[str, str]]:
    """Lines of (name, value): parameters, data, optimiser steps, estimates of memory and disk for each process.

    Args:
        config: of the head that will be trained.
    """
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in EagleHead(config).parameters())
    target_bytes = sum(weight.nbytes for weight in target.model.parameters())
    vocabulary = config.draft_vocab_size or config.vocab_size
    features = feature_bytes(target, dataset.samples)
    longest = max(len(sample.ids) for sample in dataset.samples)
    trained = sum(int(sample.written[2:].sum()) for sample in dataset.samples)
    present = sum(len(sample.ids) for sample in dataset.samples)
    # softmax and scores of every step after the first, kept for the backward pass
    attention = (options.steps - 1) * config.num_attention_heads * max(options.batch_tokens, longest) * longest * 8
    layers = (target.layers + 1) * max(options.batch_tokens, longest) * target.hidden_size * target.dtype.itemsize
    logits = 4 * max(4 * CHUNK * vocabulary, 2 * OBSERVED_ROWS * target.vocab_size)
    kept = features <= options.feature_memory * GIB and options.cache_features is None
    state = STATE_BYTES * parameters
    return [
        ("head", f"{parameters:,} parameters, draft vocabulary {vocabulary:,}"),
        ("data", f"{len(dataset.samples):,} conversations, {present:,} tokens, {trained:,} of them trained"),
        ("held out", f"{len(dataset.heldout):,} conversations, {len(dataset.prompts)} of them decoded at an evaluation"),
        ("optimiser steps", f"{sum(1 for _ in steps(dataset.samples, options)):,}" + (
            f", or what {options.minutes:g} minutes allow" if options.minutes else "")),
        ("memory: target", size(target_bytes)),
        ("memory: layers", f"{size(layers)} (the target's hidden states, while it runs)"),
        ("memory: head", f"{size(HEAD_BYTES * parameters)} (weights, gradient, optimiser, running mean)"),
        ("memory: features", size(features) if kept else f"none kept ({size(features)} are computed or read as needed)"),
        ("memory: attention", f"{size(attention)} (scores of the unrolled steps)"),
        ("memory: logits", f"{size(logits)} (one chunk)"),
        ("disk: draft", size(DRAFT_BYTES * parameters)),
        ("disk: state", f"{size(state)}, twice that while it is replaced; gone when the run has finished"),
        ("disk: features", size(features) if options.cache_features is not None else "none"),
    ]  # fmt: skip


def size(count: float) -> str:
    """Bytes in GiB, or MiB where they are few."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
