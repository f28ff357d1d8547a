"""eyas bench, eyas check."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eyas.cli.app import app
from eyas.cli.options import (
    AssistantOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    MaxNewOption,
    MethodOption,
    TargetOption,
    TrustOption,
)
from eyas.engine import load
from eyas.errors import EyasError
from eyas.terminal import progress, read_numbers

bench_app = typer.Typer(
    help="Compare methods on questions: one command, a table and pictures that can be trusted.",
    invoke_without_command=True, rich_markup_mode=None,
)  # fmt: skip
app.add_typer(bench_app, name="bench")


@bench_app.callback()
def bench(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the results; a run cut short there goes on.")] = None,
    methods: Annotated[
        str | None, typer.Option("--methods", help="With commas between; eagle2:60/6/10 pins a tree. Unknown names list all.")
    ] = None,
    tasks: Annotated[str | None, typer.Option("--tasks", help="Tasks, with commas between; default: all.")] = None,
    tasks_dir: Annotated[
        Path | None, typer.Option("--tasks-dir", help="Folder of JSONL questions; default: 48 built-in ones.")
    ] = None,
    hub: Annotated[bool, typer.Option("--hub", help="Take the paper's six tasks from the hub.")] = False,
    per_task: Annotated[int | None, typer.Option("--per-task", help="Questions of each task.")] = None,
    turns: Annotated[int | None, typer.Option("--turns", help="Turns of each question at most.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Of an answer.")] = 128,
    temperatures: Annotated[str, typer.Option("--temperatures", help="With commas between.")] = "0,1",
    observed: Annotated[int, typer.Option("--observed", help="Questions to watch single draft nodes on.")] = 6,
    seed: Annotated[int, typer.Option("--seed", help="Of sampling.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="One question a task, 64 tokens, greedy: a few minutes.")] = False,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", help="No run: time a model of this shape (llama-2-7b, …, or a config.json) with random weights."
        ),
    ] = None,
    taus: Annotated[str, typer.Option("--tau", help="With --shape: τ to print speedups for.")] = "3,4,4.64",
    target: TargetOption = None,
    draft: DraftOption = None,
    assistant: AssistantOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
) -> None:
    """Compare methods on questions: one command, a table and pictures that can be trusted."""
    if context.invoked_subcommand is not None:
        return
    from eyas.bench import BenchOptions, Protocol, run_bench
    from eyas.bench.report import markdown
    from eyas.bench.run import DEFAULT_METHODS, UNTRAINED_METHODS, check_folder, read_questions

    if shape is not None:
        project_shape(shape, read_numbers("tau", taus), dtype, device)
        return
    if out is None:
        raise EyasError("no output folder; pass --out DIR (or --shape NAME for a projection)")
    alone = draft is None and target is not None  # a target without a draft
    protocol = Protocol(max_new_tokens, read_numbers("temperatures", temperatures), seed)
    chosen = split_names(methods) or (UNTRAINED_METHODS if alone else DEFAULT_METHODS)
    options = BenchOptions(
        out=out, methods=chosen, tasks=split_names(tasks), tasks_dir=tasks_dir, hub=hub,
        per_task=per_task, turns=turns, protocol=protocol, observed=observed,
    )  # fmt: skip
    options = options.quick() if quick else options
    wanted_questions = read_questions(options)  # mistakes must not wait for the model
    check_folder(out)
    with progress(f"loading {target or 'the embedded target'}"):
        engine = load(
            target, draft, dtype=dtype, device=device, assistant=assistant, trust_remote_code=trust_remote_code,
            method="autoregressive" if alone else "eagle2",
        )  # fmt: skip
    run = run_bench(
        engine, draft or ("none" if alone else "the shipped one"), wanted_questions, options, Console(file=sys.stderr)
    )
    print(markdown(run))


@bench_app.command("report")
def bench_report(
    run: Annotated[Path, typer.Argument(help="A run.json.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write to; default: the run's own.")] = None,
) -> None:
    """Draw a run's report again, without running anything."""
    from eyas.bench import read_run
    from eyas.bench.report import markdown, write_report
    from eyas.bench.run import check_folder

    found = read_run(run)
    folder = out or run.parent
    check_folder(folder)
    write_report(found, folder)
    print(markdown(found))


@bench_app.command("compare")
def bench_compare(
    before: Annotated[Path, typer.Argument(help="A run.json.")], after: Annotated[Path, typer.Argument(help="Another.")]
) -> None:
    """Say what got better between two runs, beyond noise."""
    from eyas.bench import read_run
    from eyas.bench.compare import compare

    for line in compare(read_run(before), read_run(after)):
        print(line)


@app.command()
def check(
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", help="Your prompts: text with one a line, .jsonl or .json; default: built-in ones."),
    ] = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    assistant: AssistantOption = None,
    method: MethodOption = "eagle2",
    max_new_tokens: MaxNewOption = 64,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Prompts at most.")] = 12,
    seed: Annotated[int, typer.Option("--seed", help="Of sampling.")] = 0,
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
) -> None:
    """Test on your own prompts that decoding with a draft is lossless here; exit status 1 if it is not."""
    from eyas.bench.check import audit, audit_dtypes
    from eyas.bench.tasks import own_questions
    from eyas.conversations import read_conversations

    if prompts is None:
        asked = [[{"role": "user", "content": each.turns[0]}] for each in own_questions()[::4]]
    else:
        asked = [first_request(row["messages"]) for row in read_conversations(prompts, limit=limit).rows]
    passed = True
    for dtype in audit_dtypes():
        with progress(f"loading {target or 'the embedded target'} in {dtype}"):
            engine = load(
                target, draft, dtype=dtype, device=device, method=method, assistant=assistant,
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
        ids = [engine.render(messages) for messages in asked[:limit]]
        with progress(f"checking in {dtype}"):
            found = audit(engine, ids, method, max_new_tokens, seed)
        for finding in found:
            print(f"{'ok  ' if finding.passed else 'FAIL'} {finding.what}: {finding.detail}")
            passed &= finding.passed
        del engine  # one at a time in memory
    print("lossless: no difference found" if passed else "NOT lossless: see the lines above")
    if not passed:
        raise typer.Exit(1)


def project_shape(shape: str, taus: tuple[float, ...], dtype: str, device: str) -> None:
    """Print what a model of a shape would gain on this device."""
    from eyas.bench.shapes import TREES, lines, project, shape_config
    from eyas.loading import pick_device, pick_dtype

    shape_config(shape)
    where = pick_device(device)
    with progress(f"timing {shape}"):
        found = project(shape, pick_dtype(dtype, where, None), where, TREES)
    print("\n".join(lines(found, taus)))


def first_request(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """A conversation up to the user's first turn."""
    turn = next(place for place, message in enumerate(messages) if message["role"] == "user")
    return messages[: turn + 1]


def split_names(text: str | None) -> tuple[str, ...] | None:
    """Names with commas between; None where nothing was given."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else None
