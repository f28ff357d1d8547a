"""The ``eyas`` command: arguments in, calls out. Text goes to standard output, everything else to standard error."""

from __future__ import annotations

import json
import os
import secrets
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eyas import __version__
from eyas.engine import Engine, load
from eyas.errors import EyasError
from eyas.inspection import inspect_draft
from eyas.loading import load_target
from eyas.options import TREE_SETTINGS, check_options
from eyas.terminal import Shower, note, progress, questions, read_bias, read_numbers, read_prompt, summary

app = typer.Typer(
    name="eyas",
    help="Decode causal language models faster, with exactly their own output (EAGLE-2).",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
INTERRUPTED = 130

TargetOption = Annotated[
    str | None,
    typer.Option("--target", help="Hub id, folder or .gguf file; default: the embedded SmolLM2-135M-Instruct."),
]
DraftOption = Annotated[
    str | None, typer.Option("--draft", help="Hub id or folder of an EAGLE-1/2 draft; default: the one Eyas ships.")
]
AssistantOption = Annotated[
    str | None, typer.Option("--assistant", help="A smaller model with the same tokens, for method model.")
]
MethodOption = Annotated[
    str, typer.Option("--method", help="eagle2, eagle1, chain, ngram (prompt lookup), model (a smaller one) or autoregressive.")
]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", help="0: greedy. Default: the model's own.")]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Keep the k most likely tokens; 0: all.")]
TopPOption = Annotated[float | None, typer.Option("--top-p", help="Keep the smallest set of tokens with this probability.")]
MinPOption = Annotated[float | None, typer.Option("--min-p", help="Drop tokens below this share of the most likely one.")]
RepetitionOption = Annotated[
    float | None, typer.Option("--repetition-penalty", help="Above 1: seen tokens become less likely.")
]
FrequencyOption = Annotated[float | None, typer.Option("--frequency-penalty", help="Subtracted per generated occurrence.")]
PresenceOption = Annotated[float | None, typer.Option("--presence-penalty", help="Subtracted once a token was generated.")]
BiasOption = Annotated[list[str] | None, typer.Option("--logit-bias", help="TOKEN_ID=VALUE, added to its logit; repeatable.")]
MinNewOption = Annotated[int | None, typer.Option("--min-new-tokens", help="No end before so many new tokens.")]
MaxNewOption = Annotated[int, typer.Option("--max-new-tokens", help="At most so many new tokens.")]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="A string that ends the text; repeatable.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Of the random numbers; default: random.")]
TokensOption = Annotated[int | None, typer.Option("--tokens", help="Draft tokens verified a step (eagle2, ngram, model).")]
DepthOption = Annotated[int | None, typer.Option("--depth", help="Levels of draft tokens (eagle2, chain, ngram, model).")]
WidthOption = Annotated[
    int | None, typer.Option("--width", help="Nodes expanded a level, and children a node (eagle2, ngram, model).")
]
RankByOption = Annotated[str | None, typer.Option("--rank-by", help="value, or the paper's ablation: confidence (eagle2).")]
RerankOption = Annotated[
    bool | None, typer.Option("--rerank/--no-rerank", help="The paper's other ablation: no reranking (eagle2).")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, …")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the target's checkpoint.")]
ColorOption = Annotated[bool, typer.Option("--color/--no-color", help="Tint accepted draft tokens, in a terminal.")]


