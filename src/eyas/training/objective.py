"""The head and its loss as one module, so that whatever distributes modules can distribute training."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from eyas.heads.eagle import EagleHead
from eyas.target import Target
from eyas.training.data import Batch
from eyas.training.features import Knowledge
from eyas.training.losses import draft_loss, loss_weights
from eyas.training.options import TrainOptions
from eyas.training.readout import read_batch
from eyas.training.unroll import unroll


class Objective(nn.Module):
    """A batch and what the target knows of it in, the loss out.

    Args:
        head: what is trained; the only submodule.
        target: whose embedding and LM head the head borrows; no module, so they are no part of this one.
        token_map: target ids of the draft vocabulary [D] int64; None: all tokens.
        options: loss, unrolled steps, noise and dropout.
    """

    def __init__(self, head: EagleHead, target: Target, token_map: Tensor | None, options: TrainOptions) -> None:
        super().__init__()
        self.head = head
        self.target, self.token_map = target, token_map
        self.options = options
        self.weights = loss_weights(options)

    def forward(self, batch: Batch, knowledge: Knowledge, number: int) -> Tensor:
        """The loss of a micro-batch, *summed* over its supervised positions.

        Args:
            number: of the micro-batch in the whole run. With the seed it fixes noise and dropout, which therefore do not
                depend on which process computes it, nor on what was computed before.
        """
        options, n = self.options, batch.supervised.shape[1]
        torch.manual_seed(random.Random(f"{options.seed} micro-batch {number}").getrandbits(63))
        inputs = knowledge.features[:, :n]  # [B, n, H]; pair i reads f[i]
        if options.noise:
            lengths = batch.present.sum(1)[:, None, None]  # [B, 1, 1]
            inputs = inputs + (torch.rand_like(inputs) - 0.5) * (options.noise * 512 / lengths)
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.dtype != torch.float32):
            guesses = unroll(self.head, self.target.embed(batch.ids[:, 1 : n + 1]), inputs, options.steps, options.dropout)
        chosen = torch.stack([guess[batch.supervised] for guess in guesses]).float()  # [K, N, H]
        features = knowledge.features[:, 1 : n + 1][batch.supervised].float()  # [N, H]; pair i imitates f[i + 1]
        log_mass = knowledge.log_mass[:, 1 : n + 1][batch.supervised]  # [N]
        decay = [options.step_decay**step for step in range(options.steps)]
        readout, absent = read_batch(self.target, self.token_map, batch)  # absent: [B, M]
        closed = None if absent is None else absent[batch.supervised.nonzero()[:, 0]]  # [N, M]
        return draft_loss(chosen, features, log_mass, readout, self.weights, torch.tensor(decay, device=chosen.device), closed)
