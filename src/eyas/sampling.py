"""The user's sampling options as the target's choice at a tree's nodes; transformers' own logits processors do the work.

Every node is judged with the prefix that leads to it: the committed tokens and its branch. The same processors in the same
order as in transformers' ``generate`` see float32 logits [1, V] and that prefix, so plain and tree decoding cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eyas.errors import EyasError
from eyas.noise import Noise, SharedNoise, numbers, race
from eyas.transfer import upload
from eyas.tree import DraftTree


@dataclass(frozen=True)
class SamplingOptions:
    """How the target chooses a token. The defaults are greedy decoding of the raw logits.

    Attributes:
        temperature: 0 takes the most likely token; above (from 1e-30: less overflows), tokens are drawn from
            softmax(logits / temperature).
        top_k: keep the k most likely tokens; None or 0: all.
        top_p: keep the smallest set of tokens with this probability, in (0, 1].
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        repetition_penalty: divides (multiplies, if negative) the logits of every token seen, prompt included; 1: off.
        frequency_penalty: subtracted from a token's logit for each time it was generated.
        presence_penalty: subtracted from the logit of every token generated at least once.
        logit_bias: added to the logits of these token ids; −inf forbids one.
        min_new_tokens: end tokens are forbidden before this many new tokens.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        checks: list[tuple[str, Any, bool, str]] = [
            (
                "temperature",
                self.temperature,
                self.temperature == 0 or self.temperature >= 1e-30,
                "0, or at least 1e-30",
            ),
            ("top_k", self.top_k, self.top_k is None or _count(self.top_k), "a whole number, at least 1, or 0 for all"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0"),
            ("frequency_penalty", self.frequency_penalty, True, "finite"),
            ("presence_penalty", self.presence_penalty, True, "finite"),
            ("min_new_tokens", self.min_new_tokens, _count(self.min_new_tokens), "a whole number, at least 0"),
        ]
        for name, value, good, rule in checks:
            if not good or (value is not None and not math.isfinite(value)):
                raise EyasError(f"{name} is {value}; it must be {rule}")
        for token, bias in (self.logit_bias or {}).items():
            if not bias < math.inf:
                raise EyasError(f"logit_bias of token {token} is {bias}; it must be a number, or -inf to forbid the token")

    @classmethod
    def from_defaults(cls, generation_config: Any, **given: Any) -> SamplingOptions:
        """The given options; those left None fall back to the model's own ``generation_config``.

        (transformers' ``generate`` also fills in top_k 50 when sampling where nobody says anything; Eyas does not.)
        """
        defaults = {
            field.name: getattr(generation_config, field.name, None)
            for field in fields(cls)
            if field.name not in ("temperature", "logit_bias")
        }
        if getattr(generation_config, "do_sample", False):
            defaults["temperature"] = getattr(generation_config, "temperature", None) or 1.0
        options = {name: value for name, value in defaults.items() if value is not None}
        options.update({name: value for name, value in given.items() if value is not None})
        return cls(**options)


def _count(value: Any) -> bool:
    """A whole number, at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


UNSUPPORTED = {  # settings of a generation_config that change what ``generate`` says, with the values that do not
    "no_repeat_ngram_size": (0,), "bad_words_ids": (), "suppress_tokens": ([],), "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,),
    "top_h": (), "guidance_scale": (1, 1.0), "min_length": (0,), "sequence_bias": ({},), "stop_strings": ([],),
    "exponential_decay_length_penalty": (), "watermarking_config": (), "penalty_alpha": (0,), "num_beams": (1,),
}  # fmt: skip


def unsupported_settings(generation_config: Any) -> list[str]:
    """What a model's ``generation_config`` asks for and Eyas does not do, as ``name=value``."""
    asked = {name: getattr(generation_config, name, None) for name in UNSUPPORTED}
    return [f"{name}={value}" for name, value in asked.items() if value is not None and value not in UNSUPPORTED[name]]


class OccurrencePenalty(LogitsProcessor):
    """OpenAI's frequency and presence penalties over the generated tokens, which transformers lacks."""

    def __init__(self, prompt_length: int, frequency: float, presence: float) -> None:
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        generated = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


def processors(
    options: SamplingOptions, prompt_length: int, eos_ids: Iterable[int], device: torch.device
) -> LogitsProcessorList:
    """transformers' processors for one request, in ``generate``'s order: penalties first, then warpers if sampling."""
    chain = LogitsProcessorList()
    if options.logit_bias:
        bias = [[[int(token)], float(value)] for token, value in options.logit_bias.items()]
        chain.append(SequenceBiasLogitsProcessor(bias))
    if options.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty)))
    if options.frequency_penalty or options.presence_penalty:
        chain.append(OccurrencePenalty(prompt_length, options.frequency_penalty, options.presence_penalty))
    ends = sorted(eos_ids)
    if options.min_new_tokens and ends:
        chain.append(MinNewTokensLengthLogitsProcessor(prompt_length, options.min_new_tokens, ends, device=str(device)))
    if options.temperature > 0:
        if options.temperature != 1.0:
            chain.append(TemperatureLogitsWarper(float(options.temperature)))
        if options.top_k:
            chain.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1.0:
            chain.append(TopPLogitsWarper(options.top_p))
        if options.min_p > 0.0:
            chain.append(MinPLogitsWarper(options.min_p))
    return chain


