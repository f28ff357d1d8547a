"""The public face: load a target with its draft, generate, stream, chat."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eyas.adaptive import AdaptiveTree, Experience
from eyas.decode import Request, Session, decode, open_session
from eyas.drafters import Drafter
from eyas.drafters.eagle import EagleDraft, EagleDrafter
from eyas.drafters.model import ModelDrafter, check_assistant
from eyas.drafters.ngram import NgramDrafter
from eyas.errors import EyasError
from eyas.loading import FOUR_BIT, find_target, fit_draft, load_target, read_draft, wrap_target
from eyas.noise import Noise
from eyas.options import EAGLE_METHODS, Call, as_list, check_method, check_options, check_text
from eyas.remembered import step_costs
from eyas.sampling import Rule, SamplingOptions, processors, unsupported_settings
from eyas.statistics import Statistics
from eyas.target import Target
from eyas.text import TextStream
from eyas.tree import TreePolicy

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Result:
    """What one request produced.

    Attributes:
        text: the new text, special tokens left out, ending before a stop string.
        token_ids: the new tokens, up to and including the one that ended the text.
        finish_reason: ``"stop"`` (end token or stop string), ``"length"`` (``max_new_tokens`` or the context limit), or
            ``"interrupted"`` (Ctrl-C).
        stats: counts and times.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Statistics


@dataclass(frozen=True)
class Piece:
    """A piece of a streamed text.

    Attributes:
        text: whole characters; the pieces concatenate to the result's text.
        token_ids: the tokens it came with; they concatenate to the result's ids.
        drafted: whether they were drafted and accepted, or the target's own.
    """

    text: str
    token_ids: list[int]
    drafted: bool


class Stream(Iterator[Piece]):
    """Pieces of one text as they become final; after the last one `result` is complete."""

    def __init__(self, pieces: Iterator[Piece], request: Request) -> None:
        self._pieces = pieces
        self._request = request

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def result(self) -> Result:
        """What has been delivered so far."""
        return _result(self._request)


