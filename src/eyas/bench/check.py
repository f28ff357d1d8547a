"""The audit of a target with its draft: is decoding with it lossless here, on the user's own prompts?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eyas.bench.measure import first_difference, log_margin
from eyas.bench.methods import NEUTRAL
from eyas.engine import Engine
from eyas.loading import fastest_cpu_dtype

SAMPLES = 200  # short continuations a side
SHORT = 3  # their tokens
LEVEL = 0.001  # a false alarm in a thousand audits


@dataclass(frozen=True)
class Finding:
    """One part of the audit.

    Attributes:
        what: what was tested.
        passed: whether it held.
        detail: figures.
    """

    what: str
    passed: bool
    detail: str


def audit_dtypes() -> list[str]:
    """The dtypes to audit in: float32, where greedy tokens must be equal, and what ``auto`` takes here."""
    return ["float32", "auto"] if fastest_cpu_dtype() != torch.float32 or torch.accelerator.is_available() else ["float32"]


def audit(engine: Engine, prompts: Sequence[list[int]], method: str, max_new_tokens: int, seed: int = 0) -> list[Finding]:
    """Greedy equality in the engine's dtype (exact in float32; elsewhere partings must be near-ties), and sampling."""
    return [greedy(engine, prompts, method, max_new_tokens), sampled(engine, prompts[0], method, seed)]


def greedy(engine: Engine, prompts: Sequence[list[int]], method: str, max_new_tokens: int) -> Finding:
    """Every prompt by the method and plainly; where they part, the target's own margin tells a near-tie from a fault."""
    exact = engine.target.dtype in (torch.float32, torch.float64)
    parted: list[tuple[float, float]] = []  # margin, tolerance
    short = 0
    for ids in prompts:
        bare = {**NEUTRAL, "temperature": 0.0, "max_new_tokens": max_new_tokens}  # margins are those of raw logits
        ours = said(engine, ids, method=method, **bare)
        plain = said(engine, ids, method="autoregressive", **bare)
        place = first_difference(ours, plain)
        if place is None:
            continue
        if place == min(len(ours), len(plain)):
            short += 1
        else:
            parted.append(log_margin(engine, ids, plain[:place], plain[place], ours[place]))
    name = f"greedy, {engine.target.precision}, {method}"
    detail = f"{len(prompts) - len(parted) - short} of {len(prompts)} prompts equal plain decoding"
    if parted:
        detail += f"; the others part at margins up to {max(abs(margin) for margin, _ in parted):.3g}"
    near = not exact and all(abs(margin) <= tolerance for margin, tolerance in parted)
    return Finding(name, not short and (near or not parted), detail)


def said(engine: Engine, ids: list[int], **options: Any) -> list[int]:
    """New tokens after a prompt; Ctrl-C ends the audit, not just the answer."""
    result = engine.generate(ids, **options)
    if result.finish_reason == "interrupted":
        raise KeyboardInterrupt
    return result.token_ids


def sampled(engine: Engine, ids: list[int], method: str, seed: int) -> Finding:
    """Short continuations at temperature 1 by both ways, with different seeds: are the two samples of one distribution?

    A permutation test of the chi-square statistic over whole continuations; rare ones are pooled.
    """
    ours, plain = (
        [
            tuple(said(engine, ids, method=way, temperature=1.0, max_new_tokens=SHORT, seed=first + number))
            for number in range(SAMPLES)
        ]
        for way, first in ((method, seed), ("autoregressive", seed + SAMPLES))
    )
    chance = two_sample(ours, plain, seed)
    detail = f"two-sample test of {SAMPLES} continuations of {SHORT} tokens each way: p = {chance:.3f}"
    return Finding(f"temperature 1, {method}", chance >= LEVEL, detail)


def two_sample(ours: Sequence[tuple[int, ...]], theirs: Sequence[tuple[int, ...]], seed: int, rounds: int = 2000) -> float:
    """Permutation p-value that two samples of token tuples come from one distribution."""
    generator = torch.Generator().manual_seed(seed)
    pooled = [*ours, *theirs]
    counts = Counter(pooled)
    frequent = [text for text, count in counts.most_common() if count >= 5]
    first: Counter[int] = Counter(text[0] for text in pooled)
    places = {text: place for place, text in enumerate(frequent)}
    tokens = {token: len(frequent) + place for place, (token, count) in enumerate(first.items()) if count >= 5}
    rest = len(frequent) + len(first)
    classes = torch.tensor([places.get(text, tokens.get(text[0], rest)) for text in pooled])
    labels = torch.tensor([1.0] * len(ours) + [0.0] * len(theirs))
    totals = torch.bincount(classes).float()

    def statistic(labels: torch.Tensor) -> float:
        seen = torch.bincount(classes, weights=labels, minlength=len(totals))
        expected = totals * labels.mean()
        return float(((seen - expected) ** 2 / expected.clamp_min(1e-9)).sum())

    observed = statistic(labels)
    beaten = sum(statistic(labels[torch.randperm(len(labels), generator=generator)]) >= observed - 1e-9 for _ in range(rounds))
    return (beaten + 1) / (rounds + 1)
