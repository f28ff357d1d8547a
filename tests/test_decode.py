"""The loop: the target's own greedy tokens for every family, method and draft; exact endings; the committed prefix."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.decode import Request, Session, decode
from eyas.engine import Engine
from eyas.target import Target
from tests import families
from tests.drafts import (
    METHODS,
    GuidedDrafter,
    assert_committed,
    engine,
    finish,
    oracle_session,
    random_draft,
    run,
    trained_draft,
)
from tests.families import CONTEXT, FAMILIES, VOCABULARY, WINDOWED

NEW_TOKENS = 60  # many times the window
PROMPTS = [[7], *families.prompts(3, seed=4, shortest=3, longest=14)]
DRAFTS = ("oracle", "perfect", "random")
COMBINATIONS = [(method, draft) for method in METHODS for draft in DRAFTS if method != "autoregressive" or draft == "random"]


@cache
def reference(name: str, row: int) -> list[int]:
    """What transformers continues a prompt with, alone."""
    return families.greedy(families.model(name), PROMPTS[row], NEW_TOKENS)


def references(name: str) -> list[list[int]]:
    return [reference(name, row) for row in range(len(PROMPTS))]


def texts(name: str) -> list[list[int]]:
    """Prompts with their continuations: what an oracle knows."""
    return [prompt + said for prompt, said in zip(PROMPTS, references(name), strict=True)]


def session_for(name: str, draft: str) -> Session | None:
    """A session with the drafter of that kind; None: the engine's own, random one."""
    return None if draft == "random" else oracle_session(engine(name).target, texts(name), perfect=draft == "perfect")


def check_end(request: Request, session: Session, row: int = 0) -> None:
    """Ids, tokens seen, cached rows and statistics end at the same token."""
    statistics = request.statistics
    assert session.seen[row] == [*request.prompt, *request.ids][:-1]
    assert session.cache.lengths[row] == session.cache.start == len(session.seen[row])
    assert len(request.ids) == 1 + sum(statistics.delivered)
    assert all(0 <= count - took <= 1 for count, took in zip(statistics.delivered, statistics.accepted, strict=True))


