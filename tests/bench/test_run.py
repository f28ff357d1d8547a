"""A whole run on the tiny target: what is measured, continued, refused, and drawn."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eyas.bench import BenchOptions, Protocol, check, read_run, run_bench
from eyas.bench.check import audit, two_sample
from eyas.bench.measure import compared, first_difference, log_margin
from eyas.bench.methods import BASELINE, Asked, make_method
from eyas.bench.observe import observe, steps_of
from eyas.bench.records import Journal, Record, Run
from eyas.bench.report import markdown, write_report
from eyas.bench.run import check_folder
from eyas.bench.shapes import project, shape_config
from eyas.bench.tasks import Question
from eyas.engine import Engine
from eyas.errors import EyasError
from eyas.policies import DynamicTree

QUESTIONS = [
    Question("letters", "1", ("a b", "c")), Question("words", "1", ("d e f",)), Question("letters", "2", ("g",)),
    Question("words", "2", ("h i j k",)),
]  # fmt: skip
METHODS = (BASELINE, "eagle2:12/3/3", "eagle1", "chain:3", "ngram", "eagle2-confidence", "eagle2-no-lookup", "transformers")
COUPLINGS = ("eagle2", "eagle2-uncoupled", "eagle2-coupled:12/3/3", "eagle2:12/3/3")


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> BenchOptions:
    return BenchOptions(tmp_path_factory.mktemp("bench"), methods=METHODS, protocol=Protocol(9, (0.0, 1.0)), observed=2)


@pytest.fixture(scope="module")
def finished(engine: Engine, options: BenchOptions) -> Run:
    return run_bench(engine, "random", QUESTIONS, options, quiet())


def test_every_method_answers_every_turn_at_every_temperature(finished: Run) -> None:
    keys = {record.key for record in finished.records}
    assert len(keys) == len(finished.records) == 5 * 2 * len(METHODS)
    for record in finished.records:
        assert record.seconds > 0 and 1 <= len(record.tokens) <= 9
        if record.method == "transformers":
            assert record.delivered is None
        else:
            assert record.delivered is not None and len(record.tokens) == 1 + sum(record.delivered)
        if record.temperature == 0:
            assert record.divergence is None, "float32: all equal"


def test_ours_agree_at_temperature_1_too(finished: Run) -> None:
    """One seed, one text: our methods draw the same tokens."""
    texts: dict[Any, set[tuple[int, ...]]] = {}
    for record in finished.records:
        if record.temperature == 1 and record.method != "transformers":
            texts.setdefault(record.key[:4], set()).add(tuple(record.tokens))
    assert all(len(said) == 1 for said in texts.values())


def test_the_second_turn_holds_the_first_answer(finished: Run) -> None:
    first, second = (
        next(r for r in finished.records if (r.task, r.id, r.turn, r.temperature) == ("letters", "1", turn, 0.0))
        for turn in (0, 1)
    )
    assert second.prompt_tokens > first.prompt_tokens + len(first.tokens) // 2


def test_the_files_are_there_and_the_json_holds_all(finished: Run, options: BenchOptions) -> None:
    names = {path.name for path in options.out.iterdir()}
    assert {
        "run.json",
        "report.md",
        "report.html",
        "speedup-t0.png",
        "acceptance-t0.png",
        "time-t0.png",
        "calibration.png",
    } <= names
    again = read_run(options.out / "run.json")
    assert again == finished
    text = markdown(finished)
    assert "| letters | words | mean |" in text and "eagle2:12/3/3" in text
    page = (options.out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len([name for name in names if name.endswith(".png")])
    written = write_report(again, options.out)
    assert all(path.stat().st_size > 500 for path in written)


def test_a_killed_run_continues(engine: Engine, options: BenchOptions, finished: Run, tmp_path: Path) -> None:
    part = replace(options, out=tmp_path)
    lines = (options.out / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_text("".join(lines[:17]) + lines[17][:40])
    (tmp_path / "run.json").write_text(json.dumps({**json.loads((options.out / "run.json").read_text()), "records": []}))
    assert read_run(tmp_path / "run.json").records == finished.records[:17], "a report of it shows what there is"
    again = run_bench(engine, "random", QUESTIONS, part, quiet())
    assert {record.key for record in again.records} == {record.key for record in finished.records}
    assert again.records[:17] == finished.records[:17], "what was measured is not measured again"
    with pytest.raises(EyasError, match="holds a run with max_new_tokens 9, not 8"):
        run_bench(engine, "random", QUESTIONS, replace(part, protocol=Protocol(8, (0.0, 1.0))), quiet())


def test_a_prompt_past_the_context_is_skipped_and_told(engine: Engine, options: BenchOptions, tmp_path: Path) -> None:
    questions = [*QUESTIONS[:2], Question("letters", "long", ("a " * 150,))]
    short = replace(options, out=tmp_path, methods=(BASELINE, "ngram"), observed=0)
    found = run_bench(engine, "random", questions, short, quiet())
    assert [each["id"] for each in found.skipped] == ["long"] and "of the context" in found.skipped[0]["reason"]
    assert "Skipped: " in markdown(found)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("eagel2", r"method eagel2 is unknown; did you mean eagle2\?"), ("eagle2:1/2", "not of the form eagle2:tokens/"),
        ("eagle2:0/2/2", "tokens is 0"), ("eagle1:5", "eagle1 alone"),
        ("eagle2-confidence:5", "tokens/depth/width"), ("transformers:5", "takes no tree"),
        ("model", "--assistant"), ("transformers-assisted", "--assistant"), ("llama.cpp", "llama-cpp-python"),
    ],
)  # fmt: skip
def test_methods_that_cannot_run_are_told(engine: Engine, name: str, reason: str) -> None:
    with pytest.raises(EyasError, match=reason):
        make_method(name, engine)


@pytest.mark.parametrize("name", ["transformers", "transformers-static", "transformers-lookup", "transformers-assisted"])
def test_peers_say_what_the_target_says(engine: Engine, name: str) -> None:
    helped = Engine(engine.target, engine.draft, "eagle2", engine.target)
    ids = engine.render([{"role": "user", "content": "a b c"}])
    plain = engine.generate(ids, max_new_tokens=8, method="autoregressive").token_ids
    assert make_method(name, helped)(ids, Asked(8, 0.0, 0)).tokens == plain
    assert len(make_method(name, helped)(ids, Asked(8, 1.0, 0)).tokens) <= 8


def test_divergence_and_its_margin(engine: Engine) -> None:
    assert first_difference([1, 2], [1, 2]) is None and first_difference([1, 2, 3], [1, 5]) == 1
    assert first_difference([1], [1, 2]) == 1
    ids = engine.render([{"role": "user", "content": "a b c"}])
    said = engine.generate(ids, max_new_tokens=6, method="autoregressive").token_ids
    wrong = Record("a", "1", 0, 0.0, "x", len(ids), [said[0], (said[1] + 1) % 16], 1.0)
    found = compared(engine, ids, wrong, said)
    assert found.divergence == 1 and found.margin is not None and found.tolerance is not None
    assert found.margin > found.tolerance > 0
    assert compared(engine, ids, replace(wrong, tokens=said[:1]), said).margin is None


def test_a_margin_is_the_same_however_long_the_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is run in pieces; none may be lost or seen twice."""
    ids, answer = engine.render([{"role": "user", "content": "a b c"}]), [3, 5, 7, 9, 4, 6, 8]
    whole = log_margin(engine, ids, answer, 3, 5)
    monkeypatch.setattr("eyas.bench.measure.MANY_ROWS", 4)
    assert log_margin(engine, ids, answer, 3, 5) == pytest.approx(whole, abs=1e-5)
    assert log_margin(engine, [*ids, *answer], [], 3, 5) == pytest.approx(whole, abs=1e-5)


