"""What a model that is not here would gain: target and head of its shape with random weights, timed on the device at hand.

Times do not depend on what the weights are, τ does: the speedup is printed for τ values the user assumes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.bench.tasks import nearest
from eyas.budget import StepCosts, measure_costs
from eyas.drafters.eagle import EagleDraft
from eyas.errors import EyasError, first_line
from eyas.heads.eagle import EagleHead, head_like
from eyas.packing import pack_model
from eyas.policies import DynamicTree
from eyas.target import Target


def _llama(hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocabulary,
        "max_position_embeddings": 4096, **more,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0),
    "qwen3-8b": _llama(4096, 12288, 36, 32, 8, 151936, rope_theta=1000000.0, model_type="qwen3", head_dim=128),
}
SIZES = (1, 8, 16, 24, 32, 48, 61, 64)
CONTEXT = 256
TREES = (DynamicTree(12, 4, 4), DynamicTree(24, 6, 6), DynamicTree())
"""What is drafted, and verified, for a projection."""


@dataclass(frozen=True)
class Projection:
    """A shape, timed.

    Attributes:
        name: of the shape.
        parameters: of the target.
        costs: of its forwards and of drafting.
    """

    name: str
    parameters: int
    costs: StepCosts


def shape_config(name: str) -> Any:
    """The transformers configuration of a named shape, or of a config.json.

    Raises:
        EyasError: unknown, or unreadable.
    """
    path = Path(name)
    try:
        raw = (
            json.loads(path.read_text(encoding="utf-8"))
            if path.suffix == ".json"
            else SHAPES[nearest(name, list(SHAPES), "shape")]
        )
        return AutoConfig.for_model(**raw)
    except EyasError:
        raise
    except Exception as error:  # a file of any content
        raise EyasError(f"shape {name}: no configuration of a model ({first_line(error)}); pass a config.json") from error


def bytes_needed(config: Any, dtype: torch.dtype) -> int:
    """Memory of the target's weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return int(sum(parameter.numel() for parameter in model.parameters())) * dtype.itemsize


@torch.inference_mode()
def project(name: str, dtype: torch.dtype, device: torch.device, trees: tuple[DynamicTree, ...], rounds: int = 7) -> Projection:
    """Build the shape with random weights and time it.

    Raises:
        EyasError: it does not fit into the memory at hand.
    """
    config, free = shape_config(name), free_memory(device)
    try:
        needed = bytes_needed(config, dtype)
    except Exception as error:  # a configuration of another kind of model
        raise EyasError(f"shape {name}: no causal language model can be built of it ({first_line(error)})") from error
    if free is not None and 1.15 * needed > free:
        raise EyasError(
            f"shape {name} needs {needed / 1e9:.0f} GB in {dtype}, but {device} has {free / 1e9:.0f} free; take a smaller one"
        )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    size = sum(parameter.numel() for parameter in model.parameters())
    pack_model(model.to(device).eval())  # as it would be loaded
    target = Target(model, None, name)
    head = EagleHead(head_like(target.config, None)).to(device, dtype).eval().requires_grad_(False)
    draft = EagleDraft(target, head)
    costs = measure_costs(draft, trees, SIZES, CONTEXT, rounds)
    return Projection(name, size, costs)


def free_memory(device: torch.device) -> int | None:
    """Free bytes on a device; None where that cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def lines(found: Projection, taus: tuple[float, ...]) -> list[str]:
    """The projection as text."""
    costs, plain = found.costs, found.costs.verify[1]
    out = [f"{found.name}: {found.parameters / 1e9:.2f} billion parameters, T(1) {1000 * plain:.1f} ms, context {CONTEXT}"]
    out.append("T(n)/T(1): " + ", ".join(f"{size} → {time / plain:.2f}" for size, time in costs.verify.items()))
    for tree, drafting in costs.draft.items():
        gains = ", ".join(f"τ {tau:g}: {costs.speedup(tree, tau):.2f}x" for tau in taus)
        shape = f"{tree.tokens}/{tree.depth}/{tree.top_k}"
        out.append(f"tree {shape}: drafting {drafting / plain:.2f} T(1); speedup at {gains}")
    return out