class Engine:
    """A target with its draft, ready to decode. It holds no request's state; use it from one thread at a time.

    Args:
        target: the wrapped model.
        draft: an EAGLE draft for it, or None for methods that need none.
        method: how to decode where a call does not say: one of `METHODS`.
        assistant: a smaller model with the same tokens, for method ``model``.

    Raises:
        EyasError: the assistant's tokens are not the target's.
    """

    def __init__(
        self, target: Target, draft: EagleDraft | None, method: str = "eagle2", assistant: Target | None = None
    ) -> None:
        self.target = target
        self.draft = draft
        self.assistant = assistant
        self.method = check_method(method)
        self._other_trees: dict[tuple[int, bool], AdaptiveTree] = {}
        if assistant is not None:
            check_assistant(assistant, target)
        ignored = unsupported_settings(target.model.generation_config)
        if ignored:
            warnings.warn(
                f"the generation_config of {target.name} sets {', '.join(ignored)}, which Eyas does not apply: output may "
                "differ from transformers' generate",
                stacklevel=2,
            )

    @cached_property
    def adaptive(self) -> AdaptiveTree:
        """What ``eagle2`` grows where a call fixes no tree: what pays, by experience and by what a step costs here."""
        if self.draft is None:
            raise EyasError(f"an adaptive tree needs a draft for {self.target.name}; pass one")
        return AdaptiveTree(step_costs(self.draft), Experience())

    def adaptive_tree(self, lookup: int | None = None, coupled: bool | None = None) -> AdaptiveTree:
        """The adaptive tree with these settings, None: as it is by default; each has an experience of its own."""
        usual = self.adaptive
        wanted = usual.lookup if lookup is None else lookup, usual.coupled if coupled is None else coupled
        if wanted == (usual.lookup, usual.coupled):
            return usual
        if wanted not in self._other_trees:
            self._other_trees[wanted] = replace(usual, experience=Experience(), lookup=wanted[0], coupled=wanted[1])
        return self._other_trees[wanted]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The target's transformers tokenizer."""
        return self.target.tokenizer

    @overload
    def generate(self, prompt: str, **options: Any) -> Result: ...
    @overload
    def generate(self, prompt: Sequence[int], **options: Any) -> Result: ...
    @overload
    def generate(self, prompt: Sequence[str] | Sequence[Sequence[int]], **options: Any) -> list[Result]: ...
    def generate(self, prompt: Any, **options: Any) -> Result | list[Result]:
        """Continue a prompt, or a list of them as one batch.

        Args:
            prompt: a string or a list of token ids gives one `Result`; a list of either gives a list of them.
            options: see `prepare`; ``seed`` may be a list with one seed for each prompt.

        Returns:
            The results; after Ctrl-C what was done until then, with finish_reason ``"interrupted"``.

        Raises:
            EyasError: bad options, an empty or over-long prompt, or a method that needs a draft where there is none.
        """
        if hasattr(prompt, "tolist"):  # a tensor or an array of ids
            prompt = prompt.tolist()
        single = isinstance(prompt, str) or (len(prompt) > 0 and not isinstance(prompt[0], (str, Sequence)))
        prompts = [prompt] if single else list(prompt)
        if not prompts:
            return []
        job = self.prepare(prompts, **options)
        try:
            for _ in decode(self.target, job.session, job.policy, job.requests):
                pass
        except KeyboardInterrupt:
            for request in job.requests:
                request.text.finish()
        results = [_result(request) for request in job.requests]
        return results[0] if single else results

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """Continue one prompt piece by piece; arguments as for `generate`."""
        job = self.prepare([prompt], **options)

        def pieces() -> Iterator[Piece]:
            for delivery in decode(self.target, job.session, job.policy, job.requests):
                count = delivery.accepted
                if count:
                    yield Piece(delivery.drafted_text, delivery.token_ids[:count], True)
                if len(delivery.token_ids) > count:
                    yield Piece(delivery.own_text, delivery.token_ids[count:], False)

        return Stream(pieces(), job.requests[0])

    def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Result:
        """Answer a conversation: a list of {"role", "content"}, rendered with the tokenizer's chat template."""
        return self.generate(self.render(messages), **options)

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the assistant speaks.

        Raises:
            EyasError: no tokenizer or chat template, or messages it does not take.
        """
        tokenizer = self.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise EyasError(f"target {self.target.name} has no chat template; pass the prompt as it is (--raw, or generate)")
        for message in messages:
            check_text(str(message.get("content", "") if isinstance(message, Mapping) else message))
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs of the model's authors and raise what they like
            raise EyasError(f"the chat template of {self.target.name} refuses these messages ({error})") from error
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def session(self) -> Session:
        """An empty session to pass to successive calls of `stream` or `generate` with one prompt each: what a prompt shares
        with the turns before is not computed again."""
        make = self.new_drafter(self.method) if self.method not in EAGLE_METHODS or self.draft else None
        return Session(self.target.new_cache(1), make(1) if make else None, [[]])

    def new_drafter(self, method: str) -> Callable[[int], Drafter] | None:
        """What makes a method's drafter for a batch; None for plain decoding.

        Raises:
            EyasError: the method needs a draft or an assistant, and there is none.
        """
        if method == "autoregressive":
            return None
        if method == "ngram":
            return NgramDrafter
        if method == "model":
            if self.assistant is None:
                raise EyasError(f"method model needs a smaller model for {self.target.name}; pass one (--assistant)")
            return partial(ModelDrafter, self.assistant)
        if self.draft is None:
            raise EyasError(
                f"method {method} needs a draft for {self.target.name}; pass one (--draft), or use ngram or autoregressive"
            )
        return partial(EagleDrafter, self.draft)

    def prepare(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int | Sequence[int] | None = None,
        session: Session | None = None,
        method: str | None = None,
        **options: Any,
    ) -> Job:
        """Check a call's arguments and set it up.

        Args:
            prompts: strings or token ids.
            seed: of each request's random numbers; the same seed gives the same text alone or in a batch. None: random.
                Give every turn of a conversation a seed of its own: the same numbers twice would make it repeat itself.
            session: state of earlier turns (one prompt only).
            method: ``eagle2`` (dynamic tree), ``eagle1`` (static tree), ``chain``, ``ngram`` (prompt lookup), ``model`` (a
                smaller model drafts) or ``autoregressive``; default: the engine's.
            options: see `check_options`.

        Raises:
            EyasError: any of these makes no sense; the message says which and why.
        """
        call, rules = self._check(method, options)
        new_drafter = self.new_drafter(method or self.method)
        seeds = as_list(seed) if isinstance(seed, Sequence) else [seed] * len(prompts)
        if len(seeds) != len(prompts):
            raise EyasError(f"{len(seeds)} seeds for {len(prompts)} prompts; pass one seed, or one for each")
        requests = [self._request(prompt, call, rules, row) for prompt, row in zip(prompts, seeds, strict=True)]
        if session is not None and len(prompts) != 1:
            raise EyasError(f"a session continues one prompt, but {len(prompts)} were given; leave it out for a batch")
        if session is not None and session.drafter is not None and new_drafter is not None:
            kind, needed = type(session.drafter), type(new_drafter(1))
            if not issubclass(kind, needed):
                raise EyasError(f"the session drafts with {kind.__name__}, but this call with {needed.__name__}; open another")
        policy = (
            self.adaptive_tree(call.lookup, call.coupled) if call.adaptive else call.policy
        )  # costs may be measured: a mistake must not wait for it
        if session is None:
            session = open_session(self.target, requests, new_drafter)
        return Job(requests, session, policy)

    def request(self, prompt: Prompt, *, seed: int | None = None, method: str | None = None, **options: Any) -> Request:
        """One checked request, to hand to `eyas.decode.decode` yourself; arguments as for `prepare`."""
        return self._request(prompt, *self._check(method, options), seed)

    def _check(self, method: str | None, options: Mapping[str, Any]) -> tuple[Call, SamplingOptions]:
        """A call's options, checked against this target and draft."""
        target, method = self.target, method or self.method
        call = check_options({**options, "method": method})
        rules = SamplingOptions.from_defaults(target.model.generation_config, **call.sampling)
        strange = [token for token in rules.logit_bias or {} if not 0 <= int(token) < target.vocab_size]
        if strange:
            raise EyasError(f"logit_bias names token {strange[0]}, but {target.name} has {target.vocab_size} tokens")
        if call.stop and self.tokenizer is None:
            raise EyasError(
                f"target {target.name} has no tokenizer, so stop strings cannot be found; pass tokenizer= to eyas.load"
            )
        return call, rules

    def _request(self, prompt: Prompt, call: Call, options: SamplingOptions, seed: int | None) -> Request:
        ids, target = self._ids(prompt), self.target
        room = target.context_limit - len(ids)
        if room < 1:
            raise EyasError(
                f"the prompt has {len(ids)} tokens, but {target.name} has a context of {target.context_limit}, "
                "the answer included; shorten it"
            )
        rule = Rule(options, processors(options, len(ids), target.eos_ids, target.device), Noise(seed))
        return Request(ids, min(call.max_new_tokens, room), rule, target.eos_ids, TextStream(target.tokenizer, call.stop))

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            check_text(prompt)
            if self.tokenizer is None:
                raise EyasError(f"target {self.target.name} has no tokenizer; pass token ids, or tokenizer= to eyas.load")
            ids = list(self.tokenizer(prompt)["input_ids"])
        else:
            try:
                ids = [operator.index(token) for token in prompt]
            except TypeError:
                raise EyasError(
                    "a prompt is a string or a list of token ids, or a list of either; for messages call chat"
                ) from None
        if not ids:
            raise EyasError("the prompt is empty; it needs at least one token")
        strange = [token for token in ids if not 0 <= token < self.target.vocab_size]
        if strange:
            raise EyasError(f"the prompt holds token {strange[0]}, but {self.target.name} has {self.target.vocab_size} tokens")
        return ids


