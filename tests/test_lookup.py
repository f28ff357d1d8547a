"""Prompt lookup: against a search of every place, and texts that grow, shrink and part."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from eyas.lookup import LONGEST, KnownText
from tests.helpers import properties

texts = st.lists(st.integers(0, 2), max_size=60)


def searched(text: Sequence[int], count: int) -> tuple[int, list[int]]:
    """The longest suffix that ends somewhere before, its latest place, and what follows there, round and round."""
    best, place = 0, 0
    for end in range(1, len(text)):
        shared = 0
        while shared < min(end, LONGEST) and text[end - 1 - shared] == text[-1 - shared]:
            shared += 1
        if shared and shared >= best:
            best, place = shared, end
    period = len(text) - place
    return best, [text[place + step % period] for step in range(count)] if best else []


def found(text: KnownText, count: int) -> tuple[int, list[int]]:
    continuation = text.continuation(count)
    return continuation.matched, continuation.tokens.tolist()


@properties
@given(texts, st.integers(0, 9))
def test_the_longest_suffix_and_its_latest_place(text: list[int], count: int) -> None:
    known = KnownText()
    known.commit([*text, 1])
    assert found(known, count) == searched([*text, 1], count)


def test_a_text_that_repeats_itself_is_taken_to_go_on() -> None:
    known = KnownText()
    known.commit([9, 1, 2, 3, 1, 2, 3, 1])
    assert found(known, 7) == (4, [2, 3, 1, 2, 3, 1, 2])
    known.commit([1] * 100)
    assert found(known, 2) == (LONGEST, [1, 1])


def test_nothing_is_found_for_a_new_token_or_no_text() -> None:
    known = KnownText()
    assert found(known, 3) == (0, [])
    known.commit([1, 2, 3])
    assert found(known, 3) == (0, [])


@properties
@given(st.lists(st.tuples(texts, st.integers(0, 40)), max_size=6))
def test_it_follows_commits_and_truncations(changes: list[tuple[list[int], int]]) -> None:
    """The root is replaced by the next commit, which begins with it; a copy taken before is not touched."""
    known, model = KnownText(), [5]  # the model's last token is the root
    known.commit(model)
    for tokens, kept in changes:
        known.commit([model[-1], *tokens])
        model += tokens
        assert found(known, 5) == searched(model, 5)
        copy, was = known.take(kept), model[: min(kept, len(model) - 1)]
        known.truncate(kept)
        assert known.committed == copy.committed == len(was)
        known.commit([7, 8])
        copy.commit([1, 0, 1])
        assert found(copy, 4) == searched([*was, 1, 0, 1], 4)
        model = [*was, 7, 8]
        assert found(known, 4) == searched(model, 4)
