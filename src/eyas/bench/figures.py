"""Pictures of a run, drawn from its records alone: legible at 800 pixels, in colours that the colour-blind can tell apart."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from eyas.bench.methods import BASELINE
from eyas.bench.records import Record, Run
from eyas.bench.summary import acceptance_by_depth, table, time_shares
from eyas.files import need_matplotlib

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")  # Okabe and Ito
SHOWN_DEPTH = 12  # what the text suggests may go deeper, in a few steps
PAPER_CALIBRATION = ((0.025, 0.04), (0.975, 0.98))  # EAGLE-2, Figure 6: acceptance at confidence below 0.05 and above 0.95


def pictures(run: Run) -> dict[str, bytes]:
    """All pictures that the run has data for, as PNG, by name.

    Raises:
        EyasError: matplotlib is not installed.
    """
    need_matplotlib()
    found: dict[str, bytes] = {}
    for temperature in dict.fromkeys(record.temperature for record in run.records):
        suffix = f"-t{temperature:g}"
        chosen = [record for record in run.records if record.temperature == temperature]
        found[f"speedup{suffix}"] = drawn(lambda axes, t=temperature: speedup_bars(axes, run, t), 8, 4.2)  # type: ignore[misc]
        if any(record.depths and max(record.depths) for record in chosen):
            found[f"acceptance{suffix}"] = drawn(lambda axes, c=chosen: depth_lines(axes, c), 7, 4)  # type: ignore[misc]
        on_host = str(run.environment.get("device", "cpu")).startswith("cpu")  # elsewhere launches are timed, not work
        if on_host and any(record.verify_seconds for record in chosen):
            found[f"time{suffix}"] = drawn(lambda axes, c=chosen: time_bars(axes, c), 7, 3.6)  # type: ignore[misc]
    if run.observed.get("calibration"):
        found["calibration"] = drawn(lambda axes: calibration(axes, run.observed), 6, 4.5)
    if run.observed.get("positions"):
        found["positions"] = drawn(lambda axes: positions(axes, run.observed), 8, 4)
    if run.observed.get("example"):
        found["tree"] = drawn(lambda axes: draft_tree(axes, run.observed["example"]), 10, 6.5)
    return found


def drawn(draw: Callable[[Any], None], width: float, height: float) -> bytes:
    """A picture as PNG bytes; ``draw`` fills its axes."""
    return side_by_side([draw], width, height)


def side_by_side(draws: Sequence[Callable[[Any], None]], width: float, height: float) -> bytes:
    """A picture of several panels as PNG bytes; each of ``draws`` fills one panel's axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    for place, draw in enumerate(draws, start=1):
        axes = figure.add_subplot(1, len(draws), place)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def speedup_bars(axes: Any, run: Run, temperature: float) -> None:
    """Speedup by task and method with its interval."""
    cells = table(run.records, temperature)
    methods = [name for name in cells["mean"] if name != BASELINE] or list(next(iter(cells.values())))
    width = 0.8 / max(len(methods), 1)
    for number, method in enumerate(methods):
        for place, row in enumerate(cells.values()):
            if method in row:
                cell = row[method]
                axes.bar(
                    place + (number - (len(methods) - 1) / 2) * width, cell.speedup, width * 0.92,
                    color=COLOURS[number % len(COLOURS)], label=method if place == 0 else None,
                    yerr=[[max(cell.speedup - cell.low, 0)], [max(cell.high - cell.speedup, 0)]],
                    error_kw={"elinewidth": 0.8, "ecolor": "#444444"}, hatch="//" if number >= len(COLOURS) else None,
                )  # fmt: skip
    axes.axhline(1.0, color="#444444", linewidth=1)
    axes.set_xticks(range(len(cells)), [f"{name}\nn={_count(row)}" for name, row in cells.items()], fontsize=8)
    axes.set_ylabel("speedup over plain decoding (×)")
    axes.set_title(f"Median speedup, 95 % interval; temperature {temperature:g}", fontsize=10)
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)


def _count(row: dict[str, Any]) -> int:
    return max((cell.n for cell in row.values()), default=0)


def depth_lines(axes: Any, records: list[Record]) -> None:
    """Conditional acceptance by depth, a line for each method."""
    for number, method in enumerate(dict.fromkeys(record.method for record in records if record.depths and max(record.depths))):
        counts = acceptance_by_depth(record for record in records if record.method == method)
        rates = [(depth, took / offered) for depth, (took, offered) in enumerate(counts, start=1) if offered][:SHOWN_DEPTH]
        axes.plot(
            *zip(*rates, strict=True), color=COLOURS[number % len(COLOURS)], marker="osD^vPX*"[number % 8],
            label=f"{method} (n={counts[0][1]})", linestyle="--" if number >= len(COLOURS) else "-",
        )  # fmt: skip
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"depth in the draft tree (the first {SHOWN_DEPTH})")
    axes.set_ylabel("accepted, given the level above was")
    axes.set_title("Acceptance by depth (n: steps)", fontsize=10)
    axes.legend(fontsize=7, frameon=False, loc="lower left", ncol=2)


