"""The decoding loop: one for every method, plain decoding included.

`decode` is the whole of it: propose a tree, verify it, walk it, deliver what was accepted, commit it. A method is a drafter and
a tree policy; plain decoding has neither and verifies the root alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.accept import Accepted, walk
from eyas.cache import RowCache
from eyas.drafters import Drafter
from eyas.errors import EyasError
from eyas.packing import MANY_ROWS, is_four_bit
from eyas.sampling import Rule, chooser, shared_noise
from eyas.statistics import Statistics
from eyas.target import Target
from eyas.text import TextStream
from eyas.transfer import padded, upload
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

    def take(self, rows: list[int], prompts: list[list[int]]) -> Session:
        """A session of its own for these prompts, which starts from what these rows have seen of them."""
        shared = [_shared(self.seen[row], prompt) for row, prompt in zip(rows, prompts, strict=True)]
        drafter = None if self.drafter is None else self.drafter.take(rows, shared)
        seen = [self.seen[row][:count] for row, count in zip(rows, shared, strict=True)]
        return Session(self.cache.take(rows, shared), drafter, seen)

    def put(self, rows: list[int], other: Session) -> None:
        """Replace these rows by those of another session."""
        self.cache.put(rows, other.cache)
        if self.drafter is not None and other.drafter is not None:
            self.drafter.put(rows, other.drafter)
        for row, seen in zip(rows, other.seen, strict=True):
            self.seen[row] = seen


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
def decode(
    target: Target,
    session: Session,
    policy: TreePolicy | None,
    requests: list[Request],
    refill: Callable[[int], list[Request]] | None = None,
) -> Iterator[Delivery]:
    """Decode a batch; every step yields what it delivered, row by row, until all requests have ended.

    Args:
        target: the model.
        session: rows and drafter to use; what it has seen of each prompt is not computed again.
        policy: how trees grow; None, or a session without a drafter: plain decoding.
        requests: one for each row of the session. Rows leave the batch as they end; the last one's state stays in the session.
        refill: asked for at most so many waiting requests when that many rows have ended; each takes over one of those rows.

    Raises:
        EyasError: the target's logits are not finite.
    """
    clock, cache, drafter = time.perf_counter, session.cache, session.drafter
    roots, deliveries = _prefill(target, session, requests)  # [B]
    yield from deliveries
    rows, roots = yield from _turn_over(target, session, requests, roots, refill)
    while rows:
        begin = clock()
        deepest = max(request.room - len(request.ids) for request in rows) - 1
        growing = None if drafter is None or policy is None or deepest < 1 else policy.limited(deepest, cache.start)
        rules, counts = [request.rule for request in rows], [len(request.ids) for request in rows]
        if drafter is None or growing is None:
            tree = root_tree(roots)
        else:
            noise = shared_noise(rules, counts, target.vocab_size) if getattr(growing, "coupled", False) else None
            tree = drafter.propose(roots, growing, noise)
        check_size(target, tree)
        drafted = clock()
        logits, features = target.verify(cache, tree, with_features=drafter is not None)  # [B, n, V], [B, n, H]
        verified = clock()
        accepted = walk(tree, chooser(rules, logits, tree, session.seen, counts))
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
            _commit(drafter, branches, deliveries, kept, features)
        for seen, branch, path in zip(session.seen, branches, kept, strict=True):
            seen += branch[: len(path)]  # last: an interrupted step leaves no token here without its rows
        end = clock()
        if growing is not None:
            emitted = [[*branch[1:], token] for branch, token in zip(branches, following, strict=True)]
            growing.learn(tree, paths, emitted, end - begin)
        for request in rows:
            request.statistics.spend(drafted - begin + end - walked, verified - drafted, walked - verified)
        yield from deliveries
        rows, roots = yield from _turn_over(target, session, rows, roots, refill)


def check_size(target: Target, tree: DraftTree) -> None:
    """Refuse trees so large that layers of 4 bits would be multiplied otherwise than in plain decoding.

    Raises:
        EyasError: they are.
    """
    if tree.size >= MANY_ROWS and is_four_bit(target.model):
        raise EyasError(
            f"a tree of {tree.size - 1} tokens is too large for {target.name} in 4 bits; verify at most {MANY_ROWS - 2}, or "
            "load it in bfloat16"
        )


def _prefill(target: Target, session: Session, requests: list[Request]) -> tuple[Tensor, list[Delivery]]:
    """Run what the session has not seen of each prompt; choose and deliver each row's first new token [B]."""
    started = time.perf_counter()
    # the last shared token is run again: the draft needs its feature together with the token that now follows it
    known = [max(_shared(seen, request.prompt) - 1, 0) for seen, request in zip(session.seen, requests, strict=True)]
    session.seen = [seen[:count] for seen, count in zip(session.seen, known, strict=True)]
    session.cache.truncate(known)
    if session.drafter is not None:
        session.drafter.truncate(known)
    fresh = [request.prompt[count:] for request, count in zip(requests, known, strict=True)]
    features, logits = target.prefill(session.cache, fresh, session.drafter is not None)  # [B, T, H], [B, V]
    tree = root_tree(upload([prompt[-1] for prompt in fresh], logits.device))
    histories = [request.prompt[:-1] for request in requests]
    rules = [request.rule for request in requests]
    accepted = walk(tree, chooser(rules, logits[:, None], tree, histories, [0] * len(requests)))
    _, _, first = _read(target, tree, logits[:, None], accepted)
    if session.drafter is not None:
        tokens = [[*prompt, token] for prompt, token in zip(fresh, first, strict=True)]
        session.drafter.commit(tokens, features)
        session.drafter.catch_up()  # the prompt's share of drafting is part of the prefill
    session.seen = [list(request.prompt) for request in requests]
    deliveries = [request.deliver([token], drafted=0) for request, token in zip(requests, first, strict=True)]
    for request in requests:
        request.statistics.prefill_seconds = time.perf_counter() - started
    return accepted.next_token, deliveries


