"""Where training starts from: the best linear guess of the next feature.

From random weights most of a short run goes into finding the scale of ``fc``: embeddings are ten times smaller than
features, so their half must outgrow its usual initial size by far. The least-squares solution is closed form:

    W = argmin Σ |W [e(t[i+1]); f[i]] - f[i+1]|²  + ridge           fc.weight = W, both branches nearly silent
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from eyas.heads.eagle import EagleHead
from eyas.training.data import Batch
from eyas.training.features import Knowledge

RIDGE = 0.01  # of the mean square of each input half
QUIET = 0.1  # scale of the branches' output projections


@torch.no_grad()
def start_from_regression(
    head: EagleHead, observed: Iterable[tuple[Batch, Knowledge]], embedding: Tensor, pairs: int = 60_000
) -> None:
    """Set ``fc`` to the ridge regression over the first ``pairs`` trained pairs and quieten the layer's branches.

    Args:
        observed: batches with what the target knows of them; read only as far as needed.
        embedding: the target's, [V, H].
    """
    size = embedding.shape[1]
    square = torch.zeros(2 * size, 2 * size, dtype=torch.float64, device=embedding.device)
    cross = torch.zeros(2 * size, size, dtype=torch.float64, device=embedding.device)
    seen = 0
    for batch, knowledge in observed:
        n, trained = batch.supervised.shape[1], batch.supervised
        tokens, features = batch.ids[:, 1 : n + 1][trained], knowledge.features[:, :n][trained]
        given = torch.cat([embedding[tokens], features], dim=-1).float()  # [N, 2H]
        wanted = knowledge.features[:, 1 : n + 1][trained].float()  # [N, H]
        square += (given.T @ given).double()
        cross += (given.T @ wanted).double()
        seen += len(given)
        if seen >= pairs:
            break
    power = square.diagonal().view(2, size).mean(1).repeat_interleave(size)  # [2H]
    solution = torch.linalg.solve(square + torch.diag(RIDGE * power), cross)  # [2H, H]
    head.fc.weight.copy_(solution.T)
    layer = head.layer
    layer.self_attn.o_proj.weight.mul_(QUIET)
    layer.mlp.down_proj.weight.mul_(QUIET)
