"""The tiny random target and its chat tokenizer, as an engine."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.engine import Engine
from eyas.target import Target
from tests.training.conftest import target, tokenizer  # noqa: F401  (fixtures)


@pytest.fixture(scope="session")
def engine(target: Any, tokenizer: Any) -> Engine:  # noqa: F811
    return Engine(Target(target, tokenizer, name="tiny"), None, "autoregressive")