@app.callback()
def start(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False
) -> None:
    """Decode causal language models faster, with exactly their own output (EAGLE-2)."""
    if version:
        print(f"eyas {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or none: standard input.")] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="Read the prompt from a UTF-8 file.")] = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    assistant: AssistantOption = None,
    method: MethodOption = "eagle2",
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionOption = None,
    frequency_penalty: FrequencyOption = None,
    presence_penalty: PresenceOption = None,
    logit_bias: BiasOption = None,
    min_new_tokens: MinNewOption = None,
    max_new_tokens: MaxNewOption = 512,
    stop: StopOption = None,
    seed: SeedOption = None,
    tokens: TokensOption = None,
    depth: DepthOption = None,
    width: WidthOption = None,
    rank_by: RankByOption = None,
    rerank: RerankOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Pass the prompt as it is, without the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with text, token ids and statistics.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Then decode plainly too, and print the speedup.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
    color: ColorOption = True,
) -> None:
    """Continue a prompt; in a terminal the accepted draft tokens are tinted."""
    text = read_prompt(prompt, file)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty, "logit_bias": read_bias(logit_bias), "min_new_tokens": min_new_tokens,
        "stop": stop, "seed": seed, "method": method, "tokens": tokens, "depth": depth, "width": width,
        "rank_by": rank_by, "rerank": rerank,
    }  # fmt: skip
    engine = open_engine(target, draft, assistant, method, dtype, device, trust_remote_code, options)
    ids = text if raw else engine.render([{"role": "user", "content": text}])
    plain = {**options, "method": "autoregressive", **dict.fromkeys(TREE_SETTINGS)}
    if compare:
        plain["seed"] = options["seed"] = secrets.randbits(32) if seed is None else seed  # both draw the same numbers
        for each in (options, plain):  # nobody's first call pays for warming up
            engine.generate(ids, **{**each, "max_new_tokens": min(4, max_new_tokens)})
    show = Shower(color, quiet=as_json)
    stream = engine.stream(ids, **options)
    interrupted = show.pieces(stream)
    result = stream.result
    if as_json:
        print(json.dumps({
            "text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason,
            "stats": {**result.stats.as_dict(), "method": method, "dtype": str(engine.target.dtype).removeprefix("torch.")},
        }, ensure_ascii=False))  # fmt: skip
    note(summary(result))
    if compare and not interrupted:
        other = engine.generate(ids, **plain)
        interrupted = other.finish_reason == "interrupted"
    if compare and not interrupted:
        same = "the same tokens" if other.token_ids == result.token_ids else "tokens that part (rounding at a near-tie)"
        speedup = result.stats.tokens_per_second / other.stats.tokens_per_second
        note(f"plain decoding: {other.stats.tokens_per_second:.1f} tokens/s, {same}; speedup {speedup:.2f}x")
    if interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command()
def chat(
    target: TargetOption = None,
    draft: DraftOption = None,
    assistant: AssistantOption = None,
    method: MethodOption = "eagle2",
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionOption = None,
    max_new_tokens: MaxNewOption = 512,
    seed: SeedOption = None,
    tokens: TokensOption = None,
    depth: DepthOption = None,
    width: WidthOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
    color: ColorOption = True,
) -> None:
    """Talk with the model; the cache of earlier turns is kept. Ctrl-C stops an answer, Ctrl-D ends."""
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed, "tokens": tokens, "depth": depth, "width": width,
    }  # fmt: skip
    engine = open_engine(target, draft, assistant, method, dtype, device, trust_remote_code, options)
    opening = [{"role": "system", "content": system}] if system else []
    messages, session, show = list(opening), engine.session(), Shower(color)
    engine.render([*messages, {"role": "user", "content": "?"}])  # a missing template is told before the first question
    note("/reset forgets the conversation, /quit or Ctrl-D ends")
    for line in questions():
        if line == "/quit":
            break
        if line.startswith("/") and line != "/reset":
            note(f"there is no command {line.split()[0]}; /reset and /quit are all")
            continue
        if line == "/reset":
            messages, session = list(opening), engine.session()
            continue
        messages.append({"role": "user", "content": line})
        try:
            stream = engine.stream(engine.render(messages), session=session, **options)
            show.pieces(stream)
        except EyasError as error:
            messages.pop()
            note(f"{error} (/reset starts anew)")
            continue
        messages.append({"role": "assistant", "content": stream.result.text})
        note(summary(stream.result))


