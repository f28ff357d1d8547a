"""A bar in a terminal, lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from eyas import progress


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 30.0, 31.0, 90.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with progress.progress_bar(Console(file=out, width=200), total=4) as update:
        for completed in (0, 1, 1.5, 2):
            update(completed, f"step {completed}")
    assert out.getvalue() == "step 1 (25 %, 2 minutes left)\nstep 2 (50 %, 2 minutes left)\n"


def test_a_bar_in_a_terminal() -> None:
    out = io.StringIO()
    with progress.progress_bar(Console(file=out, force_terminal=True, width=100), total=2) as update:
        update(1, "half way")
    assert "half way" in out.getvalue()