@dataclass(frozen=True)
class Job:
    """A checked call: its requests, the session they run in, and the tree policy (None: plain decoding)."""

    requests: list[Request]
    session: Session
    policy: TreePolicy | None


def _result(request: Request) -> Result:
    return Result(request.text.text, request.ids, request.finish_reason or "interrupted", request.statistics)


def load(
    target: str | Path | PreTrainedModel | None = None,
    draft: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    method: str = "eagle2",
    assistant: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    trust_remote_code: bool = False,
    packed: bool = True,
) -> Engine:
    """Load a target and its draft.

    Args:
        target: hub id, folder, .gguf file, or a loaded transformers model; None: the embedded SmolLM2-135M-Instruct.
        draft: hub id or folder of an EAGLE-1/2 checkpoint; None: the one Eyas ships, for the embedded target only.
        dtype: ``"auto"``, ``"float32"``, ``"bfloat16"``, ``"float16"``, for a .gguf ``"4bit"``, or a torch dtype; a loaded
            model keeps its own.
        device: ``"auto"`` or a torch device; a loaded model keeps its own.
        method: the engine's default method; only EAGLE's need a draft.
        assistant: hub id, folder or .gguf file of a smaller model with the same tokens, for method ``model``.
        tokenizer: of a loaded model.
        trust_remote_code: run code that comes with the target's checkpoint.
        packed: see `eyas.loading.load_target`; a loaded model is left as it is.

    Raises:
        EyasError: something is missing, unreadable, unsupported, or does not fit together.
    """
    check_method(method)
    if target is not None and not isinstance(target, (str, Path, PreTrainedModel)):
        raise EyasError(f"target is a {type(target).__name__}; pass a name, a path or a transformers model")
    if isinstance(target, (str, Path)):
        find_target(target)  # a wrong path is told before anything else
    drafts = draft is not None or (target is None and method in EAGLE_METHODS)
    if method in EAGLE_METHODS and not drafts:
        raise EyasError(
            f"method {method} needs a draft for this target; pass one (--draft), or use method ngram or autoregressive"
        )
    if method == "model" and assistant is None:
        raise EyasError("method model needs a smaller model to draft with; pass one (--assistant)")
    # the draft is read first: a mistake in its name must not wait for the target
    checkpoint = read_draft(draft) if drafts else None
    if isinstance(target, PreTrainedModel):
        wrapped = wrap_target(target, tokenizer)
    else:
        wrapped = load_target(target, dtype=dtype, device=device, trust_remote_code=trust_remote_code, packed=packed)
    smaller = None
    if assistant is not None:
        narrow = "auto" if dtype == FOUR_BIT else dtype  # 4 bits are the target's to have, and the assistant's if it can
        smaller = load_target(
            assistant, dtype=narrow, device=wrapped.device, trust_remote_code=trust_remote_code, packed=packed
        )
    return Engine(wrapped, fit_draft(checkpoint, wrapped) if checkpoint else None, method, smaller)
