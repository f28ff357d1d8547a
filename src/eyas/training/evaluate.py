"""How far a head's guesses would carry on held-out conversations, without decoding.

Every supervised position is taken as the root of a chain of draft steps fed with the conversation's own next tokens:
the step is right if the token the target really emitted there ranks high enough. On greedy conversations that token is
the target's argmax; on sampled ones it is the sample, and accepting it is what a tree does at that temperature.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.heads.eagle import EagleHead
from eyas.target import Target
from eyas.training.data import Batch
from eyas.training.features import Knowledge
from eyas.training.readout import Readout, draft_ids
from eyas.training.unroll import unroll

RANKS = (1, 3, 10)
WORTH = 0.005  # a path of this value finds a place in a tree of some 60 nodes


@dataclass(frozen=True)
class Report:
    """Held-out accuracies.

    Attributes:
        top: for ranks 1, 3 and 10, per draft step, how often the emitted token is among that many best guesses.
        chain: tokens a step of decoding with one guess a level, the target's own included.
        tree: the same for a tree that holds every path within the ten best guesses a level and of value over WORTH.
    """

    top: dict[int, list[float]]
    chain: float
    tree: float

    def __str__(self) -> str:
        tops = "  ".join(f"top-{rank} " + " ".join(f"{hit:.3f}" for hit in hits) for rank, hits in self.top.items())
        return f"{tops}  chain τ {self.chain:.3f}  tree τ ≈ {self.tree:.3f}"


@torch.no_grad()
def evaluate(
    head: EagleHead,
    observed: Iterable[tuple[Batch, Knowledge]],
    target: Target,
    readout: Readout,
    token_map: Tensor | None,
    steps: int = 6,
) -> Report:
    """Measure a head.

    Args:
        observed: batches with what the target knows of them.
        target: whose embedding the head reads.
        readout: its LM head for the draft vocabulary D.
        token_map: target ids of the draft vocabulary, [D]; None: the whole vocabulary.
        steps: draft steps, the depth of the tree.
    """
    hits = torch.zeros(len(RANKS), steps)
    positions = 0
    walked = torch.zeros(2, 2)  # chain and tree: tokens, steps
    for batch, knowledge in observed:
        supervised, n = batch.supervised.cpu(), batch.supervised.shape[1]
        features = knowledge.features[:, :n]
        with torch.autocast(features.device.type, torch.bfloat16, enabled=features.dtype != torch.float32):
            guesses = unroll(head, target.embed(batch.ids[:, 1 : n + 1]), features, steps)
        emitted = draft_ids(token_map, batch.ids[:, 2:][batch.supervised], target.vocab_size)  # [N]
        ranks = torch.full((steps, *supervised.shape), len(readout.rows))  # [K, B, n]; unsupervised: never found
        values = torch.zeros(ranks.shape)  # log probability of the emitted token
        for step, guess in enumerate(guesses):
            rank, value = _score(guess[batch.supervised], emitted, readout)
            ranks[step][supervised], values[step][supervised] = rank.cpu(), value.cpu()
        for which, best in enumerate(RANKS):
            hits[which] += (ranks < best).sum((1, 2))
        positions += int(supervised.sum())

        # the chain with its root at pair i makes step k at pair i + k - 1
        length = max(n - steps + 1, 0)
        ranks = torch.stack([rank[:, step : step + length] for step, rank in enumerate(ranks)])  # [K, B, length]
        values = torch.stack([value[:, step : step + length] for step, value in enumerate(values)])
        inside = supervised[:, :length] & supervised[:, steps - 1 :]  # [B, length]
        likely = values.cumsum(0) > math.log(WORTH)
        for which, accepted in enumerate(
            ((ranks < 1).cumprod(0).sum(0), ((ranks < RANKS[-1]).cumprod(0) * likely).sum(0))  # [B, length]
        ):
            emitted_tokens, steps_taken = _walk(accepted, inside)
            walked[which, 0] += emitted_tokens
            walked[which, 1] += steps_taken
    top = {rank: (hits[which] / max(positions, 1)).tolist() for which, rank in enumerate(RANKS)}
    chain, tree = (walked[:, 0] / walked[:, 1].clamp_min(1)).tolist()
    return Report(top, chain, tree)


def _walk(accepted: Tensor, inside: Tensor) -> tuple[int, int]:
    """Tokens and steps of decoding along each row's answers, a step jumping over what it accepted.

    (A plain mean over positions would flatter: decoding stops more often where little is accepted.) An answer's first token
    comes from the prefill, so the first root is its second pair.

    Args:
        accepted: draft tokens that a step with its root here accepts, [B, n].
        inside: whether the position may be a root, [B, n].
    """
    tokens = steps = 0
    for counts, allowed in zip(accepted.tolist(), inside.tolist(), strict=True):
        place = 0
        while place < len(allowed):
            if allowed[place] and place and allowed[place - 1]:
                tokens += counts[place] + 1
                steps += 1
                place += counts[place] + 1
            else:
                place += 1
    return tokens, steps


def _score(guesses: Tensor, tokens: Tensor, readout: Readout, chunk: int = 128) -> tuple[Tensor, Tensor]:
    """Rank (0: best) and log probability of draft tokens [N] under guesses [N, H]; token -1 is out of reach."""
    ranks, values = [], []
    for guess, token in zip(guesses.split(chunk), tokens.split(chunk), strict=True):
        logits = readout.logits(guess)  # [c, D]
        own = logits.gather(1, token.clamp_min(0)[:, None])  # [c, 1]
        ranks.append((logits > own).sum(-1).masked_fill(token < 0, len(readout.rows)))
        values.append(own[:, 0] - logits.logsumexp(-1))
    return torch.cat(ranks), torch.cat(values)
