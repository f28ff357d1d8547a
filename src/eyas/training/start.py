"""Where training starts from: the best linear guess of the next feature, a layer of the target, chance, or another draft.

From random weights most of a short run goes into finding the scale of ``fc``: embeddings are ten times smaller than
features, so their half must outgrow its usual initial size by far. The least-squares solution is closed form:

    W = argmin Σ |W [e(t[i+1]); f[i]] - f[i+1]|²  + ridge           fc.weight = W, both branches nearly silent
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.checkpoint import DraftCheckpoint, build_head, check_fit, read_checkpoint
from eyas.errors import EyasError
from eyas.heads.eagle import EagleHead, HeadConfig, head_like
from eyas.target import Target
from eyas.training.data import Batch
from eyas.training.features import Knowledge
from eyas.training.options import DRAFT_VOCABULARY, TrainOptions

RIDGE = 0.01  # of the mean square of each input half
QUIET = 0.1  # scale of the branches' output projections
Observed = Iterable[tuple[Batch, Knowledge]]


def planned_head(target: Target, options: TrainOptions) -> HeadConfig:
    """What a new run's head will be: a look that costs nothing, at what else would be refused late.

    Raises:
        EyasError: a draft to start from that does not fit the target, or a draft vocabulary larger than the target's.
    """
    if options.from_draft is None:
        return head_like(target.config, draft_vocabulary_size(target, options))
    checkpoint = read_checkpoint(options.from_draft)
    check_fit(checkpoint, target.hidden_size, target.vocab_size, target.name)
    return build_head(checkpoint).config


def draft_vocabulary_size(target: Target, options: TrainOptions) -> int | None:
    """How many tokens the head may propose; None: all.

    Raises:
        EyasError: more are asked for than the target has.
    """
    size = options.draft_vocab_size
    if size is not None and size > target.vocab_size:
        raise EyasError(f"draft_vocab is {size}, but {target.name} has {target.vocab_size} tokens; pass fewer, or 0 for all")
    size = DRAFT_VOCABULARY if size is None else size
    return size if 0 < size < target.vocab_size else None


def starting_head(target: Target, start: str, draft_vocab_size: int | None, observed: Observed) -> EagleHead:
    """A new head for a target, float32 on its device.

    Args:
        start: ``"regression"``, ``"last-layer"`` or ``"random"``.
        draft_vocab_size: tokens it can propose; None: all.
        observed: batches with what the target knows of them, for the regression; read only as far as needed.

    Raises:
        EyasError: ``"last-layer"`` where the target's layers are not made like the head's.
    """
    config, layer = head_like(target.config, draft_vocab_size), last_layer(target)
    if start == "last-layer":
        config = replace(config, qkv_bias="self_attn.q_proj.bias" in layer)
    head = EagleHead(config).to(target.device)
    if start == "last-layer":
        copy_last_layer(head, target)
    if start == "regression":
        quieten(head)
    if start != "random":
        fc_from_regression(head, observed, target.embed)
    return head


def head_from(checkpoint: DraftCheckpoint, target: Target) -> EagleHead:
    """A draft that was read, to be trained further: float32, on the target's device.

    Raises:
        EyasError: it is no EAGLE-1/2 draft, made for another target, or has an embedding that is not the target's.
    """
    check_fit(checkpoint, target.hidden_size, target.vocab_size, target.name)
    head = build_head(checkpoint).to(target.device, torch.float32).requires_grad_(True)
    head.config = replace(head.config, vocab_size=target.vocab_size)  # where the draft did not say
    if checkpoint.embedding is not None:
        ids = torch.arange(target.vocab_size, device=target.device)
        own = checkpoint.embedding.to(target.device, target.dtype)
        if not torch.equal(own, target.embed(ids)):
            raise EyasError(
                f"draft {checkpoint.name} has an embedding that is not {target.name}'s, which training does not keep; "
                "start without --from"
            )
    return head


@torch.no_grad()
def fc_from_regression(head: EagleHead, observed: Observed, embed: Callable[[Tensor], Tensor], pairs: int = 60_000) -> None:
    """Set ``fc`` to the ridge regression over the first ``pairs`` trained pairs.

    Args:
        observed: batches with what the target knows of them; read only as far as needed.
        embed: the target's embedding of token ids.
    """
    weight = head.fc.weight
    size = weight.shape[0]
    square = torch.zeros(2 * size, 2 * size, dtype=torch.float64)  # on the CPU: not every device has float64
    cross = torch.zeros(2 * size, size, dtype=torch.float64)
    seen = 0
    for batch, knowledge in observed:
        n, trained = batch.supervised.shape[1], batch.supervised
        tokens, features = batch.ids[:, 1 : n + 1][trained], knowledge.features[:, :n][trained]
        given = torch.cat([embed(tokens), features], dim=-1).float()  # [N, 2H]
        wanted = knowledge.features[:, 1 : n + 1][trained].float()  # [N, H]
        square += (given.T @ given).cpu().double()
        cross += (given.T @ wanted).cpu().double()
        seen += len(given)
        if seen >= pairs:
            break
    power = square.diagonal().view(2, size).mean(1).repeat_interleave(size)  # [2H]
    solution = torch.linalg.solve(square + torch.diag(RIDGE * power), cross)  # [2H, H]
    weight.copy_(solution.T.float())


@torch.no_grad()
def quieten(head: EagleHead) -> None:
    """Make the layer's branches nearly silent, so that ``fc`` alone speaks at first."""
    head.layer.self_attn.o_proj.weight.mul_(QUIET)
    head.layer.mlp.down_proj.weight.mul_(QUIET)


def last_layer(target: Target) -> dict[str, Tensor]:
    """Weights of the target's last decoder layer by their names in it; empty if it keeps no list of layers."""
    layers = getattr(target.model.get_decoder(), "layers", None)
    return {} if not layers else dict(layers[-1].state_dict())


@torch.no_grad()
def copy_last_layer(head: EagleHead, target: Target) -> None:
    """Copy the target's last decoder layer into the head; its input norm, which the head has not, stays behind.

    Raises:
        EyasError: names, shapes or norms differ.
    """
    found, wanted = last_layer(target), head.layer.state_dict()
    found.pop("input_layernorm.weight", None)
    remedy = "start from the regression instead"
    if found.keys() != wanted.keys():
        odd = ", ".join(sorted(found.keys() ^ wanted.keys())[:3]) or "no layers"
        raise EyasError(f"start is last-layer, but the last layer of {target.name} is not the head's kind ({odd}); {remedy}")
    for name, weight in wanted.items():
        if found[name].shape != weight.shape:
            raise EyasError(
                f"start is last-layer, but {name} of {target.name} is {list(found[name].shape)} where the head has "
                f"{list(weight.shape)}; {remedy}"
            )
    head.layer.load_state_dict({name: weight.float() for name, weight in found.items()})
    norm, test = head.layer.post_attention_layernorm, torch.linspace(-1, 1, target.hidden_size, device=target.device)
    theirs = target.model.get_decoder().layers[-1].post_attention_layernorm(test.to(target.dtype)).float()
    if not torch.allclose(theirs, F.rms_norm(test, norm.normalized_shape, norm.weight, norm.eps), rtol=0.05, atol=0.05):
        raise EyasError(f"start is last-layer, but {target.name} norms otherwise than the head; {remedy}")
