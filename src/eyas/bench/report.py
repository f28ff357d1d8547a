"""A run as text: a Markdown table in the paper's layout, and one HTML page with all of it."""

from __future__ import annotations

import base64
import html
from pathlib import Path

from eyas.bench.figures import pictures
from eyas.bench.methods import BASELINE
from eyas.bench.records import Run
from eyas.bench.summary import Cell, table
from eyas.files import replacing

CAPTIONS = {
    "speedup": "Speedup by task: median over answers of tokens per second over plain decoding's for the same prompt.",
    "acceptance": "Share of draft tokens accepted at each depth, given that the level above was.",
    "time": "Where the time of the steps goes (the prompt's forward excluded).",
    "calibration": "The draft's confidence in a token against how often the target took it.",
    "positions": "How often each place of EAGLE-1's fixed tree was accepted; boxes: quartiles over questions.",
    "tree": "One tree as drafted and verified.",
}


def markdown(run: Run) -> str:
    """The tables of a run, one for each temperature, and what it ran on."""
    lines = ["# Benchmark", "", described(run), ""]
    for temperature in dict.fromkeys(record.temperature for record in run.records):
        cells = table(run.records, temperature)
        methods = list(dict.fromkeys(name for row in cells.values() for name in row if name != BASELINE))
        lines += [f"## Temperature {temperature:g}", ""]
        lines.append("| method | | " + " | ".join(cells) + " |")
        lines.append("|---|---|" + "---|" * len(cells))
        for method in methods:
            row = {task: found.get(method) for task, found in cells.items()}
            lines.append(f"| {method} | speedup | " + " | ".join(_speedup(cell) for cell in row.values()) + " |")
            lines.append("| | τ | " + " | ".join(_tau(cell) for cell in row.values()) + " |")
            if temperature == 0:
                lines.append("| | same | " + " | ".join(_same(cell) for cell in row.values()) + " |")
        counts = {task: max((cell.n for cell in found.values()), default=0) for task, found in cells.items()}
        plain = {task: found.get(BASELINE) for task, found in cells.items()}
        lines.append("| answers | n | " + " | ".join(map(str, counts.values())) + " |")
        speeds = [f"{cell.tokens_per_second:.1f}" if cell else "" for cell in plain.values()]
        lines.append(f"| {BASELINE} | tokens/s | " + " | ".join(speeds) + " |")
        lines.append("")
    lines += notes(run)
    return "\n".join(lines) + "\n"


def _speedup(cell: Cell | None) -> str:
    return "" if cell is None else f"{cell.speedup:.2f} ({cell.low:.2f}–{cell.high:.2f})"


def _tau(cell: Cell | None) -> str:
    return "" if cell is None or cell.tau is None else f"{cell.tau:.2f}"


def _same(cell: Cell | None) -> str:
    return "" if cell is None else f"{cell.identical}/{cell.n}" + (f", {cell.near_ties} near-ties" if cell.near_ties else "")


def described(run: Run) -> str:
    """One paragraph about what was run on what."""
    where, what = run.environment, run.settings
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    return (
        f"{what['target']}, draft {what['draft']}, {where['dtype']} on {where['accelerator'] or where['processor']} "
        f"({where['threads']} threads, {where['cpu_capability']}); {versions}. {what['max_new_tokens']} new tokens, seed "
        f"{what['seed']}; methods interleaved question by question in one process, in an order drawn for each."
    )


def notes(run: Run) -> list[str]:
    """How to read the tables, and what was left out."""
    lines = [
        "speedup: median over answers of tokens per second over plain decoding's for the same prompt, with a 95 % bootstrap "
        "interval; mean: over tasks. τ: delivered tokens per draft-and-verify step, the prompt's forward excluded. same: "
        "greedy answers equal to plain decoding's token for token; near-ties: others that part where the target's own "
        "log-probabilities of the two tokens differ by no more than rounding in its dtype may.",
    ]
    if run.observed.get("calibration"):
        judged, accepted = run.observed["calibration"]["judged"], run.observed["calibration"]["accepted"]
        ends = [f"{accepted[place] / judged[place]:.2f} of {judged[place]}" if judged[place] else "none" for place in (0, -1)]
        lines += [
            "",
            f"Calibration: of draft tokens with confidence below 0.05 the target took {ends[0]} (paper 0.04), above 0.95 "
            f"{ends[1]} (paper 0.98).",
        ]
    if run.skipped:
        lines += ["", f"Skipped: {len(run.skipped)} questions, such as {run.skipped[0]['task']} {run.skipped[0]['id']}: "
                  f"{run.skipped[0]['reason']}."]  # fmt: skip
    return lines


def write_report(run: Run, folder: Path) -> list[Path]:
    """Write report.md, report.html and the pictures; returns what was written."""
    drawn = pictures(run)
    files: dict[str, bytes] = {f"{name}.png": data for name, data in drawn.items()}
    text = markdown(run)
    files["report.md"] = (text + "\n" + "\n".join(f"![{_caption(name)}]({name}.png)\n" for name in drawn)).encode()
    files["report.html"] = page(text, drawn).encode()
    for name, data in files.items():
        with replacing(folder / name, "report") as temporary:
            temporary.write_bytes(data)
    return [folder / name for name in files]


def _caption(name: str) -> str:
    kind, _, temperature = name.partition("-t")
    return CAPTIONS[kind] + (f" Temperature {temperature}." if temperature else "")


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 }
td, th { border: 1px solid #ccc; padding: .2rem .5rem; text-align: right }
td:first-child, th:first-child { text-align: left }
img { max-width: 100% } figure { margin: 2rem 0 } figcaption { color: #444; font-size: 13px }
"""


def page(text: str, drawn: dict[str, bytes]) -> str:
    """The report as one HTML file."""
    body: list[str] = []
    rows: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            if not line.startswith("|---"):
                tag = "td" if rows else "th"
                rows.append(
                    "<tr>" + "".join(f"<{tag}>{html.escape(part.strip())}</{tag}>" for part in line[1:-1].split("|")) + "</tr>"
                )
            continue
        if rows:
            body.append("<table>" + "".join(rows) + "</table>")
            rows = []
        if line.startswith("#"):
            level = len(line) - len(line.lstrip("#"))
            body.append(f"<h{level}>{html.escape(line[level:].strip())}</h{level}>")
        elif line:
            body.append(f"<p>{html.escape(line)}</p>")
    for name, data in drawn.items():
        source, caption = base64.b64encode(data).decode(), html.escape(_caption(name))
        image = f'<img src="data:image/png;base64,{source}" alt="{caption}">'
        body.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    head = f'<meta charset="utf-8"><title>Benchmark</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}{"".join(body)}</html>\n'
