"""Eyas makes causal language models decode faster without changing what they say (EAGLE-2)."""

from eyas.engine import METHODS, Engine, Piece, Result, Stream, check_options, load
from eyas.errors import EyasError
from eyas.sampling import SamplingOptions
from eyas.statistics import Statistics
from eyas.tree import EAGLE1_TREE, DynamicTree, StaticTree, chain

__version__ = "0.1.0"
__all__ = [
    "EAGLE1_TREE",
    "METHODS",
    "DynamicTree",
    "Engine",
    "EyasError",
    "Piece",
    "Result",
    "SamplingOptions",
    "StaticTree",
    "Statistics",
    "Stream",
    "chain",
    "check_options",
    "load",
]
