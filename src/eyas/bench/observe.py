"""What becomes of single draft nodes: acceptance against confidence and against the place in the tree (paper, Figures 5 and 6).

An extra, untimed pass over some questions: the drafter's trees are kept and compared with what was accepted of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.bench.tasks import Question
from eyas.decode import decode
from eyas.drafters.eagle import EagleDrafter
from eyas.engine import Engine
from eyas.noise import SharedNoise
from eyas.tree import DraftTree, GrowthPolicy

BINS = 20


class Recorder(EagleDrafter):
    """An EAGLE drafter that keeps the last tree it proposed."""

    last: DraftTree | None = None

    def propose(self, roots: Any, policy: GrowthPolicy, noise: SharedNoise | None = None) -> DraftTree:
        """As `EagleDrafter.propose`."""
        self.last = super().propose(roots, policy, noise)
        return self.last


@dataclass(frozen=True)
class Step:
    """One draft-and-verify step of one request.

    Attributes:
        tokens, parents, log_values: of the tree's nodes, the root first.
        accepted: the accepted nodes, from the root's child on.
        own: the target's token after them.
    """

    tokens: list[int]
    parents: list[int]
    log_values: list[float]
    accepted: list[int]
    own: int

    def confidence(self, node: int) -> float:
        """The draft's probability of a node given its parent."""
        return math.exp(self.log_values[node] - self.log_values[self.parents[node]])

    def ranks(self) -> dict[int, str]:
        """Each node's place by child ranks, such as "01": the second child of the root's best child."""
        places, children = {0: ""}, dict.fromkeys(range(len(self.tokens)), 0)
        for node in range(1, len(self.tokens)):
            parent = self.parents[node]
            places[node] = places[parent] + format(children[parent], "x")
            children[parent] += 1
        return places


def steps_of(engine: Engine, ids: list[int], method: str, max_new_tokens: int, **settings: Any) -> Iterator[Step]:
    """Greedy decoding, step by step; the last one, which the end may have cut, is left out."""
    assert engine.draft is not None
    job = engine.prepare([ids], method=method, temperature=0.0, max_new_tokens=max_new_tokens, **settings)
    recorder = Recorder(engine.draft, 1)
    job.session.drafter = recorder
    for delivery in decode(engine.target, job.session, job.policy, job.requests):
        tree, recorder.last = recorder.last, None
        if tree is None or delivery.request.finish_reason is not None:
            continue
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        accepted, node = [], 0
        for token in delivery.token_ids[: delivery.accepted]:
            node = next(i for i in range(1, len(tokens)) if parents[i] == node and tokens[i] == token)
            accepted.append(node)
        yield Step(tokens, parents, tree.log_values[0].tolist(), accepted, delivery.token_ids[-1])


def observe(engine: Engine, questions: Sequence[Question], max_new_tokens: int) -> dict[str, Any]:
    """Watch the published trees on some questions' first turns.

    Returns:
        ``calibration``: by bin of confidence how many nodes were judged (their parent was accepted) and accepted;
        ``positions``: by place in EAGLE-1's tree the share of steps that accepted it, a number for each question;
        ``example``: one step of EAGLE-2's tree, as text.
    """
    judged, taken = [0] * BINS, [0] * BINS
    positions: dict[str, list[float]] = {}
    example: dict[str, Any] = {}
    for question in questions:
        ids = engine.render([{"role": "user", "content": question.turns[0]}])
        for step in steps_of(engine, ids, "eagle2", max_new_tokens, tokens=60, depth=6, width=10):
            reached = {0, *step.accepted}
            for node in range(1, len(step.tokens)):
                if step.parents[node] in reached:
                    place = min(int(step.confidence(node) * BINS), BINS - 1)
                    judged[place] += 1
                    taken[place] += node in reached
            if len(step.accepted) > len(example.get("accepted", ())) and len(step.accepted) <= 4:
                example = as_text(engine, question, step)
        counts: dict[str, int] = {}
        total = 0
        for step in steps_of(engine, ids, "eagle1", max_new_tokens):
            total += 1
            for node, path in step.ranks().items():
                if node:
                    counts[path] = counts.get(path, 0) + (node in step.accepted)
        if total:
            for path, count in counts.items():
                positions.setdefault(path, []).append(count / total)
    return {
        "questions": len(questions), "calibration": {"judged": judged, "accepted": taken},
        "positions": positions, "example": example,
    }  # fmt: skip


def as_text(engine: Engine, question: Question, step: Step) -> dict[str, Any]:
    """A step with its tokens as text."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    words = [str(tokenizer.decode([token])) for token in step.tokens]
    return {
        "task": question.task, "id": question.id, "words": words, "parents": step.parents,
        "values": [math.exp(value) for value in step.log_values], "accepted": step.accepted,
        "own": str(tokenizer.decode([step.own])),
    }  # fmt: skip
