"""The public face: sampling on the real loop, options as transformers has them, no state between calls, interrupts."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import eyas
import eyas.decode as loop
from eyas import EyasError
from eyas import target as target_room
from eyas.cache import RowCache
from eyas.decode import Session
from eyas.drafters.eagle import EagleDrafter
from eyas.engine import Engine
from eyas.noise import Noise
from eyas.sampling import Rule, chooser
from eyas.target import Target
from eyas.tree import DraftTree
from tests import families
from tests.drafts import (
    METHODS,
    GuidedDrafter,
    Recorder,
    assert_committed,
    broken_draft,
    engine,
    oracle_session,
    random_draft,
    run,
)
from tests.families import SIZES

PROMPTS = families.prompts(4, seed=8, shortest=1, longest=11)
PROMPT = [3, 1, 4, 1, 5]
EAGLE2 = {"method": "eagle2", **METHODS["eagle2"]}


def said(count: int, prompt: list[int] = PROMPT) -> list[int]:
    """The Llama's greedy continuation, by transformers."""
    return list(_said(count, tuple(prompt)))


@cache
def _said(count: int, prompt: tuple[int, ...]) -> list[int]:
    return families.greedy(families.model("llama"), prompt, count)


# --- sampling -----------------------------------------------------------------------------------------------------------------

SAMPLING = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_seed_gives_the_same_tokens_by_every_method_alone_and_in_a_batch(name: str) -> None:
    """Random numbers shared between rows, or spent differently by trees, would tie a row's text to its neighbours."""
    seeds = [11, 12, 13, 14]
    results = [
        [request.ids for request in run(engine(name), PROMPTS, method, seed=seeds, max_new_tokens=24, **SAMPLING)]
        for method in METHODS
    ]
    assert all(result == results[0] for result in results)
    again = [request.ids for request in run(engine(name), PROMPTS, "eagle2", seed=seeds, max_new_tokens=24, **SAMPLING)]
    alone = [
        run(engine(name), [prompt], method, seed=seed, max_new_tokens=24, **SAMPLING)[0].ids
        for prompt, seed, method in zip(PROMPTS, seeds, METHODS, strict=True)
    ]
    assert again == alone == results[0]


def test_a_seed_gives_the_same_tokens_whatever_the_draft() -> None:
    """An oracle that accepts whole branches must not change a draw: each token has its own random number."""
    (plain,) = run(engine("llama"), [PROMPT], "autoregressive", seed=5, max_new_tokens=40, temperature=1.0)
    session = oracle_session(engine("llama").target, [PROMPT + plain.ids], perfect=True)
    (request,) = run(engine("llama"), [PROMPT], "eagle2", session, seed=5, max_new_tokens=40, temperature=1.0)
    assert request.ids == plain.ids and request.statistics.tau > 4


def test_different_seeds_differ() -> None:
    """An ignored seed would give the same text for all; one for each prompt of a batch must be used by it."""
    options = {**EAGLE2, "max_new_tokens": 24, "temperature": 1.0}
    first, second, third = engine("llama").generate([PROMPT] * 3, seed=[1, 2, 1], **options)
    assert first.token_ids == third.token_ids != second.token_ids
    assert engine("llama").generate(PROMPT, **options).token_ids != engine("llama").generate(PROMPT, **options).token_ids


TINY = 6  # tokens


