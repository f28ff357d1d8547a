"""The decoding loop: one for every method, plain decoding included.

`decode` is the whole of it: propose a tree, verify it, walk it, deliver what was accepted, commit it. A method is a drafter and
a tree policy; plain decoding has neither and verifies the root alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.accept import Accepted, walk
from eyas.cache import RowCache
from eyas.drafters import Drafter
from eyas.errors import EyasError
from eyas.sampling import Rule, chooser
from eyas.statistics import Statistics
from eyas.target import Target
from eyas.text import TextStream
from eyas.transfer import upload
from eyas.tree import DraftTree, TreePolicy, root_tree


@dataclass
class Request:
    """One row of a batch, from its prompt to its end. It owns its text, its random numbers and its statistics.

    Attributes:
        prompt: token ids, at least one.
        room: new tokens it may have, at least one: ``max_new_tokens`` cut to the context limit.
        rule: how its tokens are chosen.
        eos_ids: tokens that end it.
        text: its growing text, which also finds stop strings.
        ids: new tokens delivered.
        finish_reason: None while it runs, then ``"stop"``, ``"length"`` or ``"interrupted"``.
    """

    prompt: list[int]
    room: int
    rule: Rule
    eos_ids: frozenset[int]
    text: TextStream
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    statistics: Statistics = field(default_factory=Statistics)

    def deliver(self, tokens: list[int], drafted: int) -> Delivery:
        """Take newly emitted tokens, of which the first ``drafted`` were drafted, up to the one that ends the request."""
        texts = ["", ""]  # of the drafted tokens, of the target's own
        for count, token in enumerate(tokens, start=1):
            self.ids.append(token)
            if self.text.push(token) or token in self.eos_ids:
                self.finish_reason = "stop"
            elif len(self.ids) == self.room:
                self.finish_reason = "length"
            texts[count > drafted] += self.text.piece() if self.finish_reason is None else self.text.finish()
            if self.finish_reason:
                break
        return Delivery(self, tokens[:count], min(count, drafted), texts[0], texts[1])


@dataclass
class Session:
    """What a batch leaves behind for a next turn: the target's rows, the drafter, and the tokens both have seen.

    Attributes:
        cache: the target's key/value rows.
        drafter: the drafting state, or None for plain decoding.
        seen: token ids whose rows are in the cache, by row of the batch.
    """

    cache: RowCache
    drafter: Drafter | None
    seen: list[list[int]]


@dataclass(frozen=True)
class Delivery:
    """Tokens delivered to one request by one step.

    Attributes:
        request: whom.
        token_ids: the tokens.
        accepted: how many of them, from the first, were drafted; the rest is the target's own.
        drafted_text: text that became final with the drafted ones.
        own_text: text that became final with the rest.
    """

    request: Request
    token_ids: list[int]
    accepted: int
    drafted_text: str
    own_text: str


def open_session(target: Target, requests: list[Request], new_drafter: Callable[[int], Drafter] | None) -> Session:
    """An empty session with room for these requests."""
    batch, capacity = len(requests), max(len(request.prompt) + min(request.room, 1024) for request in requests)
    drafter = None if new_drafter is None else new_drafter(batch)
    return Session(target.new_cache(batch, capacity + 64), drafter, [[] for _ in requests])


@torch.inference_mode()
def decode(target: Target, session: Session, policy: TreePolicy | None, requests: list[Request]) -> Iterator[Delivery]:
    """Decode a batch; every step yields what it delivered, row by row, until all requests have ended.

    Args:
        target: the model.
        session: rows and drafter to use; what it has seen of each prompt is not computed again.
        policy: how trees grow; None, or a session without a drafter: plain decoding.
        requests: one for each row of the session. Rows leave the batch as they end; the last one's state stays in the session.

    Raises:
        EyasError: the target's logits are not finite.
    """
    clock, cache, drafter = time.perf_counter, session.cache, session.drafter
    roots, deliveries = _prefill(target, session, requests)  # [B]
    yield from deliveries
    rows, roots = _drop_ended(session, requests, roots)
    while rows:
        begin = clock()
        deepest = max(request.room - len(request.ids) for request in rows) - 1
        if drafter is None or policy is None or deepest < 1:
            tree = root_tree(roots)
        else:
            tree = drafter.propose(roots, policy.limited(deepest))
        drafted = clock()
        logits, features = target.verify(cache, tree)  # [B, n, V], [B, n, H]
        verified = clock()
        emitted = [len(request.ids) for request in rows]
        accepted = walk(tree, chooser([request.rule for request in rows], logits, tree, session.seen, emitted))
        paths, branches, following = _read(target, tree, logits, accepted)
        deliveries, kept = [], []
        for row, (path, branch, token) in enumerate(zip(paths, branches, following, strict=True)):
            delivery = rows[row].deliver([*branch[1:], token], drafted=len(branch) - 1)
            count = len(delivery.token_ids)  # token j follows node path[j]
            kept.append(path[:count])
            rows[row].statistics.step(count, delivery.accepted, tree.max_depth)
            deliveries.append(delivery)
        cache.keep(kept)
        roots, walked = accepted.next_token, clock()
        if drafter is not None:
            _commit(drafter, deliveries, kept, features)
        for seen, branch, path in zip(session.seen, branches, kept, strict=True):
            seen += branch[: len(path)]  # last: an interrupted step leaves no token here without its rows
        end = clock()
        for request in rows:
            request.statistics.spend(drafted - begin + end - walked, verified - drafted, walked - verified)
        rows, roots = _drop_ended(session, rows, roots)
        yield from deliveries


def _prefill(target: Target, session: Session, requests: list[Request]) -> tuple[Tensor, list[Delivery]]:
    """Run what the session has not seen of each prompt; choose and deliver each row's first new token [B]."""
    started = time.perf_counter()
    known = [_common(seen, request.prompt) for seen, request in zip(session.seen, requests, strict=True)]
    session.seen = [seen[:count] for seen, count in zip(session.seen, known, strict=True)]
    session.cache.truncate(known)
    if session.drafter is not None:
        session.drafter.truncate(known)
    fresh = [request.prompt[count:] for request, count in zip(requests, known, strict=True)]
    features, logits = target.prefill(session.cache, fresh)  # [B, T, H], [B, V]
    tree = root_tree(upload([prompt[-1] for prompt in fresh], logits.device))
    histories = [request.prompt[:-1] for request in requests]
    rules = [request.rule for request in requests]
    accepted = walk(tree, chooser(rules, logits[:, None], tree, histories, [0] * len(requests)))
    _, _, first = _read(target, tree, logits[:, None], accepted)
    if session.drafter is not None:
        following = [[*prompt[1:], token] for prompt, token in zip(fresh, first, strict=True)]
        session.drafter.commit(_padded(following, logits.device), features, [len(prompt) for prompt in fresh])
    session.seen = [list(request.prompt) for request in requests]
    deliveries = [request.deliver([token], drafted=0) for request, token in zip(requests, first, strict=True)]
    for request in requests:
        request.statistics.prefill_seconds = time.perf_counter() - started
    return accepted.next_token, deliveries


