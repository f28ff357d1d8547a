"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

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
TreeOption = Annotated[
    str | None,
    typer.Option("--tree", help="adaptive: what pays, step by step; fixed: as published, the default with a size."),
]
LookupOption = Annotated[
    int | None, typer.Option("--lookup", help="Tokens an adaptive tree may take from the text itself; 0: none. Default: 40.")
]
CoupledOption = Annotated[
    bool | None,
    typer.Option("--coupled/--uncoupled", help="Show the draft the numbers of sampling. Default: for an adaptive tree only."),
]
TokensOption = Annotated[int | None, typer.Option("--tokens", help="Draft tokens verified a step (eagle2, ngram, model).")]
DepthOption = Annotated[int | None, typer.Option("--depth", help="Levels of draft tokens (eagle2, chain, ngram, model).")]
WidthOption = Annotated[
    int | None, typer.Option("--width", help="Nodes expanded a level, and children a node (eagle2, ngram, model).")
]
RankByOption = Annotated[str | None, typer.Option("--rank-by", help="value, or the paper's ablation: confidence (eagle2).")]
RerankOption = Annotated[
    bool | None, typer.Option("--rerank/--no-rerank", help="The paper's other ablation: no reranking (eagle2).")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16, float16, or for a .gguf 4bit.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, …")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the target's checkpoint.")]
ColorOption = Annotated[bool, typer.Option("--color/--no-color", help="Tint accepted draft tokens, in a terminal.")]
