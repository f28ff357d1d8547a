"""Drafts for tests: an oracle that knows the answer, and EAGLE heads that are random, trained a little, or broken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.cache import RowCache
from eyas.decode import Request, Session, decode
from eyas.drafters.eagle import EagleDraft, EagleDrafter
from eyas.engine import Engine
from eyas.heads.eagle import EagleHead, HeadConfig
from eyas.noise import SharedNoise
from eyas.target import Target
from eyas.tree import Candidates, DraftTree, GrowthPolicy, TreePolicy, grow
from tests import families

METHODS: dict[str, dict[str, int]] = {
    "eagle2": {"tokens": 12, "depth": 4, "width": 3},
    "eagle1": {},
    "chain": {"depth": 4},
    "autoregressive": {},
}
"""Every method, with the settings to test it in."""


@cache
def engine(name: str) -> Engine:
    """A family's model with a random draft; shared by all tests, so none may change it."""
    target = Target(families.model(name), name=name)
    return Engine(target, random_draft(target))


def run(engine: Engine, prompts: Sequence[Sequence[int]], method: str, session: Session | None = None, **options: Any) -> Any:
    """Decode a batch by a method, in a session of one's own if given; returns its requests."""
    job = engine.prepare(prompts, method=method, **METHODS[method], **options)
    return finish(engine, job.requests, session or job.session, job.policy)


def finish(engine: Engine, requests: list[Request], session: Session, policy: TreePolicy | None) -> list[Request]:
    """Run requests to their end."""
    for _ in decode(engine.target, session, policy, requests):
        pass
    return requests


def assert_rows(cache: RowCache, row: int, fresh: RowCache, count: int) -> None:
    """The first rows of every layer are those of a fresh cache."""
    assert cache.lengths[row] == fresh.lengths[0] == count
    for kept, true in zip(cache.layers, fresh.layers, strict=True):
        for states, expected in ((kept.keys, true.keys), (kept.values, true.values)):
            scale = max(expected.abs().max().item(), 1.0)
            torch.testing.assert_close(states[row, :, :count], expected[0, :, :count], atol=1e-5 * scale, rtol=0)


def assert_committed(target: Target, session: Session, texts: list[list[int]]) -> None:
    """Target and draft hold, row for row, what a fresh run over the committed tokens gives: a text but for its last."""
    for row, seen in enumerate(session.seen):
        (root,) = {text[-1] for text in texts if text[:-1] == seen}
        fresh = target.new_cache(1)
        features, _ = target.prefill(fresh, [seen])
        assert_rows(session.cache, row, fresh, len(seen))
        drafter = session.drafter
        if isinstance(drafter, EagleDrafter):
            true = EagleDrafter(drafter.draft, 1)
            true.commit([[*seen, root]], features)
            with torch.inference_mode():
                true.catch_up()
                drafter.catch_up()
            assert drafter.own.first[row] == true.own.first[0]
            text = drafter.texts[row]
            assert text.ids[: text.length].tolist() == [*seen, root] and text.committed == len(seen)
            assert_rows(drafter.cache, row, true.cache, len(seen))
            scale = max(true.guess.abs().max().item(), 1.0)
            torch.testing.assert_close(drafter.guess[row], true.guess[0], atol=1e-4 * scale, rtol=0)


