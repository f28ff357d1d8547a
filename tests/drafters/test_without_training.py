"""Methods that need no trained draft, in the loop: lossless for every family, and worth something where they should be."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from eyas.decode import Request, decode
from eyas.drafters.model import ModelDrafter
from eyas.engine import Engine
from eyas.errors import EyasError
from eyas.target import Target
from tests import families
from tests.families import FAMILIES, VOCABULARY, WINDOWED

PROMPTS = [[7], *families.prompts(3, seed=4, shortest=3, longest=14)]
SETTINGS: dict[str, dict[str, int]] = {
    "ngram": {"tokens": 10, "depth": 4, "width": 3},
    "model": {"tokens": 8, "depth": 3, "width": 3},
}
NEW = 40  # past the windows


@cache
def engine(name: str, assistant: str) -> Engine:
    target = Target(families.model(name), name=name)
    return Engine(target, None, "ngram", target if assistant == name else Target(families.model(assistant), name=assistant))


@cache
def reference(name: str, row: int) -> list[int]:
    return families.greedy(families.model(name), PROMPTS[row], NEW)


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_transformers_generate(name: str, method: str) -> None:
    """In a ragged batch, with an assistant of another family that is hardly ever right."""
    other = "gpt2" if name != "gpt2" else "llama"
    results = engine(name, other).generate(PROMPTS, method=method, **SETTINGS[method], max_new_tokens=NEW)
    assert [result.token_ids for result in results] == [reference(name, row) for row in range(len(PROMPTS))]


@pytest.mark.parametrize("tree", [{"tokens": 12, "depth": 2, "width": 3}, {"tokens": 4, "depth": 4, "width": 1}])
@pytest.mark.parametrize("name", ["llama", "gpt2", *WINDOWED])
def test_the_target_as_its_own_assistant_is_always_right(name: str, tree: dict[str, int]) -> None:
    """A wrong position, mask or window in the assistant's forest would cost acceptance: both trees hold the greedy branch."""
    results = engine(name, name).generate(PROMPTS, method="model", **tree, max_new_tokens=NEW)
    assert [result.token_ids for result in results] == [reference(name, row) for row in range(len(PROMPTS))]
    for result in results:
        assert result.stats.delivered[:-1] == [tree["depth"] + 1] * (result.stats.steps - 1)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_who_shares_the_numbers_and_the_distribution_is_always_right(temperature: float) -> None:
    """At every level, row and temperature the assistant's race has the target's winner; without the numbers it has not.
    The text is the same, with them, without them, and without drafting."""
    chosen, tree = engine("llama", "llama"), {"tokens": 4, "depth": 4, "width": 1}
    call: dict[str, Any] = {"temperature": temperature, "seed": [3, 4, 5, 6][: len(PROMPTS)], "max_new_tokens": NEW}
    plain = chosen.generate(PROMPTS, method="autoregressive", **call)
    knowing, ignorant = (chosen.generate(PROMPTS, method="model", coupled=each, **tree, **call) for each in (True, False))
    for results in (knowing, ignorant):
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    for knows, does_not in zip(knowing, ignorant, strict=True):
        assert knows.stats.delivered[:-1] == [tree["depth"] + 1] * (knows.stats.steps - 1)
        assert does_not.stats.steps > knows.stats.steps


def test_a_text_that_repeats_itself_is_looked_up() -> None:
    """This random model soon runs in circles: from the second round on whole branches are accepted."""
    results = engine("olmo2", "llama").generate(PROMPTS, method="ngram", max_new_tokens=75)
    assert max(max(result.stats.delivered) for result in results) == 9, "depth 8 and the target's own"
    assert min(result.stats.tau for result in results) > 2


@pytest.mark.parametrize("method", SETTINGS)
def test_refilled_rows_and_later_turns(method: str) -> None:
    chosen = engine("llama", "llama")
    job = chosen.prepare(PROMPTS, method=method, **SETTINGS[method], max_new_tokens=6)
    waiting = job.requests[2:]

    def refill(count: int) -> list[Request]:
        return [waiting.pop(0) for _ in range(min(count, len(waiting)))]

    session = chosen.prepare(PROMPTS[:2], method=method).session
    for _ in decode(chosen.target, session, job.policy, job.requests[:2], refill):
        pass
    assert [request.ids for request in job.requests] == [reference("llama", row)[:6] for row in range(len(PROMPTS))]

    talking = Engine(chosen.target, None, method, chosen.assistant)
    session = talking.session()
    first = talking.generate(PROMPTS[1], session=session, max_new_tokens=5)
    longer = [*PROMPTS[1], *first.token_ids, 3, 4]
    second = talking.generate(longer, session=session, max_new_tokens=9)
    assert second.token_ids == families.greedy(families.model("llama"), longer, 9)
    assert session.drafter is not None and isinstance(session.drafter, ModelDrafter) == (method == "model")


def test_sampled_tokens_do_not_depend_on_the_method() -> None:
    chosen = engine("llama", "llama")
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_new_tokens": 20}
    texts = [chosen.generate(PROMPTS[2], method=method, **options).token_ids for method in ("autoregressive", *SETTINGS)]
    assert texts[0] == texts[1] == texts[2]


def test_what_is_missing_or_does_not_fit_is_told() -> None:
    target = Target(families.model("llama"), name="tiny")
    with pytest.raises(EyasError, match=r"needs a smaller model.*--assistant"):
        Engine(target, None, "model").generate([1], max_new_tokens=2)
    with pytest.raises(EyasError, match="has no setting rank_by"):
        Engine(target, None, "ngram").generate([1], rank_by="confidence")
    other = Target(families.model("gpt2"), name="small")
    other.vocab_size = VOCABULARY + 1
    with pytest.raises(EyasError, match=f"small has {VOCABULARY + 1} tokens, but tiny has {VOCABULARY}"):
        Engine(target, None, "model", other)
