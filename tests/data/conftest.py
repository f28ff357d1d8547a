"""The tiny random target and its chat tokenizer, as an engine."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.engine import Engine
from tests.training import tiny


@pytest.fixture(scope="session")
def engine() -> Engine:
    return Engine(tiny.make_target(), None, "autoregressive")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny.make_tokenizer()
