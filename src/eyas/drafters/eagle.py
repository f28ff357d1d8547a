"""Drafting with an EAGLE-1/2 head: it continues the target's features, and reads tokens off them with the target's LM head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from eyas.cache import RowCache
from eyas.drafters import best_tokens
from eyas.drafters.vocabulary import OwnTokens, OwnVocabulary
from eyas.heads.eagle import EagleHead, fused
from eyas.lookup import Continuation, KnownText
from eyas.masks import additive, tree_visibility
from eyas.noise import SharedNoise
from eyas.packing import linear, packed
from eyas.target import Target
from eyas.transfer import padded, upload
from eyas.tree import Candidates, DraftTree, GrowthPolicy, grow

AHEAD = 64  # committed tokens that the head may be behind


class EagleDraft:
    """A loaded draft for one target: the head and what it borrows. Stateless, shared by all requests.

    Args:
        target: the model it drafts for.
        head: the draft network, on the target's device and in its dtype.
        token_map: target ids [draft vocabulary] int64 of a reduced draft vocabulary, or None.
        embedding: an embedding [V, H] of the checkpoint's own, or None: the target's.
        own_tokens: of a row's own text, proposed besides a reduced draft vocabulary, at most so many.
    """

    def __init__(
        self,
        target: Target,
        head: EagleHead,
        token_map: Tensor | None = None,
        embedding: Tensor | None = None,
        own_tokens: int = 1024,
    ) -> None:
        self.target = target
        self.parameters = sum(parameter.numel() for parameter in head.parameters())  # packing hides them
        self.head = packed(fused(head))
        self.embedding = embedding
        self.token_map = token_map
        self.known = frozenset(() if token_map is None else token_map.tolist())
        self.own_tokens = own_tokens
        self.read: nn.Module = target.head  # features to logits of the draft vocabulary
        if token_map is not None:
            bias = getattr(target.head, "bias", None)
            rows = target.head.get_parameter("weight")[token_map]  # [draft vocabulary, H]
            self.read = linear(rows, None if bias is None else bias[token_map])

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., H] of token ids."""
        out: Tensor = self.target.embed(tokens) if self.embedding is None else F.embedding(tokens, self.embedding)
        return out

    def candidates(
        self, features: Tensor, width: int, own: OwnTokens | None = None, noise: SharedNoise | None = None, level: int = 1
    ) -> Candidates:
        """The ``width`` most likely tokens after guessed features [B, k, H], with log-probabilities, best first.

        They come from the draft vocabulary and from ``own``. Fewer than ``width`` are filled up with impossible tokens. With
        ``noise`` the probabilities are those of winning the races of that draft ``level``.
        """
        logits, token_map = self.target.postprocess(self.read(features)).float(), self.token_map  # [B, k, draft vocabulary]
        if own is not None and token_map is not None:
            besides = self.target.postprocess(own.read(features)).float() + own.closed  # [B, k, M]
            logits, token_map = torch.cat([logits, besides], dim=-1), torch.cat([token_map, own.tokens])
        if noise is not None:
            logits = noise.noisy(logits, level, token_map)
        tokens, values = best_tokens(logits, width)
        if token_map is not None:
            tokens = token_map[tokens]
        missing = width - tokens.shape[-1]
        if missing:
            tokens, values = F.pad(tokens, (0, missing)), F.pad(values, (0, missing), value=-torch.inf)
        return tokens, values


