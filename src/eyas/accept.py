"""Which branch of a draft tree the target's own decoding rule accepts: a pure function of trees and choices.

Every rule is the same walk. The target *chooses* one token at every node it visits: its most likely one (greedy), or one drawn
from that node's warped distribution. From the root, go to the child that carries the chosen token as long as there is
one; the choice at the last node reached is the token to emit after the branch.

**Why sampling is lossless.** The token emitted after node i is exactly the draw made at i, whose distribution is p_i: whether
a drafted child happens to carry it decides only whether the walk goes on. This equals the rule that visits the children in
turn, accepts child x with its renormalised probability, and draws from the residual when none is left: there too token x
is emitted with probability p_i(x) (EAGLE-2, arXiv 2406.16858 §2, with drafted children fixed beforehand). Here the children
need not even be fixed before the draw: they may be guessed from its numbers, since the draw does not ask for them.

The random numbers of a draw belong to the *position* of the emitted token (`eyas.noise`), so the tokens emitted for a seed do
not depend on the tree, on the drafter, or on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.tree import DraftTree


@dataclass(frozen=True)
class Accepted:
    """What a verification accepted.

    Attributes:
        path: [B, max_depth + 1] int64 node indices from the root to the last accepted node; that node repeats past the end.
        length: [B] int64, accepted draft tokens: edges of the path.
        next_token: [B] int64, the target's choice at the path's end: the next root.
    """

    path: Tensor
    length: Tensor
    next_token: Tensor


def walk(tree: DraftTree, choose: Callable[[Tensor, Tensor], Tensor]) -> Accepted:
    """Follow the target's choices down each tree.

    Args:
        tree: the verified trees.
        choose: ``choose(nodes, path)`` gives the token [B] the target chooses after nodes [B]; ``path`` [B, depth + 1] are the
            nodes from the root to them. It is asked once a depth; rows that have ended are asked again and ignored.

    Returns:
        Each row's accepted branch and the token to emit after it.
    """
    batch, device = tree.tokens.shape[0], tree.tokens.device
    index = torch.arange(tree.size, device=device)
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    length, next_token = torch.zeros_like(node), torch.zeros_like(node)
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    path = node[:, None]
    if tree.max_depth == 0:  # plain decoding: nothing to walk
        return Accepted(path, length, choose(node, path))
    for depth in range(tree.max_depth + 1):
        token = choose(node, path)  # [B]
        next_token = torch.where(alive, token, next_token)
        matches = (tree.parents == node[:, None]) & (tree.tokens == token[:, None]) & (index > 0)  # [B, n]
        alive = alive & matches.any(dim=1)
        node = torch.where(alive, matches.int().argmax(dim=1), node)  # twins carry the same token: the first will do
        length = length + alive
        path = torch.cat([path, node[:, None]], dim=1)
        asks = device.type == "cpu" or depth % 8 == 7  # on an accelerator it costs a synchronisation: only for deep trees
        if asks and not alive.any():
            break
    missing = tree.max_depth + 1 - path.shape[1]
    path = torch.cat([path, node[:, None].expand(-1, max(missing, 0))], dim=1)[:, : tree.max_depth + 1]
    return Accepted(path, length, next_token)
