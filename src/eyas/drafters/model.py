"""Small-model speculation: a smaller causal language model with the same tokens drafts for a larger one, tree-shaped.

The assistant is a `Target` of its own: its key/value rows hold the committed tokens and the root, and a tree's levels are
appended behind them with the tree's mask, as the target itself does when it verifies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.drafters import best_tokens
from eyas.errors import EyasError
from eyas.noise import SharedNoise
from eyas.target import Target
from eyas.transfer import upload
from eyas.tree import Candidates, DraftTree, GrowthPolicy, grow


class ModelDrafter:
    """One batch's drafting state of an assistant model.

    Args:
        assistant: the small model.
        batch: rows.
    """

    def __init__(self, assistant: Target, batch: int) -> None:
        self.assistant = assistant
        self.cache = assistant.new_cache(batch)
        self.committed = [0] * batch
        self.logits = torch.empty(batch, 1, 0)  # [B, 1, V] after each row's root

    def commit(self, tokens: list[list[int]], features: Tensor) -> None:
        """See `eyas.drafters.Drafter.commit`. Runs what the assistant has not seen, the root included."""
        fresh = []
        for row, length, committed in zip(tokens, self.cache.lengths, self.committed, strict=True):
            fresh.append(row[length - committed :])  # the first was the root before, and has been run
        _, logits = self.assistant.prefill(self.cache, fresh)
        self.logits = logits[:, None]
        self.committed = [committed + len(row) - 1 for committed, row in zip(self.committed, tokens, strict=True)]

    def catch_up(self) -> None:
        """Nothing is ever put off."""

    def propose(self, roots: Tensor, policy: GrowthPolicy, noise: SharedNoise | None = None) -> DraftTree:
        """Grow a tree. A level's nodes are run with those above them, as one forest behind the root."""
        drafted = torch.empty(len(roots), 0, dtype=torch.int64, device=roots.device)  # [B, m] expanded nodes
        parents, depths, before = drafted, drafted, 0  # before: nodes above the level that was run last
        level = 1

        def candidates(logits: Tensor, width: int) -> Candidates:
            return best_tokens(logits.float() if noise is None else noise.noisy(logits.float(), level), width)

        def first(width: int) -> Candidates:
            return candidates(self.logits, width)

        def draft(tokens: Tensor, slots: Tensor, lines: Tensor, width: int) -> Candidates:
            nonlocal drafted, parents, depths, before, level
            count = tokens.shape[1]
            own = torch.arange(drafted.shape[1], drafted.shape[1] + count, device=tokens.device).expand_as(tokens)
            parents = torch.cat([parents, slots + before if drafted.shape[1] else own], dim=1)  # the topmost are their own
            before = drafted.shape[1]
            drafted = torch.cat([drafted, tokens], dim=1)
            depths = torch.cat([depths, torch.full_like(tokens, level - 1)], dim=1)  # the root is behind them
            forest = DraftTree(drafted, parents, torch.zeros_like(drafted, dtype=torch.float32), depths, policy.depth)
            logits, _ = self.assistant.verify(self.cache, forest)
            self.cache.rewind()
            level += 1
            return candidates(logits[:, -count:], width)

        return grow(policy, roots, first, draft)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        self.cache.select(rows)
        self.committed = [self.committed[row] for row in rows]
        self.logits = self.logits[rows]

    def take(self, rows: list[int], lengths: list[int]) -> ModelDrafter:
        """A drafter of its own for these rows."""
        taken = ModelDrafter(self.assistant, len(rows))
        taken.cache, taken.committed = self.cache.take(rows, lengths), list(lengths)
        return taken

    def put(self, rows: list[int], other: ModelDrafter) -> None:
        """Replace these rows of the batch by those of another drafter."""
        self.cache.put(rows, other.cache)
        for row, committed in zip(rows, other.committed, strict=True):
            self.committed[row] = committed
        self.logits = self.logits.index_copy(0, upload(rows, self.logits.device), other.logits)

    def truncate(self, lengths: list[int]) -> None:
        """Forget all but the first so many committed tokens of each row."""
        self.committed = [min(pair) for pair in zip(self.committed, lengths, strict=True)]
        self.cache.truncate(self.committed)


def check_assistant(assistant: Target, target: Target) -> None:
    """Refuse an assistant whose tokens are not the target's.

    Raises:
        EyasError: another vocabulary, or another device.
    """
    if assistant.vocab_size != target.vocab_size:
        raise EyasError(
            f"assistant {assistant.name} has {assistant.vocab_size} tokens, but {target.name} has {target.vocab_size}; "
            "take a smaller model of the same family"
        )
    ours, theirs = (model.tokenizer.get_vocab() if model.tokenizer else None for model in (target, assistant))
    if ours is not None and theirs is not None and ours != theirs:
        raise EyasError(
            f"assistant {assistant.name} numbers its tokens otherwise than {target.name}; take a model of the same family"
        )
    if assistant.device != target.device:
        raise EyasError(f"assistant {assistant.name} is on {assistant.device}, but {target.name} on {target.device}")
