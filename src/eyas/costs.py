"""What a step costs on this machine, for people to read: the target's forward by tree size and by context, drafting by levels.

`eyas.adaptive` decides by the same costs; here they are measured afresh, at more contexts, and told in words and in a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch

from eyas.bench.figures import COLOURS, side_by_side
from eyas.budget import CONTEXT, ROUNDS, SIZES, StepCosts, measure_costs
from eyas.drafters.eagle import EagleDraft
from eyas.files import replacing
from eyas.machine import accelerator, processor
from eyas.remembered import step_costs

CONTEXTS = (CONTEXT, 512, 2048)  # tokens
SHOWN = (1, 13, 61)  # nodes, by context
MARKERS = "osD^v"
LONGEST_TITLE = 56  # characters over a panel


@dataclass(frozen=True)
class Survey:
    """Measured costs with what they were measured of.

    Attributes:
        target, dtype, machine: names.
        threads: of torch.
        costs: by tokens of context, shortest first; drafting is measured at the shortest only.
    """

    target: str
    dtype: str
    machine: str
    threads: int
    costs: dict[int, StepCosts]

    @property
    def shortest(self) -> tuple[int, StepCosts]:
        """The shortest context, and the costs there."""
        return next(iter(self.costs.items()))

    def by_context(self, nodes: int) -> list[float]:
        """T(nodes) in ms at each context."""
        return [1000 * costs.verify[nodes] for costs in self.costs.values()]


def survey(draft: EagleDraft) -> Survey:
    """Measure afresh; what a start would measure is remembered for it."""
    target = draft.target
    first, *longer = contexts(target.context_limit)
    costs = {first: step_costs(draft, fresh=True)}
    costs |= {context: measure_costs(draft, (), SIZES, context) for context in longer}
    machine = accelerator(target.device) or processor()
    return Survey(target.name, target.precision, machine, torch.get_num_threads(), costs)


def contexts(limit: int) -> list[int]:
    """The contexts to measure at, for a target that takes texts of ``limit`` tokens: half of that at most."""
    return sorted({min(context, limit // 2) for context in CONTEXTS})


def describe(found: Survey) -> list[str]:
    """Tables and linear terms, line by line."""
    context, costs = found.shortest
    plain = costs.verify[1]
    threads = f"{found.threads} thread{'s' if found.threads > 1 else ''}"
    out = [
        f"{found.target}, {found.dtype}, on {found.machine}, {threads}",
        f"T(n): one forward of the target over n nodes, the shortest of {ROUNDS} rounds; context of {context} tokens",
        "",
        f"{'nodes n':>8}{'T(n) ms':>12}{'T(n)/T(1)':>12}",
        *(f"{size:>8}{_ms(time):>12}{time / plain:>12.2f}" for size, time in costs.verify.items()),
        "",
        f"{'drafting':<26}{'ms':>8}{'share of T(1)':>16}",
    ]
    levels = {
        "the first level": costs.first,
        "a further level of 4": costs.level(4),
        "a further level of 10": costs.level(10),
    }
    out += [f"{name:<26}{_ms(time):>8}{100 * time / plain:>14.0f} %" for name, time in levels.items()]
    if len(found.costs) > 1:
        out += ["", "T(n) in ms by tokens of context", f"{'nodes n':>8}" + "".join(f"{tokens:>12}" for tokens in found.costs)]
        for size in costs.verify:
            out.append(f"{size:>8}" + "".join(f"{_ms(each.verify[size]):>12}" for each in found.costs.values()))
    return [*out, "", *linear_terms(found)]


def linear_terms(found: Survey) -> list[str]:
    """Least-squares lines through the times: by nodes at the shortest context, by context for the smallest and largest tree."""
    context, costs = found.shortest
    sizes, times = list(costs.verify), [1000 * time for time in costs.verify.values()]
    slope, start = linear_regression(sizes, times)
    off = max(abs(start + slope * size - time) / time for size, time in zip(sizes, times, strict=True))
    out = [
        f"T(n) ≈ {start:.3g} ms + {slope:.3g} ms a node, at a context of {context} (off by {100 * off:.0f} % at most)",
    ]
    if len(found.costs) > 1:
        for nodes in (1, max(SIZES)):
            slope, start = linear_regression(list(found.costs), found.by_context(nodes))
            out.append(f"T({nodes}) ≈ {start:.3g} ms + {1000 * slope:.3g} ms per 1000 tokens of context")
    return out


def draw(found: Survey, file: Path) -> None:
    """Write a picture of both dependences as a PNG file.

    Raises:
        EyasError: it cannot be written.
    """

    def by_nodes(axes: Any) -> None:
        for number, (context, costs) in enumerate(found.costs.items()):
            _plot(axes, number, list(costs.verify), [1000 * time for time in costs.verify.values()], f"context {context}")
        _label(axes, "nodes n of the tree", f"{found.target}, {found.dtype}")

    def by_context(axes: Any) -> None:
        for number, nodes in enumerate(SHOWN):
            _plot(axes, number, list(found.costs), found.by_context(nodes), f"n = {nodes}")
        _label(axes, "context (tokens)", found.machine)

    picture = side_by_side([by_nodes, by_context], 8, 4)
    with replacing(file, "picture") as temporary:
        temporary.write_bytes(picture)


def _plot(axes: Any, number: int, x: Sequence[int], y: Sequence[float], label: str) -> None:
    axes.plot(x, y, color=COLOURS[number], marker=MARKERS[number], markersize=5, label=label)


def _label(axes: Any, x: str, title: str) -> None:
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel("one forward, T (ms)")
    short = title if len(title) <= LONGEST_TITLE else f"…{title[1 - LONGEST_TITLE :]}"
    axes.set_title(short.replace("$", "\\$"), fontsize=9)
    axes.legend(fontsize=9, frameon=False)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds < 0.01 else f"{1000 * seconds:.1f}"