def _common(seen: list[int], prompt: list[int]) -> int:
    """How many of the prompt's tokens need not be run again: the common prefix but for its last token.

    That one is run again because the draft needs its feature together with the token that now follows it.
    """
    pairs = zip(seen, prompt, strict=False)
    same = next((place for place, (old, new) in enumerate(pairs) if old != new), min(len(seen), len(prompt)))
    return max(same - 1, 0)


def _read(
    target: Target, tree: DraftTree, logits: Tensor, accepted: Accepted
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Bring a step's outcome to the host, in its one synchronisation.

    Returns:
        For each row the accepted nodes from the root on, their tokens, and the token that follows.
    """
    broken = logits[:, 0].amax(dim=-1).isfinite().logical_not()  # [B]; NaN and overflow reach the maximum
    columns = [accepted.length[:, None], accepted.next_token[:, None], broken[:, None].long()]
    packed = torch.cat([*columns, accepted.path, tree.tokens.gather(1, accepted.path)], dim=1).tolist()
    if any(row[2] for row in packed):
        raise EyasError(f"target {target.name}: its logits are not finite in {target.dtype}; load it in float32 or bfloat16")
    width = tree.max_depth + 1
    paths = [row[3 : 3 + row[0] + 1] for row in packed]
    branches = [row[3 + width : 3 + width + row[0] + 1] for row in packed]
    return paths, branches, [row[1] for row in packed]


def _commit(drafter: Drafter, deliveries: list[Delivery], kept: list[list[int]], features: Tensor) -> None:
    """Give the drafter the committed nodes' features [B, n, H] with the token that follows each."""
    nodes = _padded(kept, features.device)  # [B, m]
    rows = torch.arange(len(kept), device=features.device)[:, None]
    tokens = _padded([delivery.token_ids for delivery in deliveries], features.device)
    drafter.commit(tokens, features[rows, nodes], [len(path) for path in kept])


def _padded(rows: list[list[int]], device: torch.device) -> Tensor:
    """[B, longest] int64, filled up with 0."""
    width = max(map(len, rows))
    return upload([row + [0] * (width - len(row)) for row in rows], device)


def _drop_ended(session: Session, rows: list[Request], roots: Tensor) -> tuple[list[Request], Tensor]:
    """Take ended rows out of the batch; when all have ended the session keeps the last ones for a next turn."""
    going = [row for row, request in enumerate(rows) if request.finish_reason is None]
    if going and len(going) < len(rows):
        session.cache.select(going)
        if session.drafter is not None:
            session.drafter.select(going)
        session.seen = [session.seen[row] for row in going]
        roots = roots[going]
    return [rows[row] for row in going], roots
