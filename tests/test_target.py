"""Wrapping stock models: trees are verified as plain forwards would, and what cannot be is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel

from eyas import EyasError
from eyas import target as rooms
from eyas.loading import load_target
from eyas.target import Target, check_configuration, end_tokens
from tests import families
from tests.drafts import engine
from tests.families import FAMILIES, SIZES, VOCABULARY
from tests.helpers import make_tree

PARENTS = [[0, 0, 0, 0, 1, 1, 3, 4, 6]]  # depths 0 1 1 1 2 2 2 3 3: siblings, cousins, and a leaf beside deep branches
LAYERS = {name: FAMILIES[name]().config.num_hidden_layers for name in FAMILIES}


def target_of(name: str) -> Target:
    return engine(name).target


def branch(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to a node."""
    return [0] if node == 0 else [*branch(parents, parents[node]), node]


@pytest.mark.parametrize("name", FAMILIES)
def test_feature_is_what_the_head_reads(name: str) -> None:
    """A feature taken before the final norm, or logits without the model's soft-cap, would make every draft wrong."""
    target = target_of(name)
    (prompt,) = families.prompts(1, shortest=12)
    features, logits = target.prefill(target.new_cache(1), [prompt])
    torch.testing.assert_close(target.score(features)[0, -1], logits[0], atol=1e-5, rtol=1e-5)
    plain = target.model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(target.score(features)[0], plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_node_of_a_tree_equals_a_plain_forward(name: str) -> None:
    """A node that sees a sibling, misses its prefix or window, or stands at the wrong position, has other logits."""
    target = target_of(name)
    contexts = families.prompts(3, seed=1, shortest=3, longest=20)
    assert len({len(context) for context in contexts}) == 3 and max(map(len, contexts)) > families.WINDOW
    tokens = torch.randint(0, VOCABULARY, (3, len(PARENTS[0])), generator=torch.Generator().manual_seed(2)).tolist()
    tree = make_tree(tokens, PARENTS * 3)
    cache = target.new_cache(3)
    target.prefill(cache, contexts)
    logits, features = target.verify(cache, tree)
    for row, context in enumerate(contexts):
        for node in range(tree.size):
            text = [*context, *(tokens[row][step] for step in branch(PARENTS[0], node))]
            plain = target.model(torch.tensor([text]), output_hidden_states=True)
            torch.testing.assert_close(logits[row, node], plain.logits[0, -1], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(features[row, node], plain.hidden_states[-1][0, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_in_chunks_and_turns_equals_one_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt, or a later turn after rows already cached, must leave the same rows, features and logits."""
    target = target_of(name)
    prompts = families.prompts(3, seed=3, shortest=2, longest=19)
    whole = target.new_cache(3)
    features, logits = target.prefill(whole, prompts)
    monkeypatch.setattr(rooms, "PREFILL_CHUNK", 5)
    chunked = target.new_cache(3)
    target.prefill(chunked, [prompt[:1] for prompt in prompts])
    later, final = target.prefill(chunked, [prompt[1:] for prompt in prompts])
    assert chunked.lengths == whole.lengths == [len(prompt) for prompt in prompts]
    torch.testing.assert_close(final, logits, atol=1e-4, rtol=1e-4)
    for row, prompt in enumerate(prompts):
        rows = slice(0, len(prompt))
        torch.testing.assert_close(later[row, : len(prompt) - 1], features[row, 1 : len(prompt)], atol=1e-4, rtol=1e-4)
        for one, other in zip(whole.layers, chunked.layers, strict=True):
            torch.testing.assert_close(other.keys[row, :, rows], one.keys[row, :, rows], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(other.values[row, :, rows], one.values[row, :, rows], atol=1e-5, rtol=1e-4)


def test_feature_layers_are_concatenated_low_to_high() -> None:
    """EAGLE-3 reads several layers' states; in another order its fc would mix them up."""
    model = families.model("qwen2_window")
    target = Target(model, feature_layers=(0, 2))
    features, _ = target.prefill(target.new_cache(1), [[1, 2, 3]])
    states = model(torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(features, torch.cat([states[0], states[2]], dim=-1))


def small(kind: str, **changes: Any) -> Any:
    """A tiny configuration of a kind that is not supported."""
    return getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "mamba": (lambda: small("Mamba"), "linear_attention layers"),
    "mamba2": (lambda: small("Mamba2", num_heads=8, head_dim=8), "linear_attention layers"),
    "jamba": (lambda: small("Jamba"), "mamba layers"),
    "qwen3_next": (lambda: small("Qwen3Next"), "linear_attention layers"),
    "lfm2": (lambda: small("Lfm2", layer_types=["conv", "full_attention"]), "conv layers"),
    "rwkv": (lambda: transformers.RwkvConfig(), "is not an attention model"),
    "llama4_text": (lambda: small("Llama4Text"), "chunked_attention layers"),
    "t5": (lambda: transformers.T5Config(), "is an encoder-decoder"),
    "bloom": (lambda: transformers.BloomConfig(), "ALiBi"),
    "mpt": (lambda: transformers.MptConfig(), "ALiBi"),
    "falcon": (lambda: transformers.FalconConfig(alibi=True), "ALiBi"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_configurations_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Without a refusal these decode to garbage; and it must come before gigabytes of weights are read."""
    make, reason = UNSUPPORTED[kind]
    config = make()
    with pytest.raises(EyasError, match=rf"target some/model: {kind} .*{reason}") as caught:
        check_configuration(config, "some/model")
    assert "\n" not in str(caught.value)
    config.save_pretrained(tmp_path)  # no weights beside it
    with pytest.raises(EyasError, match=reason):
        load_target(tmp_path)


def refusal(model: Any, tokenizer: Any = None) -> str:
    """The one line in which a loaded model is refused."""
    with pytest.raises(EyasError) as caught:
        Target(model, tokenizer, name="the model")
    message = str(caught.value)
    assert "the model" in message and "\n" not in message
    return message


def test_loaded_encoder_decoder_and_alibi_are_refused() -> None:
    """A model handed over as an object is judged like one loaded by name."""
    t5 = transformers.T5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    assert "encoder-decoder" in refusal(transformers.T5ForConditionalGeneration(t5))
    bloom = transformers.BloomConfig(vocab_size=16, hidden_size=16, n_layer=1, n_head=2)
    assert "ALiBi" in refusal(transformers.BloomForCausalLM(bloom))


def test_what_is_no_causal_model_is_refused() -> None:
    """A bare module or a model without LM head must not fail later with an AttributeError."""
    bare = nn.Linear(2, 2)
    bare.config = families.model("llama").config  # type: ignore[assignment]
    assert "no transformers causal language model" in refusal(bare)
    assert "no transformers causal language model" in refusal(transformers.LlamaModel(families.model("llama").config))


def test_attention_without_masks_is_refused() -> None:
    """Flash and flex attention drop a 4-D mask: every node would see its siblings."""
    model = copy.deepcopy(families.model("llama"))
    model.config._attn_implementation = "flash_attention_2"
    message = refusal(model)
    assert "flash_attention_2" in message and "attn_implementation='sdpa'" in message


class Deaf(LlamaForCausalLM):
    """Ignores the mask it is given."""

    def forward(self, *args: Any, position_ids: Any = None, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        kwargs["attention_mask"] = None
        return super().forward(*args, position_ids=position_ids, logits_to_keep=logits_to_keep, **kwargs)


class Shifted(LlamaForCausalLM):
    """Counts positions itself, by stored rows."""

    def forward(self, *args: Any, position_ids: Any = None, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        return super().forward(*args, logits_to_keep=logits_to_keep, **kwargs)


class Closed(LlamaForCausalLM):
    """Takes no positions."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, logits_to_keep: Any = 0) -> Any:
        return super().forward(input_ids, attention_mask)


class Failing(LlamaForCausalLM):
    """Cannot take a tree."""

    def forward(self, *args: Any, position_ids: Any = None, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        raise RuntimeError("no such kernel\nin this build")


class Vague(LlamaForCausalLM):
    """Has a window in its configuration and no layer that says whether it applies."""


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Deaf, "does not honour 4-D tree masks"),
        (Shifted, "does not honour 4-D tree masks"),
        (Closed, "takes no position_ids"),
        (Failing, r"cannot verify trees (no such kernel)"),
    ],
)
def test_the_probe_finds_models_that_do_not_honour_trees(kind: type[PreTrainedModel], reason: str) -> None:
    """A foreign model that ignores mask or positions emits wrong tokens without any error."""
    model = families.draw_weights(kind(families.model("llama").config))
    message = refusal(model)
    assert reason in message and kind.__name__ in message


def test_a_window_that_no_layer_owns_is_refused() -> None:
    """Some configurations carry a sliding_window that the model does not apply: the mask would differ from its own."""
    model = families.draw_weights(Vague(families.model("llama").config))
    model.config = copy.deepcopy(model.config)
    model.config.sliding_window = 8
    assert "Vague does not say to which of its layers sliding_window applies" in refusal(model)
    subclass = type("Own", (MistralForCausalLM,), {})  # a subclass of a model that does apply it is served
    assert Target(families.draw_weights(subclass(families.model("mistral").config))).layers == 2


def test_targets_that_overflow_are_refused() -> None:
    """A model whose logits are NaN in this dtype would pass every comparison with itself."""
    model = copy.deepcopy(families.model("llama"))
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    message = refusal(model)
    assert "not finite in torch.float32" in message and "bfloat16" in message


def test_end_tokens_are_the_union_of_all_that_name_them() -> None:
    """Read from one place only, an end token that another declares runs past the end of the answer."""
    model = copy.deepcopy(families.model("llama"))
    assert end_tokens(model, None) == frozenset()
    model.config.eos_token_id = 3
    model.generation_config.eos_token_id = [5, 7]
    assert Target(model, SimpleNamespace(eos_token_id=9)).eos_ids == {3, 5, 7, 9}  # type: ignore[arg-type]


def test_wrapping_leaves_the_model_as_it_is() -> None:
    """A changed configuration or generation config would change what the user's own ``generate`` says."""
    model = copy.deepcopy(families.model("gemma3"))
    before = (model.config.to_dict(), model.generation_config.to_dict(), copy.deepcopy(model.state_dict()))
    target = Target(model)
    target.prefill(target.new_cache(1), [[1, 2, 3]])
    assert model.config.to_dict() == before[0] and model.generation_config.to_dict() == before[1]
    assert all(torch.equal(value, before[2][key]) for key, value in model.state_dict().items())
    assert target.context_limit == families.CONTEXT and target.layers == LAYERS["gemma3"]
