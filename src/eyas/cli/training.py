"""eyas data, eyas train."""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eyas.cli.app import app
from eyas.cli.options import DeviceOption, DtypeOption, SeedOption, TargetOption, TrustOption
from eyas.errors import EyasError
from eyas.loading import load_target
from eyas.terminal import note, progress, read_numbers


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
    from eyas.conversations import left_out, read_conversations
    from eyas.data import DataOptions, make_conversations

    if invent == (prompts is not None):
        raise EyasError("pass either --self or --prompts FILE")
    options = DataOptions(
        out=out, tokens=tokens, temperatures=read_numbers("temperatures", temperatures),
        question_temperature=question_temperature, max_new_tokens=max_new_tokens, rows=rows, system=system, seed=seed,
        endpoint=endpoint, model=model, target=target, dtype=dtype, device=device, trust_remote_code=trust_remote_code,
        **({} if openings is None else {"openings": openings}),
    )  # fmt: skip
    found = read_conversations(prompts, strict=strict, limit=limit, split=split) if prompts is not None else None
    for line in left_out(found):
        note(line)
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
    split: Annotated[str, typer.Option("--split", help="Of data sets on the hub.")] = "train",
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
    distill_temperature: Annotated[
        float | None,
        typer.Option("--distill-temperature", help="Of the target's distribution that is learnt; below 1 for greedy decoding."),
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
    from eyas.conversations import left_out

    given = {
        "out": out, "resume": resume, "start": start, "from_draft": from_draft, "minutes": minutes, "epochs": epochs,
        "steps": unroll, "draft_vocab_size": draft_vocab, "max_length": max_length, "batch_tokens": batch_tokens,
        "accumulate": accumulate, "loss": loss, "entropy_weight": entropy_weight,
        "distill_temperature": distill_temperature, "learning_rate": learning_rate,
        "schedule": schedule, "warmup": warmup, "weight_decay": weight_decay, "clip": clip, "noise": noise,
        "dropout": dropout, "average": average, "feature_memory": feature_memory, "cache_features": cache_features,
        "evaluate_every": eval_every, "eval_prompts": eval_prompts, "eval_tokens": eval_tokens, "save_every": save_every,
        "seed": seed,
    }  # fmt: skip
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    options = training.TrainOptions(**chosen)
    speaks = training.join_processes(device)  # under accelerate launch one process speaks for all
    found, others = training.read_inputs(options, data, heldout, strict, split)  # mistakes in them must not wait for the target
    for line in left_out(found, others) if speaks else []:
        note(line)
    with progress(f"loading {target or 'the embedded target'}") if speaks else nullcontext():
        loaded = load_target(target, dtype=dtype, device=device, trust_remote_code=trust_remote_code, packed=False)
    if preview or dry_run:
        for line in training.rehearse(loaded, found, others, options, preview, strict) if speaks else []:
            print(line)
        return
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")  # torch's, of norms under autocast
    training.train(loaded, found, others, options, strict=strict)
    if speaks:
        note(f"the draft is in {out}")
