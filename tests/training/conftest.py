"""Fixtures of the training tests."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.conversations import Conversations
from eyas.target import Target
from tests.training import tiny


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny.make_tokenizer()


@pytest.fixture(scope="session")
def target() -> Target:
    return tiny.make_target()


@pytest.fixture(scope="session")
def data(target: Target) -> Conversations:
    return tiny.answered(target, 20)


@pytest.fixture(scope="session")
def heldout(target: Target) -> Conversations:
    return tiny.answered(target, 4, seed=1)