def tiny_engine() -> Engine:
    """A model of six tokens whose joint distributions can be enumerated, with a random draft."""
    model = families.draw_weights(LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": TINY})), seed=1)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)  # flat enough for every cell to be seen
    target = Target(model)
    return Engine(target, random_draft(target, seed=3))


def warped(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Sampling probabilities, written out: the smallest set of most likely tokens that holds top_p of the mass."""
    probabilities = (logits.double() / temperature).softmax(dim=-1)
    order = probabilities.sort(dim=-1, descending=True)
    before = order.values.cumsum(dim=-1) - order.values
    kept = torch.zeros_like(probabilities).scatter(-1, order.indices, order.values * (before < top_p))
    return kept / kept.sum(dim=-1, keepdim=True)


def exact_distribution(model: Any, prompt: list[int], temperature: float, top_p: float) -> dict[tuple[int, ...], float]:
    """P(second, third, fourth new token), the first one summed out, by enumeration."""
    found: Counter[tuple[int, ...]] = Counter()
    branches = list(product(range(TINY), repeat=4))
    logits = model(torch.tensor([prompt + list(branch) for branch in branches])).logits[:, len(prompt) - 1 : -1]
    steps = warped(logits, temperature, top_p)  # [branches, 4, V]
    chances = steps.gather(-1, torch.tensor(branches)[..., None])[..., 0].prod(dim=-1)
    for branch, chance in zip(branches, chances.tolist(), strict=True):
        found[branch[1:]] += chance
    return found


def goodness(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """p of Pearson's χ² test, cells of less than five expected counts pooled."""
    total = sum(counts.values())
    assert all(exact[cell] > 0 for cell in counts)  # nothing impossible was drawn
    observed, expected = [0.0], [0.0]
    for cell, chance in exact.items():
        if chance * total < 5:
            observed[0] += counts[cell]
            expected[0] += chance * total
        else:
            observed.append(counts[cell])
            expected.append(chance * total)
    pairs = [(seen, due) for seen, due in zip(observed, expected, strict=True) if due > 0]
    statistic = sum((seen - due) ** 2 / due for seen, due in pairs)
    assert len(pairs) > 30
    return float(chi2.sf(statistic, len(pairs) - 1))


def sample(tiny: Engine, first_seed: int, **options: Any) -> Counter[tuple[int, ...]]:
    """The last three of four tokens of many short generations, drafted in trees."""
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for begin in range(first_seed, first_seed + 3000, 500):
        seeds = list(range(begin, begin + 500))
        results = tiny.generate([[1, 4]] * 500, max_new_tokens=4, seed=seeds, tokens=5, depth=2, width=2, **options)
        counts.update(tuple(result.token_ids[1:]) for result in results)
        accepted += sum(sum(result.stats.accepted) for result in results)
    assert accepted > 500  # else acceptance was hardly tried
    return counts


@pytest.mark.parametrize(("temperature", "top_p", "coupled"), [(1.0, 1.0, True), (0.7, 0.85, True), (0.7, 0.85, False)])
def test_sampled_tokens_have_the_targets_distribution(temperature: float, top_p: float, coupled: bool) -> None:
    """Lossless at T > 0: acceptance that favours drafted tokens, or skips a warper, bends the joint distribution. A draft
    that knows the numbers of the draw changes nothing either."""
    tiny = tiny_engine()
    exact = exact_distribution(tiny.target.model, [1, 4], temperature, top_p)
    assert sum(exact.values()) == pytest.approx(1.0)
    assert goodness(sample(tiny, 1000, temperature=temperature, top_p=top_p, coupled=coupled), exact) > 1e-3


def test_the_distribution_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classical fault, drawing from p instead of the residual after a rejection, must be seen by the test above."""

    def biased(rules: list[Rule], logits: Tensor, tree: DraftTree, histories: Any, emitted: list[int]) -> Any:
        others = [Rule(rule.options, rule.chain, Noise(rule.noise.seed + 10**6)) for rule in rules]
        first = chooser(rules, logits, tree, histories, emitted)
        second = chooser(others, logits, tree, histories, emitted)

        def choose(nodes: Tensor, path: Tensor) -> Tensor:
            token = first(nodes, path)
            drafted = (tree.parents == nodes[:, None]) & (tree.tokens == token[:, None])
            drafted[:, 0] = False
            return torch.where(drafted.any(dim=1), token, second(nodes, path))

        return choose

    tiny = tiny_engine()
    exact = exact_distribution(tiny.target.model, [1, 4], 1.0, 1.0)
    monkeypatch.setattr(loop, "chooser", biased)
    assert goodness(sample(tiny, 1000, temperature=1.0), exact) < 1e-6


# --- options as transformers' generate has them -------------------------------------------------------------------------------

BIAS = {9: 2.0, 17: -4.0, 30: 1.5}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition_penalty": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "min_new_tokens": ({"min_new_tokens": 9}, {"min_new_tokens": 9}),
    "logit_bias": ({"logit_bias": BIAS}, {"sequence_bias": {(token,): value for token, value in BIAS.items()}}),
    "banned": ({"logit_bias": {17: -float("inf")}}, {"bad_words_ids": [[17]]}),
    "all": (
        {"repetition_penalty": 1.4, "min_new_tokens": 9, "logit_bias": BIAS},
        {"repetition_penalty": 1.4, "min_new_tokens": 9, "sequence_bias": {(token,): value for token, value in BIAS.items()}},
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("option", OPTIONS)
def test_penalties_equal_transformers(option: str, method: str) -> None:
    """A processor that sees the committed text instead of each node's own branch penalises the wrong tokens."""
    ours, theirs = OPTIONS[option]
    target = Target(families.model("llama"))
    plain = said(40, PROMPTS[1])
    ends = [plain[4], plain[7]]
    target.eos_ids = frozenset(ends)
    expected = [families.greedy(target.model, prompt, 24, eos_token_id=ends, **theirs) for prompt in PROMPTS]
    for right in (False, True):  # a random draft, and one that knows
        chosen = Engine(target, random_draft(target))
        texts = [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)]
        session = oracle_session(target, texts, perfect=True) if right else None
        requests = run(chosen, PROMPTS, method, session, max_new_tokens=24, **ours)
        assert [request.ids for request in requests] == expected
    assert option == "banned" or expected != [
        families.greedy(target.model, prompt, 24, eos_token_id=ends) for prompt in PROMPTS
    ]


@pytest.mark.parametrize("method", METHODS)
def test_generation_config_applies_to_every_method(method: str) -> None:
    """A penalty in the model's generation_config that only the baseline obeys makes trees 'lossless' against another model."""
    model = copy.deepcopy(families.model("llama"))
    model.generation_config.repetition_penalty = 1.5
    target = Target(model)
    (request,) = run(Engine(target, random_draft(target)), [PROMPT], method, max_new_tokens=30)
    assert request.ids == families.greedy(model, PROMPT, 30) != said(30)
    (plain,) = run(Engine(target, random_draft(target)), [PROMPT], method, max_new_tokens=30, repetition_penalty=1.0)
    assert plain.ids == said(30)


# --- prompts and results ------------------------------------------------------------------------------------------------------


def test_one_prompt_or_a_list() -> None:
    """The shape of what comes back follows the shape of what went in, and a batch is the single results in order."""
    chosen = engine("llama")
    single = chosen.generate(PROMPT, max_new_tokens=7, **EAGLE2)
    many = chosen.generate([PROMPT, PROMPTS[1]], max_new_tokens=7, **EAGLE2)
    assert [result.token_ids for result in many] == [single.token_ids, said(7, PROMPTS[1])]
    assert chosen.generate([PROMPT], max_new_tokens=7, **EAGLE2)[0].token_ids == single.token_ids == said(7)
    assert chosen.generate([], **EAGLE2) == []


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty prompt": ([[]], {}, "the prompt is empty"),
    "strange token": ([1, 48], {}, "the prompt holds token 48, but llama has 48 tokens"),
    "negative token": ([1, -1], {}, "the prompt holds token -1"),
    "too long": ([1] * families.CONTEXT, {}, "the prompt has 96 tokens, but llama has a context of 96"),
    "text without tokenizer": ("hello", {}, "llama has no tokenizer"),
    "stop without tokenizer": (PROMPT, {"stop": "x"}, "llama has no tokenizer"),
    "no tokens": (PROMPT, {"max_new_tokens": 0}, "max_new_tokens is 0"),
    "method": (PROMPT, {"method": "magic"}, "method magic is unknown"),
    "option": (PROMPT, {"colour": 1}, "unknown option colour"),
    "depth": (PROMPT, {"depth": 0}, "depth is 0"),
    "temperature": (PROMPT, {"temperature": -1.0}, "temperature is -1.0"),
    "bias": (PROMPT, {"logit_bias": {99: 1.0}}, "logit_bias names token 99"),
    "seeds": (PROMPT, {"seed": [1, 2]}, "2 seeds for 1 prompts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_calls_are_refused_in_one_line(case: str) -> None:
    """Anything else ends in a traceback from deep inside, or is silently ignored."""
    prompt, options, message = REFUSED[case]
    with pytest.raises(EyasError, match=message) as caught:
        engine("llama").generate(prompt, **{"method": "eagle2", **options})
    assert "\n" not in str(caught.value)


def test_a_method_that_needs_a_draft_says_so() -> None:
    """Without a draft, falling back to plain decoding in silence would report a speedup of nothing."""
    bare = eyas.load(families.model("llama"), method="autoregressive")
    assert bare.generate(PROMPT, max_new_tokens=5).token_ids == said(5)
    with pytest.raises(EyasError, match="method eagle2 needs a draft"):
        bare.generate(PROMPT, method="eagle2")
    with pytest.raises(EyasError, match="method eagle2 needs a draft"):
        eyas.load(families.model("llama"))


# --- no state between calls ---------------------------------------------------------------------------------------------------


def drain(*streams: eyas.Stream) -> list[list[int]]:
    """Token ids of streams read in turns, a piece each."""
    ids: list[list[int]] = [[] for _ in streams]
    going = set(range(len(streams)))
    while going:
        for place in sorted(going):
            piece = next(streams[place], None)
            if piece is None:
                going.discard(place)
            else:
                ids[place] += piece.token_ids
    return ids


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_interleaved_streams_equal_separate_runs(sampling: dict[str, Any]) -> None:
    """Two generations on one engine that share a buffer or a generator would write into each other."""
    chosen, options = engine("qwen2_window"), {**EAGLE2, "max_new_tokens": 30, **sampling}
    alone = [chosen.generate(prompt, **options).token_ids for prompt in PROMPTS[:2]]
    mixed = drain(chosen.stream(PROMPTS[0], **options), chosen.stream(PROMPTS[1], **options))
    assert mixed == alone


def test_an_abandoned_stream_leaves_nothing_behind() -> None:
    """A caller that stops reading must not change the next call."""
    chosen = engine("llama")
    stream = chosen.stream(PROMPTS[2], max_new_tokens=40, **EAGLE2)
    first = [token for _ in range(3) for token in next(stream).token_ids]
    assert stream.result.token_ids[: len(first)] == first == said(40, PROMPTS[2])[: len(first)]
    del stream
    assert chosen.generate(PROMPT, max_new_tokens=20, **EAGLE2).token_ids == said(20)


# --- sessions -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
def test_a_later_turn_equals_a_fresh_run(method: str, name: str) -> None:
    """Rows kept from an earlier turn, of the target or of the draft, must be those a fresh run would compute."""
    chosen, settings = engine(name), {"method": method, **METHODS[method], "max_new_tokens": 9}
    session = chosen.session()
    first = [5, 9, 2, 7]
    answer = chosen.generate(first, session=session, **settings).token_ids
    turns = [
        [*first, *answer, 8, 3],  # goes on
        [*first, *answer, 8, 3],  # the same prompt again
        [*first, *answer[:5], 1, 1],  # diverges inside the answer
        [*first, *answer[:5]],  # a prefix of what was seen
        [6, 6],  # shares nothing
        [5],  # nor this
    ]
    for turn in turns:
        result = chosen.generate(turn, session=session, **settings)
        fresh = chosen.generate(turn, **settings)
        assert result.token_ids == fresh.token_ids == families.greedy(chosen.target.model, turn, 9)
        assert_committed(chosen.target, session, [[*turn, *result.token_ids]])


def test_a_later_turn_runs_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that computes a long conversation again at every turn would be right, and useless."""
    chosen, ran = engine("llama"), []
    prefill = Target.prefill

    def spy(self: Target, cache: RowCache, prompts: list[list[int]], *more: Any) -> Any:
        ran.append(prompts[0])
        return prefill(self, cache, prompts, *more)

    monkeypatch.setattr(Target, "prefill", spy)
    session = chosen.session()
    answer = chosen.generate(PROMPT, session=session, max_new_tokens=6, **EAGLE2).token_ids
    chosen.generate([*PROMPT, *answer, 8, 9], session=session, max_new_tokens=6, **EAGLE2)
    chosen.generate([*PROMPT, *answer[:2], 7, 7], session=session, max_new_tokens=6, **EAGLE2)
    # the last known token is run again: the draft needs its feature with the token that now follows
    assert ran == [PROMPT, [answer[-2], answer[-1], 8, 9], [answer[1], 7, 7]]


def test_a_turn_of_another_method_and_a_sampled_one_share_a_session() -> None:
    """Plain decoding must keep the draft's rows up, or the next drafted turn starts with a hole."""
    chosen, session = engine("llama"), engine("llama").session()
    prompt = list(PROMPT)
    for method, temperature in (("autoregressive", 0.0), ("eagle2", 1.0), ("chain", 0.0), ("eagle1", 1.0)):
        options = {"method": method, **METHODS[method], "max_new_tokens": 9, "temperature": temperature, "seed": 4}
        result = chosen.generate(prompt, session=session, **options)
        fresh = chosen.generate(prompt, **options)
        assert (result.token_ids, result.stats.accepted) == (fresh.token_ids, fresh.stats.accepted)
        prompt += [*result.token_ids, 2]


def interrupt(call: Callable[..., Any], number: int, after: bool) -> Callable[..., Any]:
    """The same call, with Ctrl-C in its ``number``-th run, before or after its work."""
    calls = 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            raise KeyboardInterrupt
        out = call(*args, **kwargs)
        if calls == number:
            raise KeyboardInterrupt
        return out

    return interrupted


def test_an_interrupt_returns_what_is_done() -> None:
    """Ctrl-C in the middle must not lose what has been said, nor call it complete."""
    chosen = engine("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "verify", interrupt(Target.verify, 4, after=False))
        result = chosen.generate(PROMPT, max_new_tokens=40, **EAGLE2)
    assert result.finish_reason == "interrupted" and result.stats.steps == 3
    assert result.token_ids == said(40)[: 1 + sum(result.stats.delivered)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "verify", interrupt(Target.verify, 4, after=False))
        done = chosen.generate([PROMPT, PROMPTS[1]], max_new_tokens=2, **EAGLE2)
        assert [one.finish_reason for one in done] == ["length", "length"]  # it ended before
        going = chosen.generate([PROMPT, PROMPTS[1]], max_new_tokens=40, **EAGLE2)
    assert [one.finish_reason for one in going] == ["interrupted", "interrupted"]
    assert all(len(one.token_ids) >= 1 for one in going)
    assert chosen.generate(PROMPT, max_new_tokens=20, **EAGLE2).token_ids == said(20)


def test_an_interrupted_prefill_returns_nothing_yet() -> None:
    """Before the first token there is no text, and no statistics to divide by zero with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "prefill", interrupt(Target.prefill, 1, after=False))
        result = engine("llama").generate(PROMPT, max_new_tokens=40, **EAGLE2)
    assert (result.token_ids, result.text, result.finish_reason, result.stats.tau) == ([], "", "interrupted", None)
    assert result.stats.as_dict()["tokens_per_second"] == 0.0


POINTS = [
    (Target, "_forward"), (Target, "prefill"), (Target, "verify"), (EagleDrafter, "commit"), (EagleDrafter, "propose"),
    (EagleDrafter, "truncate"), (RowCache, "keep"), (RowCache, "truncate"),
]  # fmt: skip


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("room", "name"), POINTS, ids=[f"{room.__name__}.{name}" for room, name in POINTS])
def test_a_session_survives_an_interrupt_anywhere(room: type, name: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens noted as seen before their rows are there would be missing from the next turn's prefix."""
    monkeypatch.setattr(target_room, "PREFILL_CHUNK", 4)  # so that a prompt takes several forwards
    chosen, settings = engine("llama"), {**EAGLE2, "max_new_tokens": 5}
    assert chosen.draft is not None
    first, other = [*PROMPT, 9, 2, 6, 5, 3, 5], [*PROMPT, 9, 11, 13, 17, 19, 23]
    turns = [[*first, *said(5, first), 4], [*other, *said(5, other), 4]]  # back to the old text, or on with the interrupted
    for turn, number in product(turns, (1, 2, 4)):
        drafter = GuidedDrafter(
            chosen.draft, [[*other, *said(5, other)]], perfect=True
        )  # the interrupted step accepts a branch
        session = Session(chosen.target.new_cache(1), drafter, [[]])
        chosen.generate(first, session=session, **settings)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(room, name, interrupt(getattr(room, name), number, after))
            chosen.generate(other, session=session, **settings)
        result = chosen.generate(turn, session=session, **settings)
        assert result.token_ids == said(5, turn)
        assert_committed(chosen.target, session, [[*turn, *result.token_ids]])


# --- any draft is safe --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e30, -1e4], ids=str)
def test_a_broken_draft_changes_speed_only(value: float, sampling: dict[str, Any]) -> None:
    """NaN confidences sort anywhere and equal nothing: what grows from them must be a tree, and the text the target's."""
    target = engine("llama").target
    broken = Engine(target, broken_draft(target, value))
    expected = [request.ids for request in run(engine("llama"), PROMPTS, "autoregressive", max_new_tokens=16, **sampling)]
    for method in METHODS:
        requests = run(broken, PROMPTS, method, max_new_tokens=16, **sampling)
        assert [request.ids for request in requests] == expected


@pytest.mark.parametrize("ids", [[3, 7, 11, 40], [47], list(range(47, 0, -2))], ids=["four", "one", "many"])
def test_a_reduced_draft_vocabulary_names_target_tokens(ids: list[int]) -> None:
    """Draft ids taken for target ids would be verified as other tokens; a vocabulary smaller than the width must still do."""
    target = engine("llama").target
    reduced = Engine(target, random_draft(target, token_map=torch.tensor(ids), draft_vocab_size=len(ids)))
    assert reduced.draft is not None
    drafter = Recorder(reduced.draft, len(PROMPTS))
    session = Session(target.new_cache(len(PROMPTS)), drafter, [[] for _ in PROMPTS])
    requests = run(reduced, PROMPTS, "eagle2", session, max_new_tokens=24)
    assert [request.ids for request in requests] == [said(24, prompt) for prompt in PROMPTS]
    drafted = {
        int(token)
        for tree in drafter.trees
        for token, value in zip(tree.tokens[:, 1:].flatten(), tree.log_values[:, 1:].flatten(), strict=True)
        if value > -torch.inf
    }
    own = {token for prompt in PROMPTS for token in [*prompt, *said(24, prompt)]}
    assert drafted and drafted <= {*ids, *own}
    assert len(ids) > 4 or drafted >= set(ids)


def test_a_vocabulary_smaller_than_the_tree_is_wide() -> None:
    """topk of more tokens than there are crashes; padding that is taken for tokens would be accepted out of turn."""
    tiny = tiny_engine()
    expected = families.greedy(tiny.target.model, [1, 4], 30)
    for settings in ({"tokens": 60, "depth": 6, "width": 10}, {"tokens": 500, "depth": 3, "width": 40}):
        assert tiny.generate([1, 4], method="eagle2", max_new_tokens=30, **settings).token_ids == expected
    assert tiny.generate([1, 4], method="eagle1", max_new_tokens=30).token_ids == expected


def test_a_draft_with_its_own_embedding_and_biases_is_used() -> None:
    """A checkpoint's own embedding, or its biases, left out would change the draft: same text, other trees."""
    target = engine("llama").target
    plain, own = random_draft(target), random_draft(target)
    own.embedding = target.embed.weight.flip(0).contiguous()  # type: ignore[operator, union-attr]
    biased = random_draft(target, fc_bias=True, qkv_bias=True)
    trees = []
    for draft in (plain, own, biased):
        drafter = Recorder(draft, 1)
        session = Session(target.new_cache(1), drafter, [[]])
        (request,) = run(Engine(target, draft), [PROMPT], "eagle2", session, max_new_tokens=20)
        assert request.ids == said(20)
        trees.append(drafter.trees[0].tokens.tolist())
    assert len({str(tree) for tree in trees}) == 3


def test_long_prompts_go_past_the_drafts_trained_positions() -> None:
    """A draft trained on 8 positions must not crash on a prompt of 40."""
    target = engine("llama").target
    short = Engine(target, random_draft(target, max_position_embeddings=8))
    (prompt,) = families.prompts(1, shortest=40, longest=40)
    assert short.generate(prompt, max_new_tokens=20, **EAGLE2).token_ids == said(20, prompt)


def test_a_streams_pieces_concatenate_to_the_result() -> None:
    """A piece lost or doubled between drafted and own tokens shows as a wrong text on screen only."""
    pieces = list(engine("llama").stream(PROMPT, max_new_tokens=30, **EAGLE2))
    result = engine("llama").generate(PROMPT, max_new_tokens=30, **EAGLE2)
    assert [token for piece in pieces for token in piece.token_ids] == result.token_ids == said(30)
    assert "".join(piece.text for piece in pieces) == result.text
    assert sum(len(piece.token_ids) for piece in pieces if piece.drafted) == sum(result.stats.accepted)