def time_bars(axes: Any, records: list[Record]) -> None:
    """Where a step's time goes, a bar for each method."""
    methods = list(dict.fromkeys(record.method for record in records))
    shares = {name: time_shares([record for record in records if record.method == name]) for name in methods}
    shown = {name: share for name, share in shares.items() if share}
    for place, share in enumerate(shown.values()):
        left = 0.0
        for number, (part, value) in enumerate(share.items()):
            axes.barh(place, 100 * value, left=100 * left, color=COLOURS[number], label=part if place == 0 else None)
            left += value
    axes.set_yticks(range(len(shown)), list(shown), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("share of the steps' time (%)")
    axes.set_title("Where a step's time goes", fontsize=10)
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)


def calibration(axes: Any, observed: dict[str, Any]) -> None:
    """Acceptance against the draft's confidence (paper, Figure 6)."""
    judged, accepted = observed["calibration"]["judged"], observed["calibration"]["accepted"]
    points = [
        ((place + 0.5) / len(judged), took / many, many)
        for place, (many, took) in enumerate(zip(judged, accepted, strict=True))
        if many
    ]
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=1, label="perfectly calibrated")
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], color=COLOURS[0], marker="o", label="measured")
    axes.plot(*zip(*PAPER_CALIBRATION, strict=True), "x", color=COLOURS[5], markersize=9, label="paper (its Figure 6)")
    axes.set_xlabel("draft confidence (bins of 0.05)")
    axes.set_ylabel("share accepted")
    axes.set_title(f"Confidence and acceptance, n={sum(judged)} nodes of {observed['questions']} questions", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def positions(axes: Any, observed: dict[str, Any]) -> None:
    """Acceptance by place in EAGLE-1's tree, its spread over questions (paper, Figure 5)."""
    places = sorted(observed["positions"], key=lambda place: (len(place), place))
    axes.boxplot(
        [observed["positions"][place] for place in places], tick_labels=places, showfliers=False,
        medianprops={"color": COLOURS[5]}, boxprops={"color": COLOURS[0]}, whiskerprops={"color": COLOURS[0]},
    )  # fmt: skip
    axes.tick_params(axis="x", labelrotation=90, labelsize=7)
    axes.set_ylim(0, 1)
    axes.set_xlabel("place in the tree, by child ranks (0: best)")
    axes.set_ylabel("share of steps that accepted it")
    axes.set_title(f"Acceptance by tree position over {observed['questions']} questions", fontsize=10)


def draft_tree(axes: Any, example: dict[str, Any], shown: int = 28) -> None:
    """One draft tree with its most valuable nodes, their values, and what was accepted."""
    order = sorted(range(len(example["words"])), key=lambda node: -example["values"][node])[:shown]
    kept, parents = sorted(order), example["parents"]
    children: dict[int, list[int]] = {node: [] for node in kept}
    for node in kept:
        if node:
            children[parents[node]].append(node)
    accepted, heights, depths = {0, *example["accepted"]}, {}, {0: 0}
    rows = 0

    def place(node: int) -> float:
        nonlocal rows
        own = []
        for child in children[node]:
            depths[child] = depths[node] + 1
            own.append(place(child))
        if not own:
            rows += 1
            own = [float(-rows)]
        heights[node] = sum(own) / len(own)
        return heights[node]

    place(0)
    for node in kept:
        edge, weight = (COLOURS[2], 2.2) if node in accepted else ("#BBBBBB", 0.9)
        if node:
            up = parents[node]
            axes.plot([depths[up], depths[node]], [heights[up], heights[node]], color=edge, linewidth=weight, zorder=1)
        word = example["words"][node].replace("\n", "⏎").replace("$", "\\$") or "·"
        box = {"boxstyle": "round,pad=0.25", "facecolor": "#D9F0E6" if node in accepted else "white", "edgecolor": edge}
        label = f"{word}\n{example['values'][node]:.2f}"
        axes.text(depths[node], heights[node], label, ha="center", va="center", fontsize=7, zorder=2, bbox=box)
    axes.set_axis_off()
    axes.set_title(
        f"A draft tree ({example['task']}, the {len(kept)} most valuable of {len(example['words'])} nodes): token and value; "
        f"green: accepted, then the target's own {example['own']!r}".replace("$", "\\$"),
        fontsize=9,
    )