def test_coupled_trees_say_the_same(engine: Engine) -> None:
    """Sharing the numbers changes what is drafted, never what is said."""
    ids = engine.render([{"role": "user", "content": "a b c"}])
    said = [make_method(name, engine)(ids, Asked(12, 1.0, 3)).tokens for name in (BASELINE, *COUPLINGS)]
    assert said == said[:1] * len(said)


def test_observed_nodes(engine: Engine) -> None:
    ids = engine.render([{"role": "user", "content": "a b c"}])
    steps = list(steps_of(engine, ids, "eagle1", 12))
    assert steps and all({"", "0", "1", "2", "3"} <= set(step.ranks().values()) for step in steps)
    for step in steps:
        assert all(0 <= step.confidence(node) <= 1 + 1e-6 for node in range(1, len(step.tokens)))
    seen = observe(engine, QUESTIONS[:2], 12)
    judged, accepted = seen["calibration"]["judged"], seen["calibration"]["accepted"]
    assert all(took <= many for took, many in zip(accepted, judged, strict=True)) and sum(judged) > 20
    assert all(0 <= rate <= 1 for rates in seen["positions"].values() for rate in rates)


def test_the_audit_passes_here_and_can_fail(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SAMPLES", 60)
    prompts = [engine.render([{"role": "user", "content": text}]) for text in ("a b", "c d e")]
    assert [finding.passed for finding in audit(engine, prompts, "eagle2", 8)] == [True, True]
    generate = Engine.generate

    def wrong(self: Engine, ids: Any, **options: Any) -> Any:
        result = generate(self, ids, **options)
        if options["method"] != "autoregressive":
            result = replace(result, token_ids=[(token + 1) % 16 for token in result.token_ids])
        return result

    monkeypatch.setattr(Engine, "generate", wrong)
    assert [finding.passed for finding in audit(engine, prompts, "eagle2", 8)] == [False, False]


def test_the_two_sample_test_is_calibrated() -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    same = [tuple(row) for row in torch.randint(0, 3, (400, 2), generator=generator).tolist()]
    tilted = [tuple(row) for row in (torch.rand(200, 2, generator=generator) ** 2 * 3).long().tolist()]
    assert two_sample(same[:200], same[200:], 0) > 0.01
    assert two_sample(same[:200], tilted, 0) < 0.005


def test_journals_and_folders(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "r.jsonl")
    record = Record("a", "1", 0, 0.0, "x", 3, [1, 2], 0.5)
    journal.add([record])
    (tmp_path / "r.jsonl").open("a").write('{"task": "half')
    assert Journal(tmp_path / "r.jsonl").records == [record]
    assert (tmp_path / "r.jsonl").read_text().endswith("}\n")
    with pytest.raises(EyasError, match="cannot be written"):
        check_folder(tmp_path / "r.jsonl")
    with pytest.raises(EyasError, match="cannot be read as a benchmark run"):
        read_run(tmp_path / "r.jsonl")


def test_a_shape_is_timed_with_random_weights(tmp_path: Path) -> None:
    import torch

    small = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 480, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(small))
    tree = DynamicTree(12, 3, 4)
    found = project(str(tmp_path / "config.json"), torch.float32, torch.device("cpu"), (tree,), rounds=1)
    assert found.costs.verify.keys() >= {1, 13, 61} and found.costs.draft[tree] > 0
    plain, verify, draft = found.costs.verify[1], found.costs.verify[13], found.costs.draft[tree]
    assert found.costs.speedup(tree, 4.0) == pytest.approx(4 * plain / (verify + draft + found.costs.commit))
    assert shape_config("llama-2-7b").num_hidden_layers == 32
    with pytest.raises(EyasError, match=r"did you mean llama-2-7b\?"):
        shape_config("llama2-7b")
    with pytest.raises(EyasError, match=r"needs .* GB"):
        project("llama-2-70b", torch.float32, torch.device("cpu"), (tree,))