class EagleDrafter:
    """One batch's drafting state: the head's key/value rows of the committed tokens, and its guess at the next feature.

    The rows of committed tokens always come from the target's features; rows drafted from guesses are dropped after each tree.
    """

    def __init__(self, draft: EagleDraft, batch: int) -> None:
        self.draft = draft
        self.cache = RowCache(1, batch)
        self.own = OwnVocabulary(draft.target.head, draft.known, batch, draft.own_tokens)
        self.texts = [KnownText() for _ in range(batch)]
        self.guess = torch.empty(batch, 1, 0)  # [B, 1, H], the head's output at each row's last committed pair
        self.waiting: list[tuple[list[list[int]], Tensor]] = []  # committed, but not run through the head yet
        self.before = self.cache.lengths  # the cache's lengths without them

    def commit(self, tokens: list[list[int]], features: Tensor) -> None:
        """See `eyas.drafters.Drafter.commit`. The head runs before the next tree, or when much has gathered."""
        for text, row in zip(self.texts, tokens, strict=True):
            text.commit(row)
        if not self.waiting:
            self.before = self.cache.lengths
        self.waiting.append((tokens, features))
        if sum(features.shape[1] for _, features in self.waiting) > AHEAD:
            self.catch_up()

    def catch_up(self) -> None:
        """Run the head over the committed pairs it has not seen. Pair (f[i], t[i+1]) has draft position i."""
        if self.waiting and self.cache.lengths == self.before:  # else an interrupt came between the last two lines
            self._run(*_joined(self.waiting))
        self.waiting = []

    def _run(self, tokens: list[list[int]], features: Tensor) -> None:
        self.cache.rewind()  # an interrupt may have left rows behind
        if self.draft.known:
            self.own.add(tokens, self.cache.lengths)
        batch, m, device = *features.shape[:2], features.device
        following = padded([row[1:] for row in tokens], device)  # [B, m], the token after each feature's
        steps = torch.arange(m, device=device)
        positions = upload(self.cache.lengths, device)[:, None] + steps
        mask = None
        if self.cache.start:
            causal = (steps[:, None] >= steps).expand(batch, m, m)
            mask = additive(tree_visibility(self.cache.prefix_mask(device), causal), features.dtype)
        out = self.draft.head(self.draft.embed(following), features, positions, mask, self.cache)
        counts = [len(row) - 1 for row in tokens]
        self.guess = out[torch.arange(batch, device=device), upload(counts, device) - 1][:, None]
        self.cache.keep([list(range(count)) for count in counts])

    def propose(self, roots: Tensor, policy: GrowthPolicy, noise: SharedNoise | None = None) -> DraftTree:
        """Grow a tree; level by level the nodes of a level go through the head together (EAGLE-2 §4.1)."""
        prefix = lengths = guess = torch.empty(0)  # [B, start], [B, 1], [B, k, H]
        level, own = 0, None

        def find(count: int) -> list[Continuation]:
            return [text.continuation(count) for text in self.texts]

        def first(width: int) -> Candidates:
            nonlocal prefix, lengths, guess, own
            self.catch_up()
            prefix, lengths = self.cache.prefix_mask(roots.device), upload(self.cache.lengths, roots.device)[:, None]
            guess, own = self.guess, self.own.gather()
            return self.draft.candidates(guess, width, own, noise)

        def draft(tokens: Tensor, slots: Tensor, lines: Tensor, width: int) -> Candidates:
            nonlocal guess, level
            features = guess.gather(1, slots[:, :, None].expand(-1, -1, guess.shape[2]))  # [B, k, H], each parent's
            positions = (lengths + level).expand_as(tokens)
            visible = torch.cat([prefix[:, None].expand(-1, tokens.shape[1], -1), lines], dim=2)
            mask = additive(visible, features.dtype)
            guess = self.draft.head(self.draft.embed(tokens), features, positions, mask, self.cache)
            self.cache.start += tokens.shape[1]
            level += 1
            return self.draft.candidates(guess, width, own, noise, level + 1)

        tree = grow(policy, roots, first, draft, find)
        self.cache.rewind()
        return tree

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        self.catch_up()
        self.cache.select(rows)
        self.own.select(rows)
        self.texts = [self.texts[row] for row in rows]
        self.guess = self.guess[rows]

    def take(self, rows: list[int], lengths: list[int]) -> EagleDrafter:
        """A drafter of its own for these rows; a `commit` must follow before its next `propose`."""
        self.catch_up()
        taken = EagleDrafter(self.draft, len(rows))
        taken.cache, taken.own = self.cache.take(rows, lengths), self.own.take(rows, lengths)
        taken.texts = [self.texts[row].take(length) for row, length in zip(rows, lengths, strict=True)]
        return taken

    def put(self, rows: list[int], other: EagleDrafter) -> None:
        """Replace these rows of the batch by those of another drafter."""
        self.catch_up()
        other.catch_up()
        self.cache.put(rows, other.cache)
        self.own.put(rows, other.own)
        for row, text in zip(rows, other.texts, strict=True):
            self.texts[row] = text
        self.guess = self.guess.index_copy(0, upload(rows, self.guess.device), other.guess)

    def truncate(self, lengths: list[int]) -> None:
        """Forget all but the first so many pairs of each row; a `commit` must follow before the next `propose`."""
        self.catch_up()
        self.cache.truncate(lengths)
        self.own.truncate(lengths)
        for text, length in zip(self.texts, lengths, strict=True):
            text.truncate(length)


def _joined(commits: list[tuple[list[list[int]], Tensor]]) -> tuple[list[list[int]], Tensor]:
    """Successive commits as one; each begins with the token that the one before ended with."""
    if len(commits) == 1:
        return commits[0]
    batch = range(len(commits[0][0]))
    tokens = [[token for texts, _ in commits for token in texts[row][:-1]] + commits[-1][0][row][-1:] for row in batch]
    features = [torch.cat([found[row, : len(texts[row]) - 1] for texts, found in commits]) for row in batch]
    return tokens, pad_sequence(features, batch_first=True)