@dataclass(frozen=True)
class Rule:
    """One request's decoding rule.

    Attributes:
        options: how tokens are chosen.
        chain: the processors; empty for plain greedy decoding and for plain sampling at temperature 1.
        noise: the request's random numbers.
    """

    options: SamplingOptions
    chain: LogitsProcessorList
    noise: Noise

    @property
    def plain(self) -> bool:
        """Whether a node's own logits are all it takes: no processor but the temperature."""
        return all(isinstance(processor, TemperatureLogitsWarper) for processor in self.chain)

    def choose(self, logits: Tensor, prefix: Callable[[], Tensor], emitted: int) -> Tensor:
        """The target's choice after one node.

        Args:
            logits: [V], as the model returned them.
            prefix: gives the ids [1, length] up to and including that node; called only if a processor needs them.
            emitted: new tokens of the request before the one chosen here.

        Returns:
            A token id, [] int64.
        """
        scores = logits.float()[None]  # [1, V]
        if self.chain:
            scores = self.chain(prefix(), scores)
        if self.options.temperature == 0:
            return scores[0].argmax()
        return race(scores[0].softmax(dim=-1), self.noise(emitted, scores.shape[1]).to(scores.device, non_blocking=True))


def chooser(
    rules: list[Rule], logits: Tensor, tree: DraftTree, histories: list[list[int]], emitted: list[int]
) -> Callable[[Tensor, Tensor], Tensor]:
    """The rules of a batch as the ``choose`` of `eyas.accept.walk`.

    Args:
        rules: one for each row.
        logits: [B, n, V] of the verified tree.
        tree: that tree.
        histories: each row's tokens before the root.
        emitted: how many new tokens each row has emitted, the root included.
    """
    rows = torch.arange(len(rules), device=logits.device)
    plain = all(rule.plain for rule in rules)
    temperatures = [float(rule.options.temperature) for rule in rules]

    def choose(nodes: Tensor, path: Tensor) -> Tensor:
        visited = logits[rows, nodes]  # [B, V]
        if plain:  # as `Rule.choose`, all rows at once
            greedy = visited.float().argmax(dim=-1)  # half precision would take longer
            if not any(temperatures):
                return greedy
            warmth = upload([temperature or 1.0 for temperature in temperatures], logits.device)[:, None]  # [B, 1]
            samples = upload([temperature > 0 for temperature in temperatures], logits.device)  # [B]
            positions = [count + path.shape[1] - 1 for count in emitted]
            shown = numbers([rule.noise for rule in rules], temperatures, positions, visited.shape[1], logits.device)
            drawn = race((visited.float() / warmth).softmax(dim=-1), shown)
            return torch.where(samples, drawn, greedy)
        branch = tree.tokens.gather(1, path)  # [B, depth + 1], the root first
        depth = path.shape[1] - 1

        def prefix(row: int) -> Tensor:
            history = upload(histories[row], logits.device, torch.int64)
            return torch.cat([history, branch[row]])[None]

        return torch.stack(
            [
                rule.choose(visited[row], lambda row=row: prefix(row), emitted[row] + depth)  # type: ignore[misc]
                for row, rule in enumerate(rules)
            ]
        )

    return choose


def shared_noise(rules: list[Rule], emitted: list[int], size: int) -> SharedNoise | None:
    """What drafting may know of a step's draws; None: nothing is drawn. Arguments as `chooser`; ``size``: of the vocabulary."""
    temperatures = [float(rule.options.temperature) for rule in rules]
    return SharedNoise([rule.noise for rule in rules], temperatures, emitted, size) if any(temperatures) else None