def _shared(seen: list[int], prompt: list[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(seen, prompt, strict=False)
    return next((place for place, (old, new) in enumerate(pairs) if old != new), min(len(seen), len(prompt)))


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


def _commit(
    drafter: Drafter, branches: list[list[int]], deliveries: list[Delivery], kept: list[list[int]], features: Tensor
) -> None:
    """Give the drafter each row's committed nodes: the root, what was delivered after it, and the nodes' features [B, n, H]."""
    nodes = padded(kept, features.device)  # [B, m]
    rows = torch.arange(len(kept), device=features.device)[:, None]
    tokens = [[branch[0], *delivery.token_ids] for branch, delivery in zip(branches, deliveries, strict=True)]
    drafter.commit(tokens, features[rows, nodes])


def _turn_over(
    target: Target, session: Session, rows: list[Request], roots: Tensor, refill: Callable[[int], list[Request]] | None
) -> Generator[Delivery, None, tuple[list[Request], Tensor]]:
    """Give ended rows to waiting requests, and take the others that have ended out of the batch.

    Returns:
        The requests that go on and their roots [B]. When all have ended the session keeps the last ones for a next turn.
    """
    rows = list(rows)
    while True:
        ended = [row for row, request in enumerate(rows) if request.finish_reason is not None]
        waiting = refill(len(ended)) if refill is not None and ended else []
        if not waiting:
            break
        slots = _nearest(session.seen, ended, waiting)
        part = session.take(slots, [request.prompt for request in waiting])
        first, deliveries = _prefill(target, part, waiting)
        session.put(slots, part)
        roots = roots.index_copy(0, upload(slots, roots.device), first)
        for slot, request in zip(slots, waiting, strict=True):
            rows[slot] = request
        yield from deliveries
    if ended and len(ended) < len(rows):
        going = [row for row in range(len(rows)) if row not in ended]
        session.cache.select(going)
        if session.drafter is not None:
            session.drafter.select(going)
        session.seen = [session.seen[row] for row in going]
        roots = roots[going]
    return [request for request in rows if request.finish_reason is None], roots


def _nearest(seen: list[list[int]], free: list[int], waiting: list[Request]) -> list[int]:
    """For each waiting request the free row that has seen most of its prompt: that much need not be run again."""
    left, slots = list(free), []
    for request in waiting:
        slots.append(max(left, key=lambda row: _shared(seen[row], request.prompt)))
        left.remove(slots[-1])
    return slots
