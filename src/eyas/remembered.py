"""Step costs remembered from one process to the next, for a day: a start need not time again what was timed an hour ago.

One small JSON file in the user's cache folder. It only ever saves time: where it is missing, damaged or not writable nothing is
said, and costs are measured; as they are for any other machine, thread count, dtype, model or version.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from eyas import __version__
from eyas.budget import NARROW, ONE_LEVEL, WIDE, StepCosts, measure_context, measure_costs
from eyas.drafters.eagle import EagleDraft
from eyas.errors import EyasError
from eyas.files import replacing
from eyas.machine import accelerator, processor
from eyas.packing import is_packed
from eyas.policies import DynamicTree

FOLDER_VARIABLE = "EYAS_CACHE"  # names another folder
FILE = "costs.json"
DAY = 86400.0  # seconds
DAMAGE = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)  # what any file may raise


def step_costs(draft: EagleDraft, fresh: bool = False) -> StepCosts:
    """What a step costs here with this draft and its target: remembered, or else measured and remembered.

    Args:
        draft: what drafts; it knows its target.
        fresh: measure in any case.
    """
    key, file = conditions(draft), cache_file()
    if not fresh:
        with suppress(*DAMAGE):
            return from_dict(_recent(file)[key]["costs"])
    costs = measure_context(draft, measure_costs(draft))
    if file is not None:
        entries = {**_recent(file), key: {"at": time.time(), "costs": as_dict(costs)}}
        with suppress(EyasError), replacing(file, "step costs") as temporary:
            temporary.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    return costs


def conditions(draft: EagleDraft) -> str:
    """What measured costs depend on, in words: other words, other costs."""
    target = draft.target
    device, config = accelerator(target.device), target.config
    parts = [
        *([device] if device else []), processor(), f"{torch.get_num_threads()} threads",
        target.precision,
        target.name, f"{config.num_hidden_layers} layers of {config.hidden_size}",
        f"MLP of {getattr(config, 'intermediate_size', None)}", "packed" if is_packed(target.model) else "stock",
        f"{target.model.config._attn_implementation} attention", f"a draft of {draft.parameters} parameters",
        f"proposing {target.vocab_size if draft.token_map is None else len(draft.token_map)} tokens",
        f"torch {torch.__version__}", f"transformers {transformers.__version__}", f"eyas {__version__}",
    ]  # fmt: skip
    return " | ".join(parts)


def cache_file() -> Path | None:
    """Where costs are remembered: in the folder ``EYAS_CACHE`` names, else in the user's cache folder; None: there is none."""
    own, shared = os.environ.get(FOLDER_VARIABLE), os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(own).expanduser() if own else (Path(shared) if Path(shared).is_absolute() else _home_cache()) / "eyas"
    except RuntimeError:  # no home folder
        return None
    return folder / FILE


def as_dict(costs: StepCosts) -> dict[str, Any]:
    """Costs as JSON takes them: seconds by number of nodes, and by a tree's "tokens/depth/width"."""
    return {
        "verify": {str(size): seconds for size, seconds in costs.verify.items()},
        "draft": {f"{tree.tokens}/{tree.depth}/{tree.top_k}": seconds for tree, seconds in costs.draft.items()},
        "commit": costs.commit, "reach": costs.reach, "attention": costs.attention,
    }  # fmt: skip


def from_dict(raw: Any) -> StepCosts:
    """The costs that `as_dict` wrote.

    Raises:
        ValueError, TypeError, KeyError or AttributeError: these are none that a tree could be chosen by.
    """
    verify = {int(size): float(seconds) for size, seconds in raw["verify"].items()}
    draft = {_tree(name): float(seconds) for name, seconds in raw["draft"].items()}
    costs = StepCosts(verify, draft, *(float(raw[name]) for name in ("commit", "reach", "attention")))
    if (
        list(verify) != sorted(verify)
        or len(verify) < 2
        or min(verify) != 1
        or max(verify) > 1 << 20
        or not {ONE_LEVEL, NARROW, WIDE} <= set(draft)
    ):
        raise ValueError("sizes or trees are missing")
    if not all(1e-7 < seconds < 1e5 for seconds in (*verify.values(), *draft.values(), costs.commit)):
        raise ValueError("not the seconds of anything")
    if not all(0 <= seconds < 1 for seconds in (costs.reach, costs.attention)):
        raise ValueError("not what context can add")
    return costs


def _tree(name: str) -> DynamicTree:
    tokens, depth, width = map(int, name.split("/"))
    return DynamicTree(tokens, depth, width)


def _home_cache() -> Path:
    return Path.home() / ".cache"


def _recent(file: Path | None) -> dict[str, Any]:
    """Entries younger than a day by what they depend on; none where there is no file to read."""
    if file is None:
        return {}
    with suppress(*DAMAGE):
        entries, now = json.loads(file.read_text(encoding="utf-8")), time.time()
        return {key: entry for key, entry in entries.items() if 0 <= now - entry["at"] < DAY}
    return {}
