"""What one conversation looks like to the head: its tokens, and which of them are trained."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from eyas.training.data import Sample, supervised_pairs


def show_sample(sample: Sample, tokenizer: Any, console: Console) -> None:
    """Print a sample as rendered: trained tokens green, or between ⟦ ⟧ where there is no colour."""
    trained = torch.cat([torch.zeros(2, dtype=torch.bool), supervised_pairs(sample)]).tolist()  # pair i guesses token i + 2
    marked = not console.is_terminal or console.no_color
    text = Text()
    for start, end in runs(trained):
        piece = tokenizer.decode(sample.ids[start:end], skip_special_tokens=False)
        if trained[start]:
            text.append(f"⟦{piece}⟧" if marked else piece, style="bold green")
        else:
            text.append(piece, style="dim")
    console.print(text, soft_wrap=True)
    console.print(
        f"{len(trained)} tokens, {sum(trained)} of them trained ({'between ⟦ ⟧' if marked else 'green'})", highlight=False
    )


def runs(flags: list[bool]) -> list[tuple[int, int]]:
    """Stretches of equal flags, each as (first, one past the last)."""
    edges = [0, *(place for place in range(1, len(flags)) if flags[place] != flags[place - 1]), len(flags)]
    return list(pairwise(edges))