@app.command()
def inspect(
    draft: Annotated[str | None, typer.Argument(help="Hub id or folder of a draft; default: the one Eyas ships.")] = None,
    target: TargetOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Print what a draft checkpoint is, what it fits, and what is missing."""
    lines, problem = inspect_draft(draft, target, trust_remote_code)
    for name, value in lines:
        print(f"{name:<14} {value}")
    if problem is not None:
        raise problem


@app.command()
def data(
    out: Annotated[Path, typer.Option("--out", help="JSONL file of conversations; continued where it exists.")],
    invent: Annotated[bool, typer.Option("--self", help="No data: the target invents the requests too.")] = False,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            help="Requests: a text file with one a line, .jsonl or .json of prompts, messages or ShareGPT "
            "turns, or a data set's hub id; answers in it are written anew.",
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Stop after so many tokens of answers.")] = None,
    target: TargetOption = None,
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="Of the answers; each conversation draws one.")
    ] = "0,0.7,1",
    question_temperature: Annotated[float, typer.Option("--question-temperature", help="Of invented requests.")] = 0.9,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Of an answer; longer ones are cut.")] = 384,
    rows: Annotated[int, typer.Option("--rows", help="Conversations held at a time.")] = 32,
    openings: Annotated[
        Path | None, typer.Option("--openings", help="How invented requests begin, one a line; default: a built-in list.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of everything drawn.")] = 0,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", help="Let an OpenAI-compatible server write: its URL, with /v1. EYAS_API_KEY: its key."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The server's model; default: the first it serves.")] = None,
    split: Annotated[str, typer.Option("--split", help="Of a data set.")] = "train",
    limit: Annotated[int | None, typer.Option("--limit", help="Read at most so many prompts.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a broken row instead of leaving it out.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
) -> None:
    """Make conversations in the target's own words, to train a draft on. Ctrl-C keeps what is done; run again to go on."""
    from eyas.data import DataOptions, make_conversations
    from eyas.training.conversations import read_conversations

    if invent == (prompts is not None):
        raise EyasError("pass either --self or --prompts FILE")
    options = DataOptions(
        out=out, tokens=tokens, temperatures=read_numbers("temperatures", temperatures),
        question_temperature=question_temperature, max_new_tokens=max_new_tokens, rows=rows, system=system, seed=seed,
        endpoint=endpoint, model=model, target=target, dtype=dtype, device=device, trust_remote_code=trust_remote_code,
        **({} if openings is None else {"openings": openings}),
    )  # fmt: skip
    found = read_conversations(prompts, strict=strict, limit=limit, split=split) if prompts is not None else None
    if found is not None and found.skipped:
        note(f"left out {len(found.skipped)} rows that cannot be used, such as {found.skipped[0]}")
    desk = make_conversations(options, found, Console(file=sys.stderr))
    for why, count in desk.dropped.items():
        note(f"dropped: {count} {why}")
    note(f"{out} holds {len(desk.corpus.keys)} conversations, {desk.corpus.tokens} tokens of answers")


@app.command()
def train(
    data: Annotated[
        str, typer.Option("--data", help="Conversations answered by the target itself: a file or a data set's hub id.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the draft to write.")],
    heldout: Annotated[
        str | None, typer.Option("--heldout", help="Conversations to evaluate on; default: some of the data.")
    ] = None,
    target: TargetOption = None,
    preview: Annotated[bool, typer.Option("--preview", help="Show one conversation with its mask, and stop.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell steps, memory and disk, and stop.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse rows that cannot be used, instead of skipping.")] = False,
    resume: Annotated[
        bool | None, typer.Option("--resume/--no-resume", help="Continue the unfinished run in OUT (default), or start anew.")
    ] = None,
    start: Annotated[str | None, typer.Option("--start", help="regression, last-layer or random.")] = None,
    from_draft: Annotated[str | None, typer.Option("--from", help="A draft to train further, instead of --start.")] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Time limit; the schedule fits into it.")] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the data at most.")] = None,
    unroll: Annotated[int | None, typer.Option("--unroll", help="Draft steps trained on the head's own outputs.")] = None,
    draft_vocab: Annotated[
        int | None, typer.Option("--draft-vocab", help="Most frequent tokens the draft may propose; 0: all.")
    ] = None,
    max_length: Annotated[int | None, typer.Option("--max-length", help="Conversations are cut to so many tokens.")] = None,
    batch_tokens: Annotated[int | None, typer.Option("--batch-tokens", help="Padded tokens a micro-batch.")] = None,
    accumulate: Annotated[
        int | None, typer.Option("--accumulate", help="Micro-batches an optimiser step, all processes together.")
    ] = None,
    loss: Annotated[str | None, typer.Option("--loss", help="published, distribution or top-k.")] = None,
    entropy_weight: Annotated[
        float | None, typer.Option("--entropy-weight", help="Weight of the published loss's cross-entropy.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", help="The peak.")] = None,
    schedule: Annotated[str | None, typer.Option("--schedule", help="How the rate falls: cosine or linear.")] = None,
    warmup: Annotated[float | None, typer.Option("--warmup", help="Share of the run in which the rate rises.")] = None,
    weight_decay: Annotated[float | None, typer.Option("--weight-decay", help="AdamW's, on matrices.")] = None,
    clip: Annotated[float | None, typer.Option("--clip", help="Largest norm of the gradient.")] = None,
    noise: Annotated[float | None, typer.Option("--noise", help="Width of the noise on the features; 0: none.")] = None,
    dropout: Annotated[float | None, typer.Option("--dropout", help="On the layer's branches.")] = None,
    average: Annotated[
        float | None, typer.Option("--average", help="Decay of the running mean of the weights; 0: none.")
    ] = None,
    feature_memory: Annotated[
        float | None, typer.Option("--feature-memory", help="GiB that the target's features may take in memory.")
    ] = None,
    cache_features: Annotated[
        Path | None, typer.Option("--cache-features", help="Keep the target's features in this folder.")
    ] = None,
    eval_every: Annotated[int | None, typer.Option("--eval-every", help="Optimiser steps between evaluations.")] = None,
    eval_prompts: Annotated[int | None, typer.Option("--eval-prompts", help="Held-out prompts decoded at each.")] = None,
    eval_tokens: Annotated[int | None, typer.Option("--eval-tokens", help="New tokens each of them gets at most.")] = None,
    save_every: Annotated[int | None, typer.Option("--save-every", help="Optimiser steps between saved states.")] = None,
    seed: SeedOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
) -> None:
    """Train a draft head for a target on conversations it wrote. Ctrl-C saves; the same command then continues."""
    from eyas import training

    given = {
        "out": out, "resume": resume, "start": start, "from_draft": from_draft, "minutes": minutes, "epochs": epochs,
        "steps": unroll, "draft_vocab_size": draft_vocab, "max_length": max_length, "batch_tokens": batch_tokens,
        "accumulate": accumulate, "loss": loss, "entropy_weight": entropy_weight, "learning_rate": learning_rate,
        "schedule": schedule, "warmup": warmup, "weight_decay": weight_decay, "clip": clip, "noise": noise,
        "dropout": dropout, "average": average, "feature_memory": feature_memory, "cache_features": cache_features,
        "evaluate_every": eval_every, "eval_prompts": eval_prompts, "eval_tokens": eval_tokens, "save_every": save_every,
        "seed": seed,
    }  # fmt: skip
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    options = training.TrainOptions(**chosen)
    speaks = training.join_processes(device)  # under accelerate launch one process speaks for all
    found, others = training.read_inputs(options, data, heldout, strict)  # mistakes in them must not wait for the target
    for line in training.left_out(found, others) if speaks else []:
        note(line)
    with progress(f"loading {target or 'the embedded target'}") if speaks else nullcontext():
        loaded = load_target(target, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    if preview or dry_run:
        for line in training.rehearse(loaded, found, others, options, preview, strict) if speaks else []:
            print(line)
        return
    training.train(loaded, found, others, options, strict=strict)
    if speaks:
        note(f"the draft is in {out}")


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
    from eyas.bench.run import DEFAULT_METHODS, check_folder, read_questions

    if shape is not None:
        project_shape(shape, read_numbers("tau", taus), dtype, device)
        return
    if out is None:
        raise EyasError("no output folder; pass --out DIR (or --shape NAME for a projection)")
    protocol = Protocol(max_new_tokens, read_numbers("temperatures", temperatures), seed)
    options = BenchOptions(
        out=out, methods=split_names(methods) or DEFAULT_METHODS, tasks=split_names(tasks), tasks_dir=tasks_dir, hub=hub,
        per_task=per_task, protocol=protocol, observed=observed,
    )  # fmt: skip
    options = options.quick() if quick else options
    wanted_questions = read_questions(options)  # mistakes must not wait for the model
    check_folder(out)
    with progress(f"loading {target or 'the embedded target'}"):
        alone = draft is None and target is not None
        engine = load(
            target, draft, dtype=dtype, device=device, assistant=assistant, trust_remote_code=trust_remote_code,
            method="autoregressive" if alone else "eagle2",
        )  # fmt: skip
    run = run_bench(engine, draft or "the shipped one", wanted_questions, options, Console(file=sys.stderr))
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
    method: MethodOption = "eagle2",
    max_new_tokens: MaxNewOption = 64,
    limit: Annotated[int, typer.Option("--limit", help="Prompts at most.")] = 12,
    seed: Annotated[int, typer.Option("--seed", help="Of sampling.")] = 0,
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
) -> None:
    """Test on your own prompts that decoding with a draft is lossless here; exit status 1 if it is not."""
    from eyas.bench.check import audit, audit_dtypes
    from eyas.bench.tasks import own_questions
    from eyas.training.conversations import read_conversations

    if prompts is None:
        asked = [[{"role": "user", "content": each.turns[0]}] for each in own_questions()[::4]]
    else:
        rows = read_conversations(prompts).rows
        asked = [[m for m in row["messages"] if m["role"] != "assistant"][:1] for row in rows]
    passed = True
    for dtype in audit_dtypes():
        with progress(f"loading {target or 'the embedded target'} in {dtype}"):
            engine = load(target, draft, dtype=dtype, device=device, method=method, trust_remote_code=trust_remote_code)
        ids = [engine.render(messages) for messages in asked[:limit]]
        with progress(f"checking in {dtype}"):
            found = audit(engine, ids, method, max_new_tokens, seed)
        for finding in found:
            print(f"{'ok  ' if finding.passed else 'FAIL'} {finding.what}: {finding.detail}")
            passed &= finding.passed
    print("lossless: no difference found" if passed else "NOT lossless: see the lines above")
    if not passed:
        raise typer.Exit(1)


