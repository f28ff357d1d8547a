"""eyas generate, eyas chat, eyas inspect."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from eyas.cli.app import INTERRUPTED, app
from eyas.cli.options import (
    AssistantOption,
    BiasOption,
    ColorOption,
    CoupledOption,
    DepthOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    FrequencyOption,
    LookupOption,
    MaxNewOption,
    MethodOption,
    MinNewOption,
    MinPOption,
    PresenceOption,
    RankByOption,
    RepetitionOption,
    RerankOption,
    SeedOption,
    StopOption,
    TargetOption,
    TemperatureOption,
    TokensOption,
    TopKOption,
    TopPOption,
    TreeOption,
    TrustOption,
    WidthOption,
)
from eyas.engine import Engine, load
from eyas.errors import EyasError
from eyas.files import check_picture
from eyas.inspection import inspect_draft
from eyas.loading import load_draft, load_target
from eyas.options import TREE_SETTINGS, check_options
from eyas.terminal import Shower, note, progress, questions, read_bias, read_prompt, summary


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
    tree: TreeOption = None,
    lookup: LookupOption = None,
    coupled: CoupledOption = None,
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
        "stop": stop, "seed": seed, "method": method, "tree": tree, "lookup": lookup, "coupled": coupled, "tokens": tokens,
        "depth": depth, "width": width, "rank_by": rank_by, "rerank": rerank,
    }  # fmt: skip
    engine = open_engine(target, draft, assistant, method, dtype, device, trust_remote_code, options)
    ids = text if raw else engine.render([{"role": "user", "content": text}])
    plain = {**options, "method": "autoregressive", **dict.fromkeys(("tree", "lookup", "coupled", *TREE_SETTINGS))}
    if compare:
        plain["seed"] = options["seed"] = secrets.randbits(32) if seed is None else seed  # both draw the same numbers
        for each in (options, plain):  # nobody's first call pays for warming up
            if engine.generate(ids, **{**each, "max_new_tokens": min(4, max_new_tokens)}).finish_reason == "interrupted":
                raise typer.Exit(INTERRUPTED)
    show = Shower(color, quiet=as_json)
    stream = engine.stream(ids, **options)
    interrupted = show.pieces(stream)
    result = stream.result
    if as_json:
        print(json.dumps({
            "text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason,
            "stats": {**result.stats.as_dict(), "method": method, "dtype": engine.target.precision},
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
    tree: TreeOption = None,
    lookup: LookupOption = None,
    coupled: CoupledOption = None,
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
        "repetition_penalty": repetition_penalty, "seed": seed, "tree": tree, "lookup": lookup, "coupled": coupled,
        "tokens": tokens, "depth": depth, "width": width,
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
            own = None if seed is None else (seed + len(messages)) % 2**64  # no turn has another's numbers
            stream = engine.stream(engine.render(messages), session=session, **{**options, "seed": own})
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
    costs: Annotated[
        bool, typer.Option("--costs", help="Load both, and time what a step costs here, by tree size and by context.")
    ] = False,
    picture: Annotated[Path | None, typer.Option("--picture", help="With --costs: a PNG file to draw them to.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
) -> None:
    """Print what a draft checkpoint is, what it fits, and what is missing; with --costs what a step costs here."""
    if not costs and (picture is not None or (dtype, device) != ("auto", "auto")):
        raise EyasError("--picture, --dtype and --device are for measuring; add --costs")
    if picture is not None:
        check_picture(picture)
    lines, problem = inspect_draft(draft, target, trust_remote_code)
    for name, value in lines:
        print(f"{name:<14} {value}")
    if problem is not None:
        raise problem
    if costs:
        print(flush=True)
        show_costs(draft, target, picture, dtype, device, trust_remote_code)


def show_costs(draft: str | None, target: str | None, picture: Path | None, dtype: str, device: str, trust: bool) -> None:
    """Measure what a step costs, print it, and draw it if asked to."""
    from eyas.costs import describe, draw, survey

    with progress(f"loading {target or 'the embedded target'}"):
        fitted = load_draft(draft, load_target(target, dtype=dtype, device=device, trust_remote_code=trust))
    with progress("measuring what a step costs here"):
        found = survey(fitted)
    print("\n".join(describe(found)))
    if picture is not None:
        draw(found, picture)
        note(f"the picture is in {picture}")


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
    if call.adaptive:
        with progress("finding out what a step costs here"):
            engine.adaptive  # noqa: B018
    return engine
