"""The user's options against transformers' own processors, node by node, and the requests' random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from eyas.accept import walk
from eyas.errors import EyasError
from eyas.noise import Noise, race
from eyas.sampling import Rule, SamplingOptions, chooser, processors
from eyas.tree import DraftTree, root_tree
from tests.helpers import FixedNoise, few, invert, make_tree, path_of, properties

VOCAB = 12
CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf


def rule_for(options: SamplingOptions, prompt_length: int, ends: Sequence[int] = (), noise: Noise | None = None) -> Rule:
    """A request's rule as the engine makes it."""
    return Rule(options, processors(options, prompt_length, ends, CPU), noise or Noise(0))


# --- options


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": NAN},
        {"temperature": INF},
        {"temperature": 1e-40},  # logits / temperature would overflow to NaN
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_k": True},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": -0.5},
        {"top_p": NAN},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": NAN},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": NAN},
        {"repetition_penalty": INF},
        {"frequency_penalty": NAN},
        {"frequency_penalty": INF},
        {"presence_penalty": -INF},
        {"min_new_tokens": -1},
        {"min_new_tokens": 1.5},
        {"logit_bias": {3: NAN}},
        {"logit_bias": {3: INF}},
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(options: dict[str, Any]) -> None:
    """Otherwise they give NaN, a token outside the vocabulary or an error deep inside transformers."""
    (name,) = options
    with pytest.raises(EyasError, match=name) as caught:
        SamplingOptions(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 2},
        {"temperature": 1},
        {"temperature": 1e-30},
        {"temperature": 1e30},
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 1.0, "top_k": 10_000},
        {"temperature": 1.0, "top_p": 1},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "min_p": 1},
        {"temperature": 1.0, "min_p": 0},
        {"repetition_penalty": 2},
        {"frequency_penalty": 1, "presence_penalty": -1},
        {"logit_bias": {3: -INF, 4: 2}},
        {"logit_bias": {}},
        {"min_new_tokens": 3},
    ],
    ids=str,
)
def test_unusual_but_good_options_work(options: dict[str, Any]) -> None:
    """Whole numbers for real ones, and both ends of every range, choose a token like any other value."""
    logits = torch.linspace(-2, 30, VOCAB)
    token = rule_for(SamplingOptions(**options), 2, (3,)).choose(logits, lambda: torch.tensor([[1, 2, 2]]), 0)
    assert 0 <= int(token) < VOCAB


def test_defaults_are_greedy_decoding_of_raw_logits() -> None:
    """Nothing but the argmax, and no processor in its way."""
    rule = rule_for(SamplingOptions(), 3, (1,))
    assert not rule.chain
    assert rule.choose(torch.tensor([0.0, 5.0, 4.0]), lambda: pytest.fail("no processor needs the prefix"), 0) == 1


def test_from_defaults_takes_the_models_own() -> None:
    """Penalties and warpers of the model's generation_config hold for every method alike, unless the call overrides."""
    config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2, min_new_tokens=4
    )
    options = SamplingOptions.from_defaults(config)
    assert options == SamplingOptions(0.7, 20, 0.9, 0.05, 1.2, min_new_tokens=4)
    given_all = SamplingOptions.from_defaults(config, temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=None)
    assert given_all == SamplingOptions(0.0, 0, 1.0, 0.05, 1.2, min_new_tokens=4)


def test_from_defaults_samples_only_where_the_model_does() -> None:
    """A temperature beside do_sample=False is not used by ``generate`` either."""
    assert SamplingOptions.from_defaults(GenerationConfig()) == SamplingOptions()
    quiet = GenerationConfig(repetition_penalty=1.1)
    quiet.temperature = 0.7
    assert SamplingOptions.from_defaults(quiet) == SamplingOptions(repetition_penalty=1.1)
    assert SamplingOptions.from_defaults(GenerationConfig(do_sample=True)).temperature == 1.0
    assert SamplingOptions.from_defaults(quiet, temperature=0.3).temperature == 0.3
    assert SamplingOptions.from_defaults(None, top_k=3) == SamplingOptions(top_k=3)
    with pytest.raises(EyasError, match="top_p"):
        SamplingOptions.from_defaults(GenerationConfig(), top_p=0.0)


# --- processors