def project_shape(shape: str, taus: tuple[float, ...], dtype: str, device: str) -> None:
    """Print what a model of a shape would gain on this device."""
    from eyas.bench.shapes import lines, project, shape_config
    from eyas.budget import LADDER
    from eyas.loading import pick_device, pick_dtype

    shape_config(shape)
    where = pick_device(device)
    trees = tuple(tree for tree, _ in LADDER if tree.tokens in (12, 24, 60))
    with progress(f"timing {shape}"):
        found = project(shape, pick_dtype(dtype, where, None), where, trees)
    print("\n".join(lines(found, trees, taus)))


def split_names(text: str | None) -> tuple[str, ...] | None:
    """Names with commas between; None where nothing was given."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else None


def open_engine(
    target: str | None,
    draft: str | None,
    assistant: str | None,
    method: str,
    dtype: str,
    device: str,
    trust: bool,
    options: dict[str, Any],
) -> Engine:
    """Check the options, then load, telling what is going on: a mistake in an option must not wait for a model."""
    call = check_options({**options, "method": method})
    with progress(f"loading {target or 'the embedded target'}"):
        engine = load(target, draft, dtype=dtype, device=device, method=method, assistant=assistant, trust_remote_code=trust)
    if call.measured:
        with progress("measuring which tree pays here"):
            note(f"tree {engine.tree.tokens}/{engine.tree.depth}/{engine.tree.top_k} (tokens/depth/width), as measured here")
    return engine


def main() -> None:
    """Entry point: exit status 0; 2 with one line for what the user can mend; 130 after Ctrl-C."""
    warnings.showwarning = lambda message, *_: note(" ".join(str(message).split()))
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
    except EyasError as error:
        status = complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: end without a word
        status = 0
    except OSError as error:
        status = complain(f"the output cannot be written ({error.strerror or error}); free space or choose another place")
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own usage errors have it; their classes are private
            raise
        status = complain(error.format_message())
    sys.exit(status if isinstance(status, int) else 0)


def complain(message: str) -> int:
    """Say on one line what is wrong; the exit status that goes with it."""
    note(" ".join(message.split()))
    return 2
