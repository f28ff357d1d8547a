"""The curves of a run: a JSON line a step, a picture, and whatever tracker accelerate was given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from eyas.files import can_draw, replacing, write_error

CURVES_FILE, PICTURE_FILE = "curves.jsonl", "curves.png"


class Curves:
    """Values by optimiser step; only the main process writes.

    Args:
        out: folder of ``curves.jsonl`` and ``curves.png``.
        step: where the run goes on; later lines, of a run that was cut off, are dropped.
    """

    def __init__(self, accelerator: Accelerator, out: Path, step: int) -> None:
        self.accelerator, self.out = accelerator, out
        accelerator.init_trackers("eyas")
        if accelerator.is_main_process:
            kept = [line for line in read_curves(out) if line["step"] <= step]
            with replacing(out / CURVES_FILE, "curves") as temporary:
                temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Record values of a step; numbers go to the trackers too."""
        if self.accelerator.is_main_process:
            try:
                with (self.out / CURVES_FILE).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, **values}) + "\n")
            except OSError as error:
                raise write_error(f"curves {self.out / CURVES_FILE}", error) from error
        self.accelerator.log({name: value for name, value in values.items() if isinstance(value, float)}, step=step)

    def draw(self) -> None:
        """Draw loss and τ, if matplotlib is installed."""
        if self.accelerator.is_main_process and can_draw():
            draw(read_curves(self.out), self.out / PICTURE_FILE)


def read_curves(out: Path) -> list[dict[str, Any]]:
    """The lines of ``curves.jsonl``; a last line that was cut off is left out."""
    lines: list[dict[str, Any]] = []
    file = out / CURVES_FILE
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def draw(lines: list[dict[str, Any]], file: Path) -> None:
    """A picture of the loss, and of τ where it was measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    left = figure.add_subplot(xlabel="optimiser step", ylabel="loss")
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    if losses:
        left.plot(*zip(*losses, strict=True), linewidth=0.5, color="tab:gray")
    right = left.twinx()
    right.set_ylabel("tokens a step")
    for name, label in (("tau", "τ, decoded"), ("tree", "τ, teacher-forced")):
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        if points:
            right.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
            right.legend(loc="center right")
    with replacing(file, "picture") as temporary:
        figure.savefig(temporary, format="png", dpi=150)