class OracleDrafter:
    """Replays known texts, each with wrong siblings: forces long accepts.

    The candidates of every node at depth d are the right token of that depth and wrong ones, so wrong branches carry the right
    tokens too. Every third position ranks the right token second, every seventh has it not at all.

    Args:
        texts: prompt and continuation of each row of the batch.
        vocabulary: of the target.
        perfect: always rank the right token first.
    """

    def __init__(self, texts: Sequence[Sequence[int]], vocabulary: int, perfect: bool = False) -> None:
        self.texts = [list(text) for text in texts]
        self.vocabulary, self.perfect = vocabulary, perfect
        self.lengths = [0] * len(texts)  # committed pairs = index of the root

    def commit(self, tokens: list[list[int]], features: Tensor) -> None:
        counts = [len(row) - 1 for row in tokens]
        assert features.shape[:2] == (len(tokens), max(counts)) and min(counts) >= 1
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def catch_up(self) -> None:
        pass

    def candidates(self, row: int, place: int, width: int) -> list[int]:
        """Tokens for position ``place`` of a row's text, best first."""
        text = self.texts[row]
        right = text[place] if place < len(text) else 0
        wrong = [(right + 1 + rank) % self.vocabulary for rank in range(width)]
        if self.perfect or place % 3:
            return [right, *wrong][:width] if self.perfect or place % 7 else wrong
        return [wrong[0], right, *wrong[1:]][:width]

    def propose(self, roots: Tensor, policy: GrowthPolicy, noise: SharedNoise | None = None) -> DraftTree:
        level = 0

        def draft(tokens: Tensor, slots: Tensor, lines: Tensor, width: int) -> Candidates:
            nonlocal level
            level += 1
            rows = [self.candidates(row, length + level, width) for row, length in enumerate(self.lengths)]
            scores = torch.tensor([math.log(0.6 * 0.3**rank) for rank in range(width)])
            shape = (*tokens.shape, width)
            return torch.tensor(rows)[:, None].expand(shape), scores.expand(shape)

        def first(width: int) -> Candidates:
            return draft(roots[:, None], roots[:, None], roots[:, None], width)

        return grow(policy, roots, first, draft)

    def select(self, rows: list[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        self.texts = [self.texts[row] for row in rows]

    def truncate(self, lengths: list[int]) -> None:
        self.lengths = [min(pair) for pair in zip(self.lengths, lengths, strict=True)]


class GuidedDrafter(EagleDrafter):
    """An EAGLE drafter that drafts and commits as always, but proposes an oracle's trees: long accepts, real draft rows."""

    def __init__(self, draft: EagleDraft, texts: Sequence[Sequence[int]], perfect: bool = False) -> None:
        super().__init__(draft, len(texts))
        self.oracle = OracleDrafter(texts, draft.target.vocab_size, perfect)

    def commit(self, tokens: list[list[int]], features: Tensor) -> None:
        super().commit(tokens, features)
        self.oracle.commit(tokens, features)

    def propose(self, roots: Tensor, policy: GrowthPolicy, noise: SharedNoise | None = None) -> DraftTree:
        super().propose(roots, policy, noise)
        return self.oracle.propose(roots, policy)

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.oracle.select(rows)

    def take(self, rows: list[int], lengths: list[int]) -> EagleDrafter:
        raise NotImplementedError("tests do not refill guided rows")

    def truncate(self, lengths: list[int]) -> None:
        super().truncate(lengths)
        self.oracle.truncate(lengths)


def oracle_session(target: Target, texts: Sequence[Sequence[int]], perfect: bool = False) -> Session:
    """An empty session whose drafter knows the texts."""
    drafter = OracleDrafter(texts, target.vocab_size, perfect)
    return Session(target.new_cache(len(texts)), drafter, [[] for _ in texts])


def head_config(target: Target, **changes: object) -> HeadConfig:
    """A small head for a target."""
    sizes = {
        "hidden_size": target.hidden_size, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": target.vocab_size,
    }  # fmt: skip
    return HeadConfig(**{**sizes, **changes})  # type: ignore[arg-type]


def random_head(config: HeadConfig, seed: int = 0) -> EagleHead:
    """A head of random weights, none of them trivial."""
    head = EagleHead(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return head.eval().requires_grad_(False)


def random_draft(target: Target, seed: int = 0, token_map: Tensor | None = None, **changes: object) -> EagleDraft:
    """A draft that is hardly ever right: forces rejections."""
    return EagleDraft(target, random_head(head_config(target, **changes), seed), token_map)


@cache
def trained_head(name: str) -> EagleHead:
    """A head trained for seconds on what the family's model says: a bit of everything."""
    target = Target(families.model(name))
    head = random_head(head_config(target)).requires_grad_(True)
    starts = torch.tensor([[token] for token in range(target.vocab_size)])
    model = target.model
    texts = model.generate(starts, attention_mask=torch.ones_like(starts), do_sample=False, max_new_tokens=24, pad_token_id=0)
    with torch.no_grad():
        output = model(texts, output_hidden_states=True)
        features, answers = output.hidden_states[-1], output.logits.argmax(dim=-1)
        embeddings = target.embed(texts)
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-3)
    positions = torch.arange(texts.shape[1] - 1).expand(len(texts), -1)
    for _ in range(80):
        guesses = head(embeddings[:, 1:], features[:, :-1], positions)
        loss = F.cross_entropy(target.score(guesses).flatten(0, 1), answers[:, 1:].flatten())
        loss = loss + F.smooth_l1_loss(guesses, features[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head.requires_grad_(False)


def trained_draft(target: Target, name: str) -> EagleDraft:
    """A draft that is right now and then."""
    return EagleDraft(target, trained_head(name))


def broken_draft(target: Target, value: float) -> EagleDraft:
    """A draft whose every weight is one number: 0, NaN, or a huge one."""
    head = EagleHead(head_config(target))
    for parameter in head.parameters():
        torch.nn.init.constant_(parameter, value)
    return EagleDraft(target, head.requires_grad_(False))


class Recorder(EagleDrafter):
    """Remembers the trees it proposes."""

    trees: list[DraftTree]

    def propose(self, roots: Tensor, policy: GrowthPolicy, noise: SharedNoise | None = None) -> DraftTree:
        tree = super().propose(roots, policy, noise)
        self.trees = [*getattr(self, "trees", []), tree]
        return tree
