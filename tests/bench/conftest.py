"""A tiny target with a chat template and a random draft."""

from __future__ import annotations

import pytest

from eyas.engine import Engine
from tests.drafts import random_draft
from tests.training import tiny


@pytest.fixture(scope="session")
def engine() -> Engine:
    target = tiny.make_target()
    return Engine(target, random_draft(target))
