"""Eyas makes causal language models decode faster without changing what they say (EAGLE-2).

The public names are imported when first used: ``import eyas`` alone is quick, and Ctrl-C during the imports is orderly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.engine import Engine, Piece, Result, Stream, load
    from eyas.errors import EyasError
    from eyas.options import METHODS, check_options
    from eyas.policies import EAGLE1_TREE, DynamicTree, StaticTree, chain
    from eyas.sampling import SamplingOptions
    from eyas.statistics import Statistics

__version__ = "0.1.0"
__all__ = [
    "EAGLE1_TREE", "METHODS", "DynamicTree", "Engine", "EyasError", "Piece", "Result", "SamplingOptions", "StaticTree",
    "Statistics", "Stream", "chain", "check_options", "load",
]  # fmt: skip
_ROOMS = {
    "engine": ("Engine", "Piece", "Result", "Stream", "load"),
    "errors": ("EyasError",),
    "options": ("METHODS", "check_options"),
    "sampling": ("SamplingOptions",),
    "statistics": ("Statistics",),
    "policies": ("EAGLE1_TREE", "DynamicTree", "StaticTree", "chain"),
}


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(f"eyas.{room}"), name)
    raise AttributeError(f"module 'eyas' has no attribute {name!r}")