@cache
def tiny_model() -> LlamaForCausalLM:
    """A model only to ask for its processors."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
            vocab_size=VOCAB, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def transformers_own(options: SamplingOptions, prompt_length: int, ends: Sequence[int]) -> LogitsProcessorList:
    """What ``generate`` itself would apply for these settings."""
    config = GenerationConfig(
        do_sample=options.temperature > 0,
        temperature=options.temperature or None,
        top_k=options.top_k or 0,
        top_p=options.top_p,
        min_p=options.min_p or None,
        repetition_penalty=options.repetition_penalty,
        min_new_tokens=options.min_new_tokens or None,
        sequence_bias=[[[token], float(bias)] for token, bias in (options.logit_bias or {}).items()] or None,
        eos_token_id=list(ends) or None,
    )
    model = tiny_model()
    model._prepare_special_tokens(config, device="cpu")
    chain: LogitsProcessorList = model._get_logits_processor(config, prompt_length, device="cpu")
    return chain


OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.0, 1.8]),
    top_k=st.sampled_from([None, 0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    min_new_tokens=st.integers(0, 6),
    logit_bias=st.sampled_from([None, {2: 5.0}, {0: -INF, 7: -3.0}]),
)
IDS = st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=10)


@properties
@given(OPTIONS, IDS, st.integers(1, 4), st.integers(0, 10**6), st.sampled_from([(), (3,), (0, 5)]))
def test_processors_equal_transformers_own(
    options: SamplingOptions, ids: list[int], prompt_length: int, seed: int, ends: tuple[int, ...]
) -> None:
    """Another processor, order or setting than ``generate`` uses gives another distribution than its baseline."""
    scores = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    prefix = torch.tensor([ids])
    ours, theirs = processors(options, prompt_length, ends, CPU), transformers_own(options, prompt_length, ends)
    assert [type(one).__name__ for one in ours] == [type(one).__name__ for one in theirs]
    assert torch.equal(ours(prefix, scores.clone()), theirs(prefix, scores.clone()))


def test_occurrence_penalties_by_hand() -> None:
    """OpenAI's definition: over generated tokens only, prompt excluded; frequency by count, presence once."""
    chain = processors(SamplingOptions(frequency_penalty=0.5, presence_penalty=2.0), 3, (), CPU)
    scores = torch.arange(6.0)[None]
    found = chain(torch.tensor([[5, 5, 1, 4, 2, 4, 4]]), scores.clone())
    assert found.tolist() == [[0.0, 1.0, 2.0 - 0.5 - 2.0, 3.0, 4.0 - 1.5 - 2.0, 5.0]]
    negative = processors(SamplingOptions(frequency_penalty=-1.0), 3, (), CPU)
    assert negative(torch.tensor([[5, 5, 1, 4, 4]]), scores.clone()).tolist() == [[0.0, 1.0, 2.0, 3.0, 6.0, 5.0]]


