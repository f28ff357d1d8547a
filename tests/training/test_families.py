"""A head can be trained for every family that Eyas decodes: scaled, capped or biased logits, embeddings of any make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM, PreTrainedModel

from eyas.heads.eagle import head_like
from eyas.target import Target
from eyas.training import TrainOptions
from eyas.training.data import Sample, collate
from eyas.training.features import observe
from eyas.training.objective import Objective
from eyas.training.readout import read_batch, read_head
from eyas.training.start import starting_head
from tests import families

SCALED = {
    "cohere": lambda: CohereForCausalLM(CohereConfig(**families.SIZES, logit_scale=0.25)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**families.SIZES, logits_scaling=4.0, embedding_multiplier=3.0)),
}


def model(name: str) -> PreTrainedModel:
    return families.draw_weights(SCALED[name]()) if name in SCALED else families.model(name)


@pytest.mark.parametrize("name", [*families.FAMILIES, *SCALED])
def test_a_family_is_trained_on_its_own_distribution(name: str) -> None:
    """The readout gives the model's logits, the mass is theirs, and a step down the gradient lowers the loss."""
    target = Target(model(name), None, name)
    samples = [Sample(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool)) for ids in families.prompts(6, 1, 10, 20)]
    batch = collate(samples, list(range(6)))
    knowledge, token_map = observe(target, batch, chunk=7), torch.arange(0, 48, 3)
    readout = read_head(target, token_map)
    with torch.no_grad():
        logits = target.model(batch.ids, attention_mask=batch.present.long()).logits
    torch.testing.assert_close(readout.logits(knowledge.features), logits[..., token_map], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(knowledge.log_mass, logits.logsumexp(-1), rtol=1e-4, atol=1e-4)

    head = starting_head(target, "regression", 16, [(batch, knowledge)])
    objective = Objective(head, target, token_map, TrainOptions(out=Path("unused"), noise=0.0, loss="top-k"))
    optimiser = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for number in range(6):
        loss = objective(batch, knowledge, number)
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < losses[0]
    assert head_like(target.config, 16).vocab_size == 48
    assert {name for name, _ in objective.named_parameters()} == {f"head.{name}" for name, _ in head.named_parameters()}


def test_a_text_may_use_its_own_tokens() -> None:
    """Each row's loss reads the draft vocabulary and what that row holds; not its filling, nor what others hold."""
    target = Target(families.model("llama"), None, "llama")
    samples = [Sample(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool)) for ids in ([1, 5, 3, 7], [6, 9, 9])]
    readout, absent = read_batch(target, torch.tensor([1, 3, 6]), collate(samples, [0, 1]))
    weight = target.head.get_parameter("weight")
    assert torch.equal(readout.rows, weight[[1, 3, 6, 5, 7, 9]])
    assert absent is not None and absent.tolist() == [[False, False, True], [True, True, False]]
    whole, absent = read_batch(target, None, collate(samples, [0, 1]))
    assert torch.equal(whole.rows, weight) and absent is None
