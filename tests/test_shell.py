"""From nothing to a checked draft in the shell, on a tiny target: data, train, check, bench, and what they leave behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from eyas import cli
from eyas.bench import check
from tests.training import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target and some prompts, as files."""
    made, target = tmp_path_factory.mktemp("flow"), tiny.make_target()
    target.model.save_pretrained(made / "target")
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(made / "target")
    (made / "prompts.txt").write_text("\n".join(" ".join("abcdefghij"[n : n + 3]) for n in range(8)))
    (made / "tasks").mkdir()
    rows = [{"id": n, "turns": [" ".join("abcdefghij"[n : n + 2])]} for n in range(2)]
    (made / "tasks" / "letters.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return made


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The command's exit status."""
    monkeypatch.setattr(sys, "argv", ["eyas", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_from_no_data_to_a_checked_draft(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--target", folder / "target", "--device", "cpu"]
    talk, draft, results = folder / "talk.jsonl", folder / "draft", folder / "results"
    made = [*target, "--out", talk, "--max-new-tokens", 12, "--rows", 4]
    assert run(monkeypatch, "data", "--prompts", folder / "prompts.txt", *made) == 0
    assert "conversations," in capsys.readouterr().err and len(talk.read_text().splitlines()) >= 4
    before = len(talk.read_text().splitlines())
    assert run(monkeypatch, "data", "--self", "--tokens", 400, *made) == 0
    assert len(talk.read_text().splitlines()) > before, "one file takes both"

    train = ["train", *target, "--data", talk, "--out", draft, "--epochs", 1, "--batch-tokens", 128, "--eval-tokens", 4]
    assert run(monkeypatch, *train) == 0
    assert run(monkeypatch, *train) == 2
    assert "already holds a draft" in capsys.readouterr().err

    monkeypatch.setattr(check, "SAMPLES", 40)
    audit = ["check", *target, "--draft", draft, "--prompts", folder / "prompts.txt", "--limit", 2, "--max-new-tokens", 8]
    assert run(monkeypatch, *audit) == 0
    out = capsys.readouterr().out
    assert "ok   greedy, float32, eagle2: 2 of 2 prompts equal" in out and out.endswith("lossless: no difference found\n")

    bench = ["bench", *target, "--draft", draft, "--tasks-dir", folder / "tasks", "--out", results, "--max-new-tokens", 6]
    assert run(monkeypatch, *bench, "--methods", "eagle2:8/3/3,ngram", "--temperatures", "0", "--observed", 1) == 0
    first = capsys.readouterr().out
    assert "| eagle2:8/3/3 | speedup |" in first and (results / "report.html").exists()
    assert run(monkeypatch, "bench", "report", results / "run.json") == 0
    assert capsys.readouterr().out == first
    assert run(monkeypatch, "bench", "compare", results / "run.json", results / "run.json") == 0
    assert "no difference beyond noise" in capsys.readouterr().out


def test_a_target_without_a_draft_is_compared_with_what_needs_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--target", folder / "target", "--device", "cpu", "--tasks-dir", folder / "tasks", "--out", folder / "plain"]
    assert run(monkeypatch, "bench", *place, "--max-new-tokens", 5, "--temperatures", "0") == 0
    assert "| transformers-lookup | speedup |" in capsys.readouterr().out


def test_an_audit_that_fails_ends_with_status_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = check.Finding("greedy", False, "1 of 2 prompts equal plain decoding")
    monkeypatch.setattr(check, "audit", lambda *_: [finding])
    audit = ["check", "--target", folder / "target", "--device", "cpu", "--method", "ngram"]
    assert run(monkeypatch, *audit, "--prompts", folder / "prompts.txt") == 1
    assert "FAIL greedy: 1 of 2" in capsys.readouterr().out