@pytest.mark.parametrize(("method", "draft"), COMBINATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_transformers_generate(name: str, method: str, draft: str) -> None:
    """Lossless: any other token in any row of a ragged batch, one-token prompt included, past the window, is a wrong answer."""
    count = 24 if draft == "random" else NEW_TOKENS  # rejections take a step a token
    requests = run(engine(name), PROMPTS, method, session_for(name, draft), max_new_tokens=count)
    assert [request.ids for request in requests] == [said[:count] for said in references(name)]
    assert {request.finish_reason for request in requests} == {"length"}
    if draft == "perfect":
        assert min(request.statistics.tau for request in requests) > 4  # else long accepts were not tried


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gptneox"])
def test_greedy_with_a_trained_draft(name: str) -> None:
    """A draft that is right now and then mixes accepts and rejections inside one step, as real ones do."""
    target = engine(name).target
    trained = Engine(target, trained_draft(target, name))
    for method in METHODS:
        requests = run(trained, PROMPTS, method, max_new_tokens=NEW_TOKENS)
        assert [request.ids for request in requests] == references(name)
        if method == "eagle2":
            assert sum(sum(request.statistics.accepted) for request in requests) > 30  # else hardly anything was accepted


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", ["llama", "gpt2", *WINDOWED])
def test_rows_that_end_at_different_times(name: str, draft: str) -> None:
    """A row that leaves the batch must take its cache row, its draft state and its root with it, and only its own."""
    rooms = [17, 1, 30, 5]
    job = engine(name).prepare(PROMPTS, method="eagle2", **METHODS["eagle2"], max_new_tokens=NEW_TOKENS)
    for request, room in zip(job.requests, rooms, strict=True):
        request.room = room
    session = session_for(name, draft) or job.session
    finish(engine(name), job.requests, session, job.policy)
    expected = [said[:room] for said, room in zip(references(name), rooms, strict=True)]
    assert [request.ids for request in job.requests] == expected
    assert len(session.seen) == 1  # the longest row is the last in it
    check_end(job.requests[2], session)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_context_limit_is_filled_exactly(name: str, method: str) -> None:
    """Near the limit a tree reaches past the last position: learned positions (GPT-2) would overflow, others go wrong."""
    left, model = 9, families.model(name)
    (prompt,) = families.prompts(1, seed=6, shortest=CONTEXT - left, longest=CONTEXT - left)
    said = families.greedy(model, prompt, left)
    short = PROMPTS[1]  # goes on after the long row has ended
    expected = [said, reference(name, 1)[:16]]
    for session in (None, oracle_session(engine(name).target, [prompt + said, short + expected[1]], perfect=True)):
        job = engine(name).prepare([prompt, short], method=method, **METHODS[method], max_new_tokens=500)
        job.requests[1].room = 16
        requests = finish(engine(name), job.requests, session or job.session, job.policy)
        assert [request.ids for request in requests] == expected
        assert [request.finish_reason for request in requests] == ["length", "length"]


# --- rows that are refilled ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", *WINDOWED])
def test_waiting_requests_take_over_ended_rows(name: str, method: str) -> None:
    """Twelve prompts through three rows, some sharing a beginning with what the row held: each says what it says alone."""
    chosen, target = engine(name), engine(name).target
    prompts = [*PROMPTS, *[[*prompt, *reference(name, row)[:5], 3] for row, prompt in enumerate(PROMPTS)], *PROMPTS[::-1]]
    rooms = [1, 9, 4, 12, 7, 1, 5, 8, 3, 1, 1, 6]
    job = chosen.prepare(prompts, method=method, **METHODS[method], max_new_tokens=12)
    for request, room in zip(job.requests, rooms, strict=True):
        request.room = room
    waiting = job.requests[3:]
    asked: list[int] = []

    def refill(count: int) -> list[Request]:
        asked.append(count)
        taken = [waiting.pop(0) for _ in range(min(count, len(waiting)))]
        return taken

    session = chosen.prepare(prompts[:3], method=method, **METHODS[method]).session
    steps, checked = 0, -1
    for delivery in decode(target, session, job.policy, job.requests[:3], refill):
        steps += 1
        committed = sum(map(len, session.seen))
        if committed != checked and len(session.seen) == 3:
            assert_committed(target, session, [[*one.prompt, *one.ids] for one in job.requests if one.ids])
            checked = committed
        assert delivery.token_ids
    assert [request.ids for request in job.requests] == [
        families.greedy(families.model(name), prompt, room) for prompt, room in zip(prompts, rooms, strict=True)
    ]
    assert not waiting and max(asked) <= 3 and steps > len(prompts)


def test_a_refilled_row_runs_only_what_it_has_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follow-up question must find its conversation's rows, whichever of the free rows holds them."""
    chosen = engine("llama")
    target, prefilled = chosen.target, []
    prefill = target.prefill

    def watch(cache: Any, prompts: Any, *more: Any) -> Any:
        prefilled.append([len(prompt) for prompt in prompts])
        return prefill(cache, prompts, *more)

    monkeypatch.setattr(target, "prefill", watch)
    job = chosen.prepare(PROMPTS, method="eagle2", **METHODS["eagle2"], max_new_tokens=3)
    follow = [[*prompt, *reference("llama", row)[:3], 1, 2] for row, prompt in enumerate(PROMPTS)]
    waiting = chosen.prepare(follow[::-1], method="eagle2", **METHODS["eagle2"], max_new_tokens=2).requests

    def refill(count: int) -> list[Request]:
        return [waiting.pop(0) for _ in range(min(count, len(waiting)))]

    for _ in decode(target, job.session, job.policy, job.requests, refill):
        pass
    assert not waiting and sum(map(sum, prefilled)) - sum(map(len, PROMPTS)) <= 4 * len(PROMPTS)


# --- the committed prefix -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guided", [True, False], ids=["long accepts", "rejections"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_holds_the_committed_prefix_after_every_step(name: str, guided: bool) -> None:
    """A row left from a rejected branch, moved to the wrong place, or drafted from a guess, bends everything after it."""
    chosen, rooms = engine(name), [14, 1, 25, 8]
    job = chosen.prepare(PROMPTS, method="eagle2", **METHODS["eagle2"], max_new_tokens=NEW_TOKENS)
    for request, room in zip(job.requests, rooms, strict=True):
        request.room = room
    session = job.session
    if guided:
        assert chosen.draft is not None
        session = Session(chosen.target.new_cache(4), GuidedDrafter(chosen.draft, texts(name)), session.seen)
    checked = -1
    for _ in decode(chosen.target, session, job.policy, job.requests):
        committed = sum(map(len, session.seen))
        if committed != checked:  # once a step: all its rows are committed before the first delivery
            assert_committed(chosen.target, session, [[*one.prompt, *one.ids] for one in job.requests])
            checked = committed
    accepted = sum(sum(request.statistics.accepted) for request in job.requests)
    assert accepted > 20 if guided else accepted < 20


# --- endings ------------------------------------------------------------------------------------------------------------------

WORDS = [consonant + vowel for consonant in "bdfgklmn" for vowel in "aeiouy"]  # one a token, without spaces between


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Two letters a token."""
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="ba"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(".."), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@cache
def speaking() -> Engine:
    """The Llama with a tokenizer."""
    target = Target(families.model("llama"), make_tokenizer())
    return Engine(target, random_draft(target))


def ending_engine(*ends: int) -> Engine:
    """The Llama with tokens declared to end its text."""
    target = Target(families.model("llama"), make_tokenizer())
    target.eos_ids = frozenset(ends)
    return Engine(target, random_draft(target))


ROW = 2
PROMPT = PROMPTS[ROW]


def said() -> list[int]:
    return reference("llama", ROW)


def perfect(target: Target) -> Session:
    """A session in which every step accepts a whole branch."""
    return oracle_session(target, [PROMPT + said()], perfect=True)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_after_an_end_token_inside_a_branch(method: str) -> None:
    """Tokens after the end token in the same accepted branch would be delivered, counted, or left in the cache."""
    inside = 0
    for place in range(12):
        end = said()[place]
        ending = ending_engine(end)
        session = perfect(ending.target)
        (request,) = run(ending, [PROMPT], method, session, max_new_tokens=40)
        stop = said().index(end) + 1
        assert request.ids == said()[:stop] and request.finish_reason == "stop"
        assert request.ids == families.greedy(ending.target.model, PROMPT, 40, eos_token_id=end)
        assert request.text.text == "".join(WORDS[token] for token in said()[:stop])
        check_end(request, session)
        counts = request.statistics
        inside += bool(counts.steps) and counts.delivered[-1] == counts.accepted[-1]  # cut before the target's own token
    assert inside > 3 if method != "autoregressive" else not inside


@pytest.mark.parametrize("method", METHODS)
def test_any_of_several_end_tokens_ends_the_text(method: str) -> None:
    """With the union of three declared tokens, the first one met ends the text."""
    ends = {said()[place] for place in (5, 8, 11)}
    (request,) = run(ending_engine(*ends), [PROMPT], method, max_new_tokens=40)
    assert request.ids == said()[: min(said().index(end) for end in ends) + 1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", ["one token", "inside one token", "across tokens", "across many"])
def test_nothing_after_a_stop_string_inside_a_branch(shape: str, method: str) -> None:
    """A stop string that ends in the middle of a branch, or spans two tokens or two steps, must be found at its token."""
    words = [WORDS[token] for token in said()]
    for place in range(10):
        text = "".join(words[place : place + 4])
        stop = {"one token": text[:2], "inside one token": text[1:2], "across tokens": text[1:3], "across many": text[1:6]}[
            shape
        ]
        session = perfect(speaking().target)
        (request,) = run(speaking(), [PROMPT], method, session, max_new_tokens=40, stop=[stop, "never"])
        whole = "".join(words)
        last = (whole.index(stop) + len(stop) - 1) // 2  # the token in which it first is complete
        assert request.ids == said()[: last + 1] and request.finish_reason == "stop"
        assert request.text.text == whole[: whole.index(stop)]
        check_end(request, session)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("limit", range(1, 13))
def test_max_new_tokens_is_exact(limit: int, method: str, draft: str) -> None:
    """A branch that crosses the limit must be cut at it, and a row that gets there early must not go on."""
    job = engine("llama").prepare([PROMPT], method=method, **METHODS[method], max_new_tokens=limit)
    session = job.session
    if draft != "random":
        session = oracle_session(engine("llama").target, [PROMPT + said()], draft == "perfect")
    (request,) = finish(engine("llama"), job.requests, session, job.policy)
    assert request.ids == said()[:limit] and request.finish_reason == "length"
    check_end(request, session)


def test_tau_counts_delivered_tokens_only() -> None:
    """A last step counted whole though cut inflates tau: depth 4 delivers 5 a step, here 1 + 5 + 5 + 1, then cut at an end."""
    session = perfect(engine("llama").target)
    (request,) = run(engine("llama"), [PROMPT], "chain", session, max_new_tokens=12)
    assert request.statistics.delivered == [5, 5, 1] and request.statistics.accepted == [4, 4, 0]
    assert request.statistics.tau == pytest.approx(11 / 3)
    place = next(place for place in (7, 8, 9) if said()[place] not in said()[:place])
    ending = ending_engine(said()[place])
    (request,) = run(ending, [PROMPT], "chain", perfect(ending.target), max_new_tokens=40)
    assert request.statistics.delivered == [5, place - 5] and request.statistics.accepted == [4, place - 5]
    assert request.statistics.tau == pytest.approx(place / 2)


def test_deliveries_concatenate_to_the_request() -> None:
    """What a step hands out is what the request has got: ids and text, drafted and own."""
    job = speaking().prepare([PROMPT], method="eagle2", **METHODS["eagle2"], max_new_tokens=30, stop="never")
    ids: list[int] = []
    text = ""
    for delivery in decode(speaking().target, perfect(speaking().target), job.policy, job.requests):
        assert delivery.request is job.requests[0] and 0 <= delivery.accepted <= len(delivery.token_ids)
        ids += delivery.token_ids
        text += delivery.drafted_text + delivery.own_text
        assert ids == job.requests[0].ids
    assert ids == said()[:30] and text == job.requests[0].text.text == "".join(WORDS[token] for token in ids)


def test_non_finite_logits_are_an_error_in_the_middle_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 overflow deep in a text would silently emit token 0 for ever."""
    target = Target(families.model("llama"), name="tiny")
    verify = target.verify

    def overflow(*args: Any, **more: Any) -> Any:
        logits, features = verify(*args, **more)
        return logits.fill_(float("nan")), features

    monkeypatch.setattr(target, "verify", overflow)
    with pytest.raises(ValueError, match="target tiny: its logits are not finite"):
        run(Engine(target, random_draft(target)), [PROMPT], "eagle2", max_new_tokens=4)


def test_vocabulary_of_the_tests_is_the_models() -> None:
    """Words and tokens must match one to one for the endings above to mean anything."""
    assert len(set(WORDS)) == VOCABULARY
    tokenizer = make_tokenizer()
    assert tokenizer("babe", add_special_tokens=False)["input_ids"] == [0, 1]
    assert tokenizer.decode(list(range(VOCABULARY))) == "".join(WORDS)
