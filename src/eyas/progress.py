"""Long work shows how far it is: a bar in a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 30.0  # seconds between lines where there is no terminal


@contextmanager
def progress_bar(console: Console, total: float) -> Iterator[Callable[[float, str], None]]:
    """Gives ``update(completed, what)``, to be called as often as one likes.

    Args:
        console: where it is shown; other lines printed there meanwhile stay above the bar.
        total: what ``completed`` will have reached at the end.
    """
    if console.is_terminal:
        columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=total)
            yield lambda completed, what: bar.update(task, completed=completed, description=what)
        return
    began = said = time.monotonic()
    first: float | None = None  # what had been done before

    def update(completed: float, what: str) -> None:
        nonlocal said, first
        first, now = completed if first is None else first, time.monotonic()
        if now - said >= EVERY:
            said, share = now, min(completed / total, 1.0)  # what is begun is finished, past the total
            left = (now - began) * max(total - completed, 0) / (completed - first) if completed > first else None
            console.print(f"{what} ({100 * share:.0f} %" + (f", {left / 60:.0f} minutes left)" if left is not None else ")"))

    yield update
