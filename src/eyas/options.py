"""A call's options, checked without a model: methods, trees, limits, sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from eyas.errors import EyasError
from eyas.noise import Noise
from eyas.policies import EAGLE1_TREE, LARGEST, DynamicTree, chain
from eyas.sampling import SamplingOptions
from eyas.tree import TreePolicy

METHODS = ("eagle2", "eagle1", "chain", "ngram", "model", "autoregressive")
EAGLE_METHODS = ("eagle2", "eagle1", "chain")
MAX_NEW_TOKENS = 512
TREE_SETTINGS = ("tokens", "depth", "width", "rank_by", "rerank")
SETTINGS = {"eagle2": TREE_SETTINGS, "chain": ("depth",), "ngram": TREE_SETTINGS[:3], "model": TREE_SETTINGS[:3]}
SMALL_TREES = {"ngram": DynamicTree(16, 8, 4), "model": DynamicTree(16, 4, 4)}
"""What methods without a trained draft verify where a call does not say."""


@dataclass(frozen=True)
class Call:
    """A call's options, checked without a model.

    Attributes:
        policy: how trees grow; None: plain decoding.
        adaptive: the engine's adaptive tree takes the policy's place.
        lookup: tokens that it may take from the text itself; None: as many as it does by itself.
        coupled: whether drafting shares the numbers of sampling; None: as the policy has it.
        max_new_tokens: at most so many new tokens each.
        stop: stop strings.
        sampling: the `SamplingOptions` fields that were given.
    """

    policy: TreePolicy | None
    adaptive: bool
    lookup: int | None
    coupled: bool | None
    max_new_tokens: int
    stop: list[str]
    sampling: dict[str, Any]


def check_options(options: Mapping[str, Any]) -> Call:
    """Check what `Engine.generate` was given, as far as that needs no model. An option that is None counts as not given.

    Args:
        options: ``method``; ``tree`` (for eagle2: ``"adaptive"``, what pays on this machine step by step, see `eyas.adaptive`;
            ``"fixed"``, as published; or a policy of your own); the fixed tree's settings ``tokens``, ``depth``, ``width``,
            ``rank_by`` and ``rerank`` (see `DynamicTree`; with any of them the tree is fixed, else adaptive);
            ``lookup`` (tokens that the adaptive tree may take from the text itself; 0: none); ``coupled`` (whether the draft
            shares the numbers of sampling, see `eyas.noise`; the adaptive tree does, trees as published do not);
            ``max_new_tokens`` (the context limit cuts it further); ``stop`` (one string or several); and the fields of
            `SamplingOptions`.

    Raises:
        EyasError: an unknown option, or one that makes no sense.
    """
    given = {name: value for name, value in options.items() if value is not None}
    method = check_method(given.pop("method", "eagle2"))
    for seed in as_list(given.pop("seed", None)):
        Noise(seed)
    tree, lookup, coupled = given.pop("tree", None), given.pop("lookup", None), given.pop("coupled", None)
    settings = {name: given.pop(name) for name in TREE_SETTINGS if name in given}
    max_new_tokens, stop = given.pop("max_new_tokens", MAX_NEW_TOKENS), given.pop("stop", [])
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise EyasError(f"max_new_tokens is {max_new_tokens}; it must be a whole number, at least 1")
    stops = [stop] if isinstance(stop, str) else list(stop)
    if "" in stops:
        raise EyasError("a stop string is empty; leave it out")
    if tree is not None and method != "eagle2":
        raise EyasError(f"method {method} takes no tree; leave it out, or use eagle2")
    if isinstance(tree, str) and tree not in ("adaptive", "fixed"):
        raise EyasError(f"tree {tree!r} is unknown; choose adaptive or fixed")
    if not (tree is None or isinstance(tree, str)) and (isinstance(tree, type) or not callable(getattr(tree, "limited", None))):
        raise EyasError(f"tree is {tree!r}; choose adaptive or fixed, or pass a policy such as eyas.DynamicTree")
    if tree not in (None, "fixed") and settings:
        raise EyasError(f"{next(iter(settings))} is a setting of the fixed tree; leave it out, or choose tree fixed")
    adaptive = tree == "adaptive" or (method == "eagle2" and tree is None and not settings)
    if lookup is not None and (isinstance(lookup, bool) or not isinstance(lookup, int) or not 0 <= lookup <= LARGEST):
        raise EyasError(f"lookup is {lookup}; it must be a whole number from 0 to {LARGEST}")
    if lookup is not None and not adaptive:
        raise EyasError("lookup is a setting of the adaptive tree; leave it out, or use method ngram, which only looks up")
    if coupled is not None and (not isinstance(coupled, bool) or method in ("autoregressive", "ngram")):
        raise EyasError(f"coupled is {coupled} for method {method}; it must be true or false, for a method with a draft model")
    unknown = given.keys() - {field.name for field in fields(SamplingOptions)}
    if unknown:
        raise EyasError(f"unknown option {', '.join(sorted(unknown))}; see eyas.check_options for what there is")
    try:
        SamplingOptions(**given)
        policy = make_policy(method, **settings)
    except TypeError as error:
        raise EyasError(f"an option is of the wrong type ({error}); see eyas.check_options") from error
    if tree is not None and not isinstance(tree, str):
        if coupled is not None:
            raise EyasError("coupled is a setting of the policy that was passed as tree; set it there")
        policy = tree
    elif coupled is not None and not adaptive:
        policy = replace(policy, coupled=coupled)  # type: ignore[type-var]
    return Call(policy, adaptive, lookup, coupled, max_new_tokens, stops, given)


def check_text(text: str) -> None:
    """Refuse text that is no Unicode, such as an argument whose bytes were not UTF-8.

    Raises:
        EyasError: it holds lone surrogates.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise EyasError("the prompt is not valid text (its bytes were not UTF-8); convert it first") from None


def as_list(value: Any) -> list[Any]:
    """A sequence as a list, anything else as a list of itself."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def check_method(method: str) -> str:
    """The method's name, if there is one of that name.

    Raises:
        EyasError: there is none.
    """
    if method not in METHODS:
        raise EyasError(f"method {method} is unknown; choose {', '.join(METHODS)}")
    return method


def make_policy(method: str, **settings: Any) -> TreePolicy | None:
    """The tree policy of a method, with its settings where it has any; None: plain decoding.

    Raises:
        EyasError: a setting below 1, or one that the method does not have.
    """
    known = SETTINGS.get(method, ())
    for name in settings:
        if name not in known:
            raise EyasError(f"method {method} has no setting {name}; leave it out, or use eagle2")
    if method == "eagle2":
        return DynamicTree(**_named(settings))
    if method in SMALL_TREES:
        return replace(SMALL_TREES[method], **_named(settings))
    if method == "chain":
        return chain(settings.get("depth", DynamicTree().depth))
    return EAGLE1_TREE if method == "eagle1" else None


def _named(settings: dict[str, Any]) -> dict[str, Any]:
    """A call's tree settings by the names of `DynamicTree`."""
    return {"top_k" if name == "width" else name: value for name, value in settings.items()}
