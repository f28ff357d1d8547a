"""A reduced draft vocabulary and the tokens of a row's own text: what may be proposed, how likely, for which row."""

from __future__ import annotations

import pytest
import torch

from eyas.drafters.eagle import EagleDraft
from eyas.drafters.vocabulary import OwnVocabulary
from eyas.engine import Engine
from eyas.statistics import Statistics
from tests.drafts import engine, random_draft, run, trained_head
from tests.families import VOCABULARY

KNOWN = [2, 3, 11, 40]


def vocabulary(*texts: list[int], limit: int = 9) -> OwnVocabulary:
    own = OwnVocabulary(engine("llama").target.head, frozenset(KNOWN), len(texts), limit)
    own.add(list(texts), [0] * len(texts))
    return own


def open_tokens(own: OwnVocabulary) -> list[set[int]]:
    """What each row may propose besides."""
    gathered = own.gather()
    if gathered is None:
        return [set() for _ in own.first]
    return [
        {token for token, closed in zip(gathered.tokens.tolist(), row[0], strict=True) if closed == 0}
        for row in gathered.closed.tolist()
    ]


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # gemma2 caps its logits: a closed token must stay closed
def test_candidates_are_the_full_vocabularys_where_open(name: str) -> None:
    """Brute force: the target's logits over known and own tokens, renormalised, row for row."""
    target = engine(name).target
    draft = random_draft(target, token_map=torch.tensor(KNOWN), draft_vocab_size=len(KNOWN))
    own = OwnVocabulary(target.head, draft.known, 2, 9)
    own.add([[5, 2, 7], [9]], [0, 0])
    features = torch.randn(2, 3, target.hidden_size, generator=torch.Generator().manual_seed(1))
    tokens, values = draft.candidates(features, 6, own.gather())
    for row, allowed in enumerate(([*KNOWN, 5, 7], [*KNOWN, 9])):
        shut = torch.ones(target.vocab_size, dtype=torch.bool).index_fill_(0, torch.tensor(allowed), False)
        expected = target.score(features[row]).float().masked_fill(shut, -torch.inf).log_softmax(dim=-1).topk(6)
        real = expected.values.isfinite()
        torch.testing.assert_close(values[row], expected.values, rtol=1e-5, atol=1e-5)
        assert torch.equal(tokens[row][real], expected.indices[real])


def test_only_tokens_outside_the_draft_vocabulary_are_kept() -> None:
    own = vocabulary([2, 5, 3, 5, 7], [11, 40])
    assert own.first == [{5: 1, 7: 4}, {}] and open_tokens(own) == [{5, 7}, set()]
    assert vocabulary([2, 3]).gather() is None


def test_of_too_many_the_latest_stay() -> None:
    assert open_tokens(vocabulary([4, 5, 6, 7, 5], limit=2)) == [{6, 7}]
    assert open_tokens(vocabulary([4, 5], limit=0)) == [set()]


def test_rows_move_with_what_they_know() -> None:
    own = vocabulary([4, 5], [6, 7, 8], [9])
    part = own.take([1], [2])
    assert open_tokens(part) == [{6, 7}]
    part.add([[7, 10]], [1])
    own.put([0], part)
    assert open_tokens(own) == [{6, 7, 10}, {6, 7, 8}, {9}]
    own.select([0, 2])
    own.truncate([1, 1])
    assert own.first == [{6: 0}, {9: 0}]


def test_gathered_again_only_for_a_new_token() -> None:
    own = vocabulary([4, 5])
    before = own.gather()
    own.add([[5, 2]], [2])
    assert own.gather() is before
    own.add([[6]], [4])
    assert own.gather() is not before


def test_own_tokens_raise_acceptance_and_change_no_token() -> None:
    """A draft that may not say what the target repeats is rejected there; with the text's own tokens it says it."""
    target = engine("llama").target
    prompts = [[7, 9, 1], [30, 31, 32]]
    plain = [request.ids for request in run(engine("llama"), prompts, "autoregressive", max_new_tokens=40)]
    frequent = torch.tensor(sorted({*range(VOCABULARY)} - {token for ids in plain for token in ids[:20]}))
    taus = []
    for own_tokens in (0, 1024):
        draft = EagleDraft(target, trained_head("llama"), frequent, own_tokens=own_tokens)
        requests = run(Engine(target, draft), prompts, "eagle2", max_new_tokens=40)
        assert [request.ids for request in requests] == plain
        together = Statistics()
        for request in requests:
            together.delivered += request.statistics.delivered
        taus.append(together.tau)
    assert taus[0] is not None and taus[1] is not None and taus[1] > taus[0]
