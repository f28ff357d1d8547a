"""The races of sampling: their law, their numbers, and what a draft learns from sharing them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from eyas.errors import EyasError
from eyas.noise import KEPT, Noise, SharedNoise, race
from tests.helpers import properties

VOCAB = 8


def winners(probabilities: list[float], races: int, seed: int = 0) -> torch.Tensor:
    """How often each token won."""
    noise = Noise(seed)
    numbers = torch.stack([noise(position, len(probabilities)) for position in range(races)])
    return race(torch.tensor(probabilities), numbers).bincount(minlength=len(probabilities))


def goodness(probabilities: list[float], counts: torch.Tensor) -> float:
    """p of Pearson's χ² test."""
    due = torch.tensor(probabilities, dtype=torch.float64) * counts.sum()
    return float(chi2.sf(float(((counts - due) ** 2 / due).sum()), len(probabilities) - 1))


@pytest.mark.parametrize("law", [[0.5, 0.5], [0.9, 0.09, 0.01], [0.3, 0.25, 0.2, 0.1, 0.08, 0.05, 0.015, 0.005]])
def test_a_token_wins_as_often_as_it_is_likely(law: list[float]) -> None:
    """Otherwise sampled text has another distribution than the target's. The same test sees a small bend of the law."""
    counts = winners(law, 20000)
    assert goodness(law, counts) > 1e-3
    bent = [law[0] - 0.03, law[1] + 0.03, *law[2:]]
    assert goodness(bent, counts) < 1e-6


def test_two_tokens_win_exactly_as_they_should() -> None:
    """Over the quantiles of both exponentials, cell by cell: P(E₁ / p < E₂ / (1 − p)) = p."""
    cells = 1000
    quantiles = -torch.log1p(-(torch.arange(cells, dtype=torch.float64) + 0.5) / cells)
    numbers = torch.cartesian_prod(quantiles, quantiles)  # [cells², 2]
    for likely in (0.5, 0.75, 0.9):
        share = (race(torch.tensor([likely, 1 - likely], dtype=torch.float64), numbers) == 0).double().mean()
        assert abs(float(share) - likely) < 2 / cells  # half of a cell on either side of the border


@properties
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-45, 1e-30, 6e-8, 0.1, 1 / 3, 1.0, 3e7]), min_size=1, max_size=20).filter(any),
    st.lists(st.sampled_from([1e-30, 1e-9, 0.3, 1.0, 40.0]), min_size=20, max_size=20),
)
def test_only_tokens_with_mass_win(masses: list[float], numbers: list[float]) -> None:
    """At the smallest and the largest numbers there are, a forbidden token must never come out."""
    probabilities = torch.tensor(masses)
    if float((probabilities / torch.tensor(numbers[: len(masses)])).max()) == 0:
        return  # too unlikely to be told from nothing, and alone: softmax gives no such thing
    assert probabilities[race(probabilities, torch.tensor(numbers[: len(masses)]))] > 0


def test_races_take_any_leading_shape() -> None:
    """One distribution, a row of them, or a batch of rows."""
    masses, numbers = torch.rand(2, 2, 3, 7, generator=torch.Generator().manual_seed(0)) + 0.1
    together = race(masses, numbers)
    assert together.shape == (2, 3) and together.dtype == torch.int64
    assert race(masses[1, 2], numbers[1, 2]) == together[1, 2]


# --- numbers


def test_the_same_seed_gives_the_same_numbers_however_asked_for() -> None:
    """Numbers belong to position and token: tree, drafter, batch and padding of the vocabulary must not change them."""
    wanted = [Noise(7)(position, VOCAB).tolist() for position in range(3 * KEPT)]
    noise = Noise(7)
    assert [noise(position, VOCAB).tolist() for position in reversed(range(3 * KEPT))] == wanted[::-1]
    assert [noise(position, VOCAB).tolist() for position in (2, 2, 0, 3 * KEPT - 1)] == [wanted[i] for i in (2, 2, 0, -1)]
    assert noise(2, 3 * VOCAB)[:VOCAB].tolist() == wanted[2] == noise(2, VOCAB).tolist()
    assert len({number for row in wanted for number in row}) == 3 * KEPT * VOCAB, "no two are alike"
    assert len(noise._found) <= KEPT


def test_seeds_differ_and_requests_share_nothing() -> None:
    """The program's own use of torch's generator must not move a request's numbers, nor be moved."""
    state = torch.get_rng_state()
    assert not torch.equal(Noise(1)(0, VOCAB), Noise(2)(0, VOCAB))
    assert not torch.equal(Noise(-1)(0, VOCAB), Noise(1)(0, VOCAB))
    assert not torch.equal(Noise(5 + 2**32)(0, VOCAB), Noise(5)(1, VOCAB)), "a large seed is no place of a small one"
    assert not torch.equal(Noise(None)(0, VOCAB), Noise(None)(0, VOCAB)), "no seed, no repetition"
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, "one", True])
def test_a_bad_seed_is_refused(seed: Any) -> None:
    """One line that names it."""
    with pytest.raises(EyasError, match="seed"):
        Noise(seed)


# --- sharing


def test_a_draft_that_knows_the_target_knows_who_wins() -> None:
    """Same distribution, temperature, level and numbers: the best noisy logit is the target's choice, at every place."""
    logits = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    noises, heats, emitted = [Noise(1), Noise(2)], [0.7, 1.3], [4, 9]
    shared = SharedNoise(noises, heats, emitted, VOCAB)
    for level in (1, 2, 5):
        noisy = shared.noisy(logits, level)
        for row in range(2):
            numbers = noises[row](emitted[row] + level - 1, VOCAB)  # a level's tokens are chosen at nodes one above
            chosen = race((logits[row] / heats[row]).softmax(-1), numbers)
            assert torch.equal(noisy[row].argmax(-1), chosen)


def test_a_reduced_vocabulary_races_with_its_own_tokens() -> None:
    """Numbers go by target ids, in whatever order the draft has its tokens."""
    logits, tokens = torch.tensor([[[0.3, -1.0, 2.0], [1.5, 0.0, -0.7]]]), torch.tensor([6, 0, 3])
    shared = SharedNoise([Noise(5)], [1.0], [1], VOCAB)
    whole = torch.full((1, 2, VOCAB), -math.inf)
    whole[..., tokens] = logits
    assert torch.equal(shared.noisy(logits, 1, tokens), shared.noisy(whole, 1)[..., tokens])


def test_greedy_rows_are_left_alone() -> None:
    """Where nothing is drawn the numbers say nothing."""
    logits = torch.randn(2, 1, VOCAB, generator=torch.Generator().manual_seed(0))
    noisy = SharedNoise([Noise(1), Noise(2)], [0.0, 1.0], [1, 1], VOCAB).noisy(logits, 1)
    assert torch.equal(noisy[0], logits[0]) and not torch.equal(noisy[1], logits[1])


def test_sharing_pays() -> None:
    """A draft at some distance from the target guesses better with the numbers than without."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(400, 1, 50, generator=generator) * 1.5
    draft = target + 0.5 * torch.randn(400, 1, 50, generator=generator)
    noises = [Noise(row) for row in range(400)]
    shared = SharedNoise(noises, [1.0] * 400, [0] * 400, 50)
    chosen = race(target[:, 0].softmax(-1), torch.stack([noise(0, 50) for noise in noises]))
    together = float((shared.noisy(draft, 1)[:, 0].argmax(-1) == chosen).float().mean())
    alone = float(target.softmax(-1).gather(-1, draft.argmax(-1, keepdim=True)).mean())
    assert together > alone + 0.2