def test_penalties_and_warpers_come_in_generates_order() -> None:
    """Occurrence penalties stand with the other penalties: before the minimum length, and before any warper."""
    options = SamplingOptions(0.5, 3, 0.9, 0.1, 1.2, 0.5, 0.5, {1: 1.0}, 2)
    assert [type(one).__name__ for one in processors(options, 3, (1,), CPU)] == [
        "SequenceBiasLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "OccurrencePenalty",
        "MinNewTokensLengthLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]


# --- at the nodes of a tree

TREE = ([5, 1, 2, 1, 3, 2], [0, 0, 0, 1, 1, 2])


def branch_of(tree: DraftTree, node: int, row: int) -> list[int]:
    """Node indices from the root to a node, padded as the walk pads them: by nothing, for live rows."""
    nodes = [node]
    while nodes[0]:
        nodes.insert(0, int(tree.parents[row, nodes[0]]))
    return nodes


@few
@given(st.data())
def test_each_node_is_judged_with_its_own_prefix(data: st.DataObject) -> None:
    """Penalties differ along branches, rows and rules; a shared prefix or rule would choose other tokens."""
    tree = make_tree([TREE[0], [4, 4, 4, 0, 1, 4]], [TREE[1], [0, 0, 1, 1, 2, 4]])
    options = [data.draw(OPTIONS), data.draw(OPTIONS)]
    histories, prompt_lengths = [data.draw(IDS), data.draw(IDS)], [2, 3]
    emitted = [len(history) - length + 1 for history, length in zip(histories, prompt_lengths, strict=True)]
    logits = torch.randn(2, tree.size, VOCAB, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    seeds = [data.draw(st.integers(0, 99)) for _ in "ab"]
    rules = [
        rule_for(option, length, (3,), Noise(seed)) for option, length, seed in zip(options, prompt_lengths, seeds, strict=True)
    ]
    choose = chooser(rules, logits, tree, histories, emitted)
    for node in range(tree.size):
        for row in range(2):
            # the other row stands somewhere else, as deep
            depth = int(tree.depths[row, node])
            other = next((n for n in range(tree.size) if int(tree.depths[1 - row, n]) == depth), None)
            if other is None:
                continue
            pair = [node, other] if row == 0 else [other, node]
            path = torch.tensor([branch_of(tree, pair[0], 0), branch_of(tree, pair[1], 1)])
            found = choose(torch.tensor(pair), path)[row]
            prefix = [*histories[row], int(tree.tokens[row, 0]), *path_of(tree, node, row)]
            chain = transformers_own(options[row], prompt_lengths[row], (3,))
            scores = chain(torch.tensor([prefix]), logits[row, node].clone()[None])[0]
            if options[row].temperature == 0:
                assert found == scores.argmax()
            else:
                assert found == race(scores.softmax(-1), rules[row].noise(emitted[row] + depth, VOCAB))


def test_penalties_differ_along_branches() -> None:
    """The same logits at two leaves; only the branch that used the favourite is kept from repeating it."""
    tree = make_tree([[0, 1, 2]], [[0, 0, 0]])
    logits = torch.tensor([[[0.0] * 4, [0.0, 3.0, 2.9, 0.0], [0.0, 3.0, 2.9, 0.0]]])
    rule = rule_for(SamplingOptions(repetition_penalty=1.5), 1)
    choose = chooser([rule], logits, tree, [[3]], [1])
    assert choose(torch.tensor([1]), torch.tensor([[0, 1]])).tolist() == [2]
    assert choose(torch.tensor([2]), torch.tensor([[0, 2]])).tolist() == [1]


def test_a_batch_mixes_rules() -> None:
    """A greedy row beside a sampled one keeps its own rule, and plain rows take the short way to the same token."""
    logits = torch.randn(3, 1, VOCAB, generator=torch.Generator().manual_seed(0))
    tree = root_tree(torch.tensor([1, 1, 1]))
    hot = rule_for(SamplingOptions(temperature=5.0), 1, (), Noise(3))
    mixed = chooser([rule_for(SamplingOptions(), 1), hot, hot], logits, tree, [[0]] * 3, [0] * 3)
    found = mixed(torch.zeros(3, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64))
    assert found[0] == logits[0, 0].argmax()
    expected = race((logits[1:, 0] / 5.0).softmax(-1), Noise(3)(0, VOCAB))
    assert torch.equal(found[1:], expected) and not torch.equal(expected, logits[1:, 0].argmax(-1))
    plain = chooser([rule_for(SamplingOptions(), 1)] * 3, logits, tree, [[0]] * 3, [0] * 3)
    assert torch.equal(plain(torch.zeros(3, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)), logits.argmax(-1)[:, 0])


def test_half_precision_logits_are_judged_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warpers see float32, as in ``generate``: in bfloat16 every probability would be off by some thousandths."""
    monkeypatch.setattr("eyas.sampling.race", invert)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    options = SamplingOptions(temperature=0.7, top_p=0.98)
    scores = transformers_own(options, 1, ())(torch.tensor([[1]]), logits.float()[None])
    for uniform in torch.linspace(0, 0.9999, 997).tolist():
        found = rule_for(options, 1, (), FixedNoise([uniform])).choose(logits, lambda: torch.tensor([[1]]), 0)
        assert found == invert(scores[0].softmax(-1), torch.tensor([uniform]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("minimum", range(7))
def test_end_tokens_are_forbidden_inside_a_tree(minimum: int, temperature: float) -> None:
    """`min_new_tokens` holds at every node and at the bonus: not a node too early, nor too late."""
    end, prompt_length = 3, 2
    size = 4
    tree = make_tree([[0, end, end, end]], [[0, 0, 1, 2]])  # the draft proposes the end everywhere
    logits = torch.zeros(1, size, 5)
    logits[..., end], logits[..., 4] = 50.0, 25.0
    # two new tokens so far: one in the history, the root; the choice at depth d is new token 3 + d
    rule = rule_for(SamplingOptions(temperature=temperature, min_new_tokens=minimum), prompt_length, (end,))
    choose = chooser([rule], logits, tree, [[1, 1, 2]], [2])
    for depth in range(size):
        token = int(choose(torch.tensor([depth]), torch.arange(depth + 1)[None]))
        assert token == (end if 3 + depth > minimum else 4), f"new token {3 + depth} of at least {minimum} before the end"
    accepted = walk(tree, choose)
    assert accepted.length.tolist() == [0 if minimum > 2 else 3]
    assert accepted.next_token.tolist() == [4 if minimum > 2 else end]


def test_forbidden_tokens_stay_forbidden_everywhere() -> None:
    """A bias of −inf bans a token at every node and at the bonus, whatever the numbers."""
    tree = make_tree([[0, 2, 2]], [[0, 0, 1]])
    logits = torch.zeros(1, 3, 4)
    logits[..., 2] = 80.0
    for seed in range(50):
        for temperature in (0.0, 1.0):
            options = SamplingOptions(temperature=temperature, logit_bias={2: -INF})
            rule = rule_for(options, 1, (), Noise(seed))
            accepted = walk(tree, chooser([rule], logits, tree, [[1]], [1]))
            assert accepted.length.tolist() == [0] and accepted.next_token.item() != 2


# --- random numbers


def test_a_choice_uses_the_number_of_its_token() -> None:
    """The numbers of new token j decide token j: at the root of one step or deep in another's tree."""
    numbers = Noise(5)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    tree = make_tree([[1, 2, 3]], [[0, 0, 1]])
    rule = rule_for(SamplingOptions(temperature=1.0), 1, (), numbers)
    deep = chooser([rule], logits.expand(1, 3, -1), tree, [[0, 0]], [4])
    for depth in range(3):
        path = torch.arange(depth + 1)[None]
        shallow = chooser([rule], logits[None, None], root_tree(torch.tensor([9])), [[0]], [4 + depth])
        found: Tensor = deep(torch.tensor([depth]), path)
        assert found == shallow(torch.tensor([0]), torch.tensor([[0]]))
        assert found == race(logits.softmax(-1), Noise(5)(4 + depth, VOCAB))
