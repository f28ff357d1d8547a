"""`eyas bench` from its options to a folder with numbers, tables and pictures."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from eyas.bench.measure import Protocol, measure
from eyas.bench.methods import BASELINE, KNOWN, make_method
from eyas.bench.observe import observe
from eyas.bench.records import JOURNAL, RUN, Journal, Run, environment, read_run, write_run
from eyas.bench.report import write_report
from eyas.bench.tasks import TASKS, Question, choose_questions, nearest, own_questions, read_folder, read_hub
from eyas.engine import Engine
from eyas.errors import EyasError
from eyas.files import need_matplotlib
from eyas.progress import progress_bar
from eyas.sampling import SamplingOptions

DEFAULT_METHODS = (
    BASELINE,
    "eagle2",
    "eagle2:60/6/10",
    "eagle1",
    "chain",
    "eagle2-confidence",
    "eagle2-no-rerank",
    "ngram",
    "transformers",
)
UNTRAINED_METHODS = (BASELINE, "ngram", "transformers", "transformers-lookup")
QUICK_METHODS = (BASELINE, "eagle2", "eagle1", "chain", "ngram", "transformers")


@dataclass(frozen=True)
class BenchOptions:
    """What to run.

    Attributes:
        out: folder of the results; a run that was cut short there is continued.
        methods: their names; the baseline is always among them.
        tasks: names of tasks; None: all there are.
        tasks_dir: folder of JSONL files; None: the built-in questions.
        hub: take the paper's six tasks from the hub.
        per_task: questions of each task; None: all.
        turns: of each question at most; None: all.
        protocol: what all methods have in common.
        observed: questions to watch single draft nodes on; 0: none.
    """

    out: Path
    methods: tuple[str, ...] = DEFAULT_METHODS
    tasks: tuple[str, ...] | None = None
    tasks_dir: Path | None = None
    hub: bool = False
    per_task: int | None = None
    turns: int | None = None
    protocol: Protocol = field(default_factory=Protocol)
    observed: int = 6

    def __post_init__(self) -> None:
        numbers = {"per_task": self.per_task, "turns": self.turns, "max_new_tokens": self.protocol.max_new_tokens}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise EyasError(f"{name} is {value}; it must be at least 1")
        if self.observed < 0:
            raise EyasError(f"observed is {self.observed}; it must be at least 0")
        if not self.protocol.temperatures:
            raise EyasError("no temperature given; pass one, such as 0, or several as 0,1")
        for temperature in self.protocol.temperatures:
            SamplingOptions(temperature=temperature)
        for name in self.methods:
            nearest(name.partition(":")[0], KNOWN, "method")

    def quick(self) -> BenchOptions:
        """A few minutes' worth of the same."""
        protocol = replace(self.protocol, max_new_tokens=min(self.protocol.max_new_tokens, 64), temperatures=(0.0,))
        methods = QUICK_METHODS if self.methods == DEFAULT_METHODS else self.methods
        return replace(self, methods=methods, per_task=1, protocol=protocol, observed=min(self.observed, 2))


def read_questions(options: BenchOptions) -> list[Question]:
    """The questions that the options name.

    Raises:
        EyasError: an unknown task, an empty file, no such folder.
    """
    if options.tasks_dir is not None:
        found = read_folder(options.tasks_dir)
    elif options.hub:
        names = [nearest(name, TASKS, "task") for name in options.tasks or TASKS]
        found = read_hub(names, options.per_task or 80)
    else:
        found = own_questions()
    found = [replace(each, turns=each.turns[: options.turns]) for each in found]
    return choose_questions(found, options.tasks, options.per_task)


def check_folder(folder: Path) -> None:
    """Refuse an output folder that cannot be written, before any work.

    Raises:
        EyasError: it cannot, or matplotlib is missing.
    """
    need_matplotlib()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise EyasError(f"output {folder}: cannot be written ({error.strerror}); pass another folder") from error


def run_bench(engine: Engine, draft_name: str, questions: Sequence[Question], options: BenchOptions, console: Console) -> Run:
    """Measure, observe, and write run.json and the report to the options' folder.

    Raises:
        EyasError: a method that cannot run here, or a folder that holds another run.
    """
    names = list(dict.fromkeys((BASELINE, *options.methods)))
    methods = {name: make_method(name, engine) for name in names}
    settings: dict[str, Any] = {
        "target": engine.target.name, "draft": draft_name, "methods": names, "questions": len(questions),
        "assistant": engine.assistant.name if engine.assistant else None, "digest": digest(questions),
        "dtype": engine.target.precision, "device": str(engine.target.device),
        **asdict(options.protocol),
        "tasks": list(dict.fromkeys(question.task for question in questions)),
        "temperatures": list(options.protocol.temperatures),  # as JSON gives them back
    }  # fmt: skip
    check_folder(options.out)
    where = environment(engine.target.precision, engine.target.device)
    started, skipped, seen = options.out / RUN, [], {}
    if started.exists():
        before = read_run(started)
        differs = [name for name in settings if before.settings.get(name) != settings[name]]
        if differs:
            name = differs[0]
            raise EyasError(
                f"output {options.out} holds a run with {name} {before.settings.get(name)}, not {settings[name]}; "
                "pass another --out, or the same options to continue it"
            )
        skipped, seen = before.skipped, before.observed
    journal = Journal(options.out / JOURNAL)
    write_run(started, Run(settings, where, journal.records, skipped, seen))
    with progress_bar(console, len(questions) * len(options.protocol.temperatures)) as update:
        skipped = measure(engine, methods, questions, options.protocol, journal, update)
    if options.observed and not seen and engine.draft is not None:
        with console.status("watching draft trees …"):
            gone = {(each["task"], each["id"]) for each in skipped}
            watched = [each for each in questions if (each.task, each.id) not in gone]
            seen = observe(engine, watched[: options.observed], options.protocol.max_new_tokens)
    run = Run(settings, where, journal.records, skipped, seen)
    write_run(started, run)
    for path in write_report(run, options.out):
        console.print(os.fspath(path), soft_wrap=True, highlight=False)
    return run


def digest(questions: Sequence[Question]) -> str:
    """What tells one set of questions from another."""
    return hashlib.blake2b(repr([(each.task, each.id, each.turns) for each in questions]).encode(), digest_size=8).hexdigest()
