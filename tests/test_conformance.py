"""Against step-by-step records of the published implementation on the embedded target, in float32.

The first steps of every record by default; EYAS_FULL=1 follows them to their end.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.decode import Request, decode, open_session
from eyas.loading import load_draft
from eyas.noise import Noise
from eyas.policies import DynamicTree
from eyas.sampling import Rule, SamplingOptions, processors
from eyas.target import Target
from eyas.text import TextStream
from eyas.tree import DraftTree
from tests.drafts import Recorder
from tests.shared import SHARED, read_json, shared

TRACES = sorted(path.stem for path in (SHARED / "traces").glob("draft_*.json"))
TIE = 1e-5  # below this cut margin the published tie rule decides, and deforms trees
NEAR_TIE = 1e-4  # of the target's two best logits


def replay(target: Target, trace: dict[str, Any]) -> tuple[Request, list[DraftTree]]:
    """Decode a trace's prompt with its draft and settings. Past the end token too, as the published loop does.

    The published counts differ: its total_token includes the root, its depth counts forwards after the first.
    """
    draft = load_draft(shared("traces", trace["draft"]), target)
    prompt, options = trace["prompt_ids"], SamplingOptions()
    rule = Rule(options, processors(options, len(prompt), [], target.device), Noise(0))
    request = Request(prompt, len(trace["output_ids"]) + 40, rule, frozenset(), TextStream(None))
    session = open_session(target, [request], lambda batch: Recorder(draft, batch))
    policy = DynamicTree(trace["total_token"] - 1, trace["depth"] + 1, trace["top_k"])
    for _ in decode(target, session, policy, [request]):
        if request.statistics.steps == steps_of(trace):
            break
    assert isinstance(session.drafter, Recorder)
    return request, session.drafter.trees


def by_path(tokens: list[int], parents: list[int], scores: list[float]) -> dict[tuple[int, ...], float]:
    """A tree as the set of its nodes, each the tokens from the root to it, with its score."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if paths and parent >= 0 else ()), token))
    return dict(zip(paths, scores, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES or ["absent"])
def test_trees_and_acceptance_equal_the_published_ones(name: str, embedded_float32: Target) -> None:
    """Same node sets and scores wherever the published cut is no tie, and the same tokens accepted at every step."""
    trace = read_json(shared("traces", f"{name}.json"))
    request, trees = replay(embedded_float32, trace)
    for step, (tree, recorded) in enumerate(zip(trees, trace["trees"], strict=False)):
        ours = by_path(tree.tokens[0].tolist(), [-1, *tree.parents[0].tolist()[1:]], tree.log_values[0].tolist())
        theirs = by_path(recorded["draft_tokens"], recorded["parent"], recorded["cum_logprob"])
        assert len(ours) == len(recorded["draft_tokens"])
        if recorded["cut_margin"] > TIE:
            assert ours.keys() == theirs.keys(), f"step {step}"
            for path, score in theirs.items():
                assert ours[path] == pytest.approx(score, abs=1e-3), f"step {step}, {path}"
    steps = steps_of(trace)
    ties = [step for step, gap in enumerate(trace["min_top2_gap"]) if gap < NEAR_TIE]
    compared = min([steps, *ties])
    assert compared >= min(steps, 5), "the trace has a near-tie so early that it proves nothing"
    assert request.statistics.accepted[:compared] == trace["accept_length"][:compared]
    delivered = sum(request.statistics.delivered[:compared])
    assert request.ids[:delivered] == trace["output_ids"][:delivered]


def steps_of(trace: dict[str, Any]) -> int:
    return int(trace["steps"]) if os.environ.get("EYAS_FULL") else min(int(trace["steps"]), 5)


def test_weights_of_the_untrained_bin_checkpoint_load(embedded_float32: Target) -> None:
    """A published-style pytorch_model.bin loads, weights only."""
    draft = load_draft(Path(shared("traces", "draft_saturated")), embedded_float32)
    assert draft.head.config.fc_bias
    assert torch.isfinite(draft.head.fc.weight).all()
