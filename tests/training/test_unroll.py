"""The unrolled steps equal drafting a chain step by step."""

from __future__ import annotations

import pytest
import torch

from eyas.drafters.eagle import EagleDraft, EagleDrafter
from eyas.drafters.vocabulary import OwnTokens
from eyas.heads.eagle import EagleHead, HeadConfig, head_like
from eyas.noise import SharedNoise
from eyas.policies import chain
from eyas.target import Target
from eyas.training.data import Sample, collate
from eyas.training.features import observe
from eyas.training.unroll import shift, unroll
from eyas.tree import Candidates


@pytest.fixture
def head() -> EagleHead:
    torch.manual_seed(0)
    head = EagleHead(HeadConfig(16, 24, num_attention_heads=4, num_key_value_heads=2, head_dim=4, vocab_size=32)).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def drafted(head: EagleHead, embeddings: torch.Tensor, features: torch.Tensor, root: int, steps: int) -> torch.Tensor:
    """The last guess of a chain whose first pair is ``root``: true features up to it, then the head's own guesses."""
    rows = list(features[:, : root + 1].unbind(1))
    for _ in range(steps):
        known = torch.stack(rows, dim=1)  # [B, root + 1 + step, H]
        n = known.shape[1]
        mask = torch.full((n, n), -torch.inf, dtype=known.dtype).triu(1)[None, None]
        guess = head(embeddings[:, :n], known, torch.arange(n)[None], mask)[:, -1]
        rows.append(guess)
    return rows[-1]


def test_each_step_equals_drafting_a_chain(head: EagleHead) -> None:
    embeddings, features = torch.randn(2, 2, 7, 16, dtype=torch.float64)
    guesses = unroll(head, embeddings, features, steps=4)
    for step, guess in enumerate(guesses, start=1):
        for position in range(step - 1, 7):
            expected = drafted(head, embeddings, features, root=position - step + 1, steps=step)
            torch.testing.assert_close(guess[:, position], expected)


def test_padding_on_the_right_changes_nothing(head: EagleHead) -> None:
    embeddings, features = torch.randn(2, 1, 9, 16, dtype=torch.float64)
    padded = unroll(head, embeddings, features, steps=3)
    alone = unroll(head, embeddings[:, :6], features[:, :6], steps=3)
    for long, short in zip(padded, alone, strict=True):
        torch.testing.assert_close(long[:, :6], short)


def test_every_step_is_finite_from_the_first_position(head: EagleHead) -> None:
    embeddings, features = torch.randn(2, 1, 2, 16, dtype=torch.float64)
    guesses = unroll(head, embeddings, features, steps=4)  # more steps than positions
    sum(guess.sum() for guess in guesses).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in head.parameters())


def test_shift() -> None:
    rows = torch.arange(1, 5)[None]
    assert shift(rows, 0, 1).tolist() == [[1, 2, 3, 4]]
    assert shift(rows, 1, 1).tolist() == [[0, 1, 2, 3]]
    assert shift(rows, 6, 1).tolist() == [[0, 0, 0, 0]]


class Forced(EagleDraft):
    """Drafts given tokens, whatever the head thinks, and remembers the guesses they were asked for."""

    tokens: list[int]
    guesses: list[torch.Tensor]

    def candidates(
        self,
        features: torch.Tensor,
        width: int,
        own: OwnTokens | None = None,
        noise: SharedNoise | None = None,
        level: int = 1,
    ) -> Candidates:
        self.guesses.append(features)
        token = self.tokens[len(self.guesses) - 1]
        return torch.full((1, features.shape[1], width), token), torch.zeros(1, features.shape[1], width)


def test_each_step_equals_the_real_drafter_with_its_cache(target: Target) -> None:
    """Float32, the target's own features; tokens committed in several bites, then a chain drafted from every root."""
    torch.manual_seed(1)
    steps, head = 4, EagleHead(head_like(target.config, None))
    ids = torch.randint(16, (1, 14))
    knowledge = observe(target, collate([Sample(ids[0], torch.ones(14, dtype=torch.bool))], [0]))
    with torch.no_grad():
        trained = unroll(head, target.embed(ids[:, 1:]), knowledge.features[:, :-1], steps)  # each [1, 13, H]
    draft = Forced(target, head.requires_grad_(False))
    for root in range(1, 13 - steps):
        drafter, bite = EagleDrafter(draft, 1), root // 2 + 1
        for start in range(0, root + 1, bite):
            end = min(start + bite, root + 1)
            drafter.commit(ids[:, start : end + 1].tolist(), knowledge.features[:, start:end])
        draft.tokens, draft.guesses = ids[0, root + 2 :].tolist(), []
        drafter.propose(ids[:, root + 1], chain(steps))
        assert len(draft.guesses) == steps
        for step, guess in enumerate(draft.guesses):
            torch.testing.assert_close(trained[step][:, root + step], guess[:, 0], rtol=1e-4, atol=1e-5)
