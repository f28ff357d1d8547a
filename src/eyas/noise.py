"""The random numbers of sampling, and how a draft may share them.

The target draws a token by a race (the exponential form of the Gumbel-max trick): at every position each token v of the
vocabulary has a number E_v of its own, exponentially distributed, and the least E_v / p_v wins: v with probability p_v exactly.

So a sampled text is a function of prompt, seed and target: whatever is drafted, and by whatever knowledge, cannot change
what wins at a node, only whether the tree holds it. The draft may therefore see the numbers. It lets its own distribution q run
the same race, and where q is near p the winners are mostly the same; one guess is right with probability at least
(1 − d) / (1 + d), d being their total variation distance (Daliri, Musco and Suresh, arXiv 2408.07978), where a guess
that knows no numbers is right with probability p_v at most. Drafting goes by the noisy logits  log q_v − log E_v  as by any
others: their softmax turns out to be a fair guess of who wins (docs/notes/shared-noise.md).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.transfer import upload

KEPT = 12  # positions: a draft's levels and the target's choices ask for the same ones, in one step and the next
LEAST = 1e-30  # no number is smaller, so that dividing by it stays finite


class Noise:
    """A request's own random numbers: a standard exponential for each token at each new position, however they are asked for.

    Args:
        seed: a whole number from −2**63 to 2**64 − 1; None: another one every time.

    Raises:
        EyasError: the seed is none of these.
    """

    def __init__(self, seed: int | None) -> None:
        good = seed is None or (isinstance(seed, Integral) and not isinstance(seed, bool) and -(2**63) <= seed < 2**64)
        if not good:
            raise EyasError(f"seed is {seed}; it must be a whole number from -2**63 to 2**64 - 1")
        self.seed = secrets.randbits(64) if seed is None else int(seed) % 2**64
        self._found: dict[int, Tensor] = {}

    def __call__(self, position: int, size: int) -> Tensor:
        """The numbers of new token ``position`` (from 0) for tokens 0 … ``size`` − 1, [size] float32 on the host."""
        found = self._found.get(position)
        if found is None or len(found) < size:
            generator = np.random.Generator(np.random.SFC64([self.seed & 0xFFFFFFFF, self.seed >> 32, position]))
            fresh = np.maximum(generator.standard_exponential(size), LEAST)
            found = self._found[position] = torch.from_numpy(fresh.astype(np.float32))
            if len(self._found) > KEPT:
                del self._found[next(iter(self._found))]
        return found[:size]


def race(probabilities: Tensor, drawn: Tensor) -> Tensor:
    """The winner of each race.

    Args:
        probabilities: [..., V] float, non-negative, with some mass; they need not sum to one.
        drawn: [..., V] exponentials, positive.

    Returns:
        Token ids [...] int64; a token of zero probability never wins.
    """
    return (probabilities / drawn).argmax(dim=-1)


def numbers(noises: list[Noise], temperatures: list[float], positions: list[int], size: int, device: torch.device) -> Tensor:
    """Each row's numbers at its position, [B, size] float32; ones where its temperature is 0."""
    rows = zip(noises, temperatures, positions, strict=True)
    drawn = [noise(position, size) if temperature else torch.ones(size) for noise, temperature, position in rows]
    return torch.stack(drawn).to(device, non_blocking=True)


@dataclass(frozen=True)
class SharedNoise:
    """What a draft may know of the choices that a batch's next step will meet.

    Attributes:
        noises: each row's numbers.
        temperatures: each row's; 0: greedy, there the numbers say nothing.
        emitted: new tokens of each row so far, the tree's root included.
        size: tokens of the vocabulary.
    """

    noises: list[Noise]
    temperatures: list[float]
    emitted: list[int]
    size: int

    def noisy(self, logits: Tensor, level: int, tokens: Tensor | None = None) -> Tensor:
        """A level's logits as they go into its race, up to a constant.

        Args:
            logits: [B, k, D] float32 of the draft, for tokens of draft level ``level`` (from 1).
            tokens: target ids [D] int64 of them; None: all, in order.
        """
        device = logits.device
        drawn = numbers(self.noises, self.temperatures, [count + level - 1 for count in self.emitted], self.size, device)
        heat = upload([temperature or 1.0 for temperature in self.temperatures], device)[:, None, None]  # [B, 1, 1]
        return logits / heat - (drawn if tokens is None else drawn[:, tokens]).log()[:, None]
