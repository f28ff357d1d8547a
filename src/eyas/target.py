"""Any stock transformers causal language model behind two verbs, prefill and verify a tree; its cache commits a path.

The model is wrapped, never changed: it is handed its own inputs (ids, positions, a 4-D attention mask per layer type, a cache)
and asked for logits and ``hidden_states``, whose last entry is the state after the final norm, the *feature* that EAGLE heads
read. `Target` refuses at construction what it could not serve losslessly.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eyas.cache import RowCache
from eyas.errors import EyasError, first_line
from eyas.masks import additive, tree_visibility, within_window
from eyas.packing import is_four_bit
from eyas.transfer import upload
from eyas.tree import DraftTree

PREFILL_CHUNK = 1024  # prompt tokens a forward: bounds the memory of masks and of the layers' hidden states
PROBE_TOLERANCE = {torch.float32: 0.001, torch.float64: 0.001}  # of the logits' range; half precisions round coarsely
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


class Target:
    """A causal language model that verifies draft trees.

    Args:
        model: a loaded transformers causal LM; used as it is, on its device and in its dtype.
        tokenizer: its tokenizer, or None where prompts come as token ids.
        name: what to call it in messages.
        feature_layers: indices into ``hidden_states`` whose concatenation is the feature; (−1,) is EAGLE-1/2's.

    Raises:
        EyasError: the model is none that tree verification can serve losslessly; the message names why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str | None = None,
        feature_layers: tuple[int, ...] = (-1,),
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path or type(model).__name__
        self.feature_layers = feature_layers
        self.gguf: Path | None = None  # the file it was read from, if it was one
        check_configuration(model.config, self.name)
        check_class(model, self.name)
        self.config = model.config.get_text_config()
        self.layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        self.context_limit = context_limit(self.config)
        self.eos_ids = end_tokens(model, tokenizer)
        self.embed: nn.Module = model.get_input_embeddings()
        self.head: nn.Module = model.get_output_embeddings()
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5.24
        self._probe()

    @property
    def device(self) -> torch.device:
        """Where the model lies and inputs go."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The model's own dtype, kept for masks, features and the draft."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def precision(self) -> str:
        """For people: the dtype's name, or that weights are of 4 bits besides."""
        return str(self.dtype).removeprefix("torch.") + (", weights of 4 bits" if is_four_bit(self.model) else "")

    def new_cache(self, batch: int, capacity: int = 0) -> RowCache:
        """An empty cache for ``batch`` rows of at least ``capacity`` tokens."""
        return RowCache(self.layers, batch, capacity)

    @torch.no_grad()
    def prefill(self, cache: RowCache, prompts: Sequence[Sequence[int]], with_features: bool = True) -> tuple[Tensor, Tensor]:
        """Run prompt tokens after what the cache holds, and commit them.

        Args:
            cache: a cache of ``len(prompts)`` rows, empty or holding each row's earlier tokens.
            prompts: token ids of each row, at least one; lengths may differ.
            with_features: False spares the features; an empty tensor takes their place.

        Returns:
            Features [B, longest, H·layers] (rows past a prompt's length are rubbish) and the logits [B, V] after each prompt's
            last token.
        """
        lengths = [len(prompt) for prompt in prompts]
        features, logits = [], torch.empty(0)
        for begin in range(0, max(lengths), PREFILL_CHUNK):
            width = min(PREFILL_CHUNK, max(lengths) - begin)
            counts = [min(max(length - begin, 0), width) for length in lengths]
            ids = [list(prompt[begin : begin + width]) for prompt in prompts]
            tokens = upload([row + [0] * (width - len(row)) for row in ids], self.device)
            last = sorted({count - 1 for count in counts if count})  # prompts that end before repeat their old logits
            chunk, some = self._append(cache, tokens, upload(last, self.device), with_features)
            places = upload([last.index(count - 1) if count else 0 for count in counts], self.device)
            here = some[torch.arange(len(counts), device=self.device), places]
            ends = upload([bool(count) for count in counts], self.device)
            logits = torch.where(ends[:, None], here, logits) if begin else here
            features.append(chunk)
            cache.keep([list(range(count)) for count in counts])
        return torch.cat(features, dim=1), logits

    def _append(self, cache: RowCache, tokens: Tensor, keep_logits: Tensor, with_features: bool) -> tuple[Tensor, Tensor]:
        """Causal forward of right-padded tokens [B, n] after each row's prefix; logits at columns ``keep_logits`` only."""
        batch, n = tokens.shape
        steps = torch.arange(n, device=self.device)
        if cache.start == 0:  # nothing cached: the model's own causal masks, and its fastest attention
            return self._forward(cache, tokens, steps.expand(batch, n), None, keep_logits, with_features)
        causal = (steps[:, None] >= steps).expand(batch, n, n)
        lengths = upload(cache.lengths, self.device)
        positions = lengths[:, None] + steps
        return self._forward(cache, tokens, positions, causal, keep_logits, with_features)

    @torch.no_grad()
    def verify(self, cache: RowCache, tree: DraftTree, with_features: bool = True) -> tuple[Tensor, Tensor]:
        """Run all nodes of the trees in one forward; each sees its prefix, its ancestors and itself.

        Args:
            cache: the committed prefixes.
            tree: what to verify.
            with_features: False spares the features; an empty tensor takes their place.

        Returns:
            Logits [B, n, V] exactly as the model computes them, and features [B, n, H·layers]. The nodes' rows are appended to
            the cache; call `RowCache.keep` with the accepted path.
        """
        lengths = upload(cache.lengths, self.device)
        positions = lengths[:, None] + tree.depths
        # a lone token needs no mask, but on a CPU grouped-query attention is up to twice as slow without one
        alone = tree.size == 1 and len(set(cache.lengths)) == 1 and self.device.type != "cpu"
        features, logits = self._forward(cache, tree.tokens, positions, None if alone else tree.ancestors, 0, with_features)
        return logits, features

    def _forward(
        self,
        cache: RowCache,
        tokens: Tensor,
        positions: Tensor,
        relation: Tensor | None,
        keep_logits: int | Tensor,
        with_features: bool,
    ) -> tuple[Tensor, Tensor]:
        """One forward of the model; ``relation`` [B, n, n]: which new nodes each one sees, None: causal, by the model."""
        positions = positions.clamp(max=self.context_limit - 1)  # only nodes that will be cut can lie beyond
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=None if relation is None else self._masks(cache, positions, relation),
            use_cache=True,
            output_hidden_states=with_features,
            logits_to_keep=keep_logits,
            return_dict=True,
            **{self._cache_name: cache},
        )
        if not with_features:
            return output.logits.new_empty(len(tokens), 0, 0), output.logits
        states = [output.hidden_states[layer] for layer in self.feature_layers]
        return states[0] if len(states) == 1 else torch.cat(states, dim=-1), output.logits

    def _masks(self, cache: RowCache, positions: Tensor, relation: Tensor) -> Tensor | dict[str, Tensor]:
        """The additive mask, or one for each layer type, as this model's forward expects it."""
        visible = tree_visibility(cache.prefix_mask(self.device), relation)
        window: int | None = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        kinds = set(kinds) if kinds else {"sliding_attention" if window else "full_attention"}
        masks = {}
        for kind in kinds:
            slides = kind == "sliding_attention"
            seen = visible & within_window(cache.start, positions, window) if slides and window else visible
            masks[kind] = additive(seen, self.dtype)
        return masks if getattr(self.config, "layer_types", None) else masks.popitem()[1]

    def score(self, features: Tensor) -> Tensor:
        """The target's logits [..., V] for features [..., H], real or guessed."""
        return self.postprocess(self.head(features))

    def postprocess(self, logits: Tensor) -> Tensor:
        """What the model does to its LM head's output before it returns it: scaling and soft-capping."""
        config = self.config
        if getattr(config, "logit_scale", None):
            logits = logits * config.logit_scale
        if getattr(config, "logits_scaling", None):
            logits = logits / config.logits_scaling
        cap = getattr(config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    @torch.no_grad()
    def _probe(self) -> None:
        """Verify a small tree and compare with plain forwards: proof that this model honours trees, or a refusal."""
        context = [token % self.vocab_size for token in (3, 5, 7, 11)]
        siblings = [token % self.vocab_size for token in (2, 13)]
        tokens = upload([[context[-1], *siblings]], self.device)
        parents = torch.zeros_like(tokens)
        depths = upload([[0, 1, 1]], self.device)
        tree = DraftTree(tokens, parents, torch.zeros_like(tokens, dtype=torch.float32), depths, 1)
        try:
            cache = self.new_cache(1)
            self.prefill(cache, [context[:-1]])
            logits, _ = self.verify(cache, tree)
            for node, sibling in enumerate(siblings, start=1):
                ids = upload([[*context, sibling]], self.device)
                plain = self.model(input_ids=ids, use_cache=False).logits[0, -1].float()
                difference = (logits[0, node].float() - plain).abs().max()
                allowed = PROBE_TOLERANCE.get(self.dtype, 0.1) * (plain.max() - plain.min()) + 1e-5
                if not bool(torch.isfinite(plain).all()):
                    raise EyasError(
                        f"target {self.name}: its logits are not finite in {self.dtype}; load it with dtype float32 or bfloat16"
                    )
                if difference > allowed:
                    raise EyasError(
                        f"target {self.name} ({type(self.model).__name__}) does not honour 4-D tree masks (its logits change "
                        f"by {float(difference):.3g}); use transformers' own generate for this model"
                    )
        except EyasError:
            raise
        except Exception as error:  # whatever a foreign model raises, the user gets its name and the reason
            raise EyasError(
                f"target {self.name} ({type(self.model).__name__}) cannot verify trees ({first_line(error)}); "
                "only plain causal attention is supported"
            ) from error


def context_limit(config: Any) -> int:
    """The longest text, prompt and answer together, that can be decoded losslessly.

    Rotary scalings that change with the length of the *forward* ("dynamic", "longrope") would turn a token differently in a
    tree than alone; below the original length they are constant, so that is where the context ends.
    """
    limit: int = getattr(config, "max_position_embeddings", None) or 1 << 30
    rope = getattr(config, "rope_parameters", None) or {}
    for scaling in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if scaling.get("rope_type") in ("dynamic", "longrope"):
            original = scaling.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, original or limit)
    return limit


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Every token that ends a text: the union of configuration, generation configuration and tokenizer."""
    found: set[int] = set()
    for source in (model.config, model.config.get_text_config(), model.generation_config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return frozenset(found)


def check_configuration(config: Any, name: str) -> None:
    """Refuse, before weights are read where possible, what cannot be decoded with trees.

    Raises:
        EyasError: an encoder-decoder, a state-space or linear-attention model, or another attention that is not plain.
    """
    remedy = "only decoders with plain causal attention are supported"
    kind = getattr(config, "model_type", "model")
    if getattr(config, "is_encoder_decoder", False):
        raise EyasError(f"target {name}: {kind} is an encoder-decoder; {remedy}")
    text = config.get_text_config()
    others = set(getattr(text, "layer_types", None) or []) - ATTENTION_LAYERS
    others |= set(getattr(text, "layers_block_type", None) or []) - {"attention", "hybrid"}
    if others:
        raise EyasError(f"target {name}: {kind} has {', '.join(sorted(others))} layers; {remedy}")
    if kind == "bloom" or getattr(text, "alibi", False) or getattr(getattr(text, "attn_config", None), "alibi", False):
        raise EyasError(f"target {name}: {kind} has ALiBi biases, which count stored rows instead of positions; {remedy}")
    if getattr(text, "attention_chunk_size", None):
        raise EyasError(f"target {name}: {kind} attends in chunks; {remedy}")
    if getattr(text, "num_kv_shared_layers", 0):
        raise EyasError(f"target {name}: {kind} shares key/value rows between layers; {remedy}")
    if not getattr(text, "num_attention_heads", None):
        raise EyasError(f"target {name}: {kind} is not an attention model (state-space or recurrent); {remedy}")


def check_class(model: Any, name: str) -> None:
    """Refuse a loaded model whose class cannot verify trees.

    Raises:
        EyasError: no causal LM, a recurrent state, or an attention implementation without 4-D masks.
    """
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise EyasError(f"target {name}: {kind} is no transformers causal language model; load it with AutoModelForCausalLM")
    if getattr(model, "_is_stateful", False):
        raise EyasError(f"target {name}: {kind} keeps a recurrent state; only plain causal attention is supported")
    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise EyasError(
            f"target {name}: attention implementation {implementation} takes no tree masks; "
            "load it with attn_implementation='sdpa'"
        )
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise EyasError(f"target {name}: its weights lie on {', '.join(sorted(devices))}; load it onto one device")
    for argument in ("logits_to_keep", "position_ids"):
        if argument not in inspect.signature(model.forward).parameters:
            raise EyasError(f"target {name}: {kind} takes no {argument}; only transformers' own causal LMs are supported")
    text = model.config.get_text_config()
    slides = getattr(text, "sliding_window", None) and not getattr(text, "layer_types", None)
    modules = [sys.modules.get(base.__module__) for base in type(model).__mro__]
    if slides and not any(hasattr(module, "create_sliding_window_causal_mask") for module in modules):
        raise EyasError(f"target {name}: {kind} does not say to which of its layers sliding_window applies; set it to None")
