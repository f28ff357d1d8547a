"""Other ways to decode the same model, through their own libraries: transformers' ``generate``, and llama.cpp."""

from __future__ import annotations

import time
from typing import Any

import torch

from eyas.bench.methods import Answer, Asked, Method
from eyas.engine import Engine
from eyas.errors import EyasError, first_line


def make_peer(name: str, engine: Engine) -> Method:
    """A peer method of `eyas.bench.methods.PEERS`.

    Raises:
        EyasError: the library, or what it needs, is not there.
    """
    if name.startswith("llama.cpp"):
        return llama_cpp(engine, lookup=name.endswith("lookup"))
    options: dict[str, Any] = {}
    if name == "transformers-static":
        options["cache_implementation"] = "static"
        options["disable_compile"] = True  # as the others run; compiling is another comparison
    elif name == "transformers-lookup":
        options["prompt_lookup_num_tokens"] = 10
    elif name == "transformers-assisted":
        if engine.assistant is None:
            raise EyasError("method transformers-assisted needs a smaller model; pass one with --assistant")
        options["assistant_model"] = engine.assistant.model
    return transformers_generate(engine, options)


def transformers_generate(engine: Engine, more: dict[str, Any]) -> Method:
    """``model.generate`` of the very model that the engine wraps, with the same stop rules."""
    model, ends = engine.target.model, sorted(engine.target.eos_ids)

    def run(ids: list[int], asked: Asked) -> Answer:
        tokens = torch.tensor([ids], device=engine.target.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if asked.temperature:
            torch.manual_seed(asked.seed)
            sampling = {"do_sample": True, "temperature": asked.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=asked.max_new_tokens,
                eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0, repetition_penalty=1.0, **sampling, **more,
            )  # fmt: skip
        said: list[int] = out[0, len(ids) :].tolist()
        return Answer(said, time.perf_counter() - started, None)

    return run


def llama_cpp(engine: Engine, lookup: bool) -> Method:
    """llama.cpp on the .gguf file that the target was read from (its own quantised arithmetic, so other tokens)."""
    try:
        import llama_cpp as library
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    except ImportError:
        raise EyasError("method llama.cpp needs its library; run: pip install llama-cpp-python") from None
    file = engine.target.gguf
    if file is None:
        raise EyasError(f"method llama.cpp needs a .gguf file, but {engine.target.name} is none; leave it out")
    if engine.target.device.type != "cpu":
        raise EyasError(f"method llama.cpp is compared on the CPU, but {engine.target.name} is on {engine.target.device}")
    draft = LlamaPromptLookupDecoding(num_pred_tokens=10) if lookup else None
    try:
        model = library.Llama(
            str(file),
            n_ctx=min(engine.target.context_limit, 8192),
            n_threads=torch.get_num_threads(),
            verbose=False,
            draft_model=draft,
        )
    except Exception as error:  # whatever the native library makes of the file
        raise EyasError(f"method llama.cpp cannot load {file} ({first_line(error)}); leave it out") from error
    ends = engine.target.eos_ids

    def run(ids: list[int], asked: Asked) -> Answer:
        model.reset()
        model.set_seed(asked.seed)
        said: list[int] = []
        started = time.perf_counter()
        try:
            for token in model.generate(ids, temp=asked.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0):
                said.append(int(token))
                if token in ends or len(said) == asked.max_new_tokens:
                    break
        except (RuntimeError, ValueError) as error:
            raise EyasError(f"llama.cpp refuses a prompt of {len(ids)} tokens ({first_line(error)})") from error
        return Answer(said, time.perf_counter() - started, None)

    return run
