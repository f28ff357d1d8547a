"""``eyas train`` from the shell: what it prints where, and its exit status."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from eyas import cli
from eyas.conversations import Conversations
from eyas.target import Target
from eyas.training.trainer import Trainer


@pytest.fixture(scope="module")
def folder(target: Target, data: Conversations, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with its tokenizer, and conversations, as files."""
    made = tmp_path_factory.mktemp("shell")
    target.model.save_pretrained(made / "target")
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(made / "target")
    lines = [json.dumps(row) for row in data.rows]
    (made / "data.jsonl").write_text("\n".join(lines))
    (made / "broken.jsonl").write_text("\n".join([*lines, "{broken"]))
    (made / "unanswered.jsonl").write_text(json.dumps({"prompt": "a b"}))
    (made / "empty.jsonl").write_text("")
    return made


def train(monkeypatch: pytest.MonkeyPatch, folder: Path, out: Path, *more: str, data: str = "data") -> int:
    """The command's exit status."""
    arguments = ["--target", str(folder / "target"), "--data", str(folder / f"{data}.jsonl"), "--out", str(out)]
    small = ["--epochs", "2", "--batch-tokens", "64", "--eval-every", "5", "--eval-tokens", "8", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["eyas", "train", *arguments, *small, *more])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_a_run_leaves_a_draft_that_generate_takes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(monkeypatch, folder, tmp_path / "draft") == 0
    out, err = capsys.readouterr()
    assert out == ""
    for said in ("4 of 20 conversations are held out", "kept in memory", "decoded τ", f"the draft is in {tmp_path / 'draft'}"):
        assert said in err
    paths = ["--target", str(folder / "target"), "--draft", str(tmp_path / "draft")]
    monkeypatch.setattr(sys, "argv", ["eyas", "generate", "a b", *paths, "--max-new-tokens", "4", "--depth", "2"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code


def test_preview_and_dry_run_print_and_stop(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(monkeypatch, folder, tmp_path / "draft", "--preview") == 0
    assert "⟦" in capsys.readouterr().out
    assert train(monkeypatch, folder, tmp_path / "draft", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "memory: features" in out and "disk: state" in out
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("empty", [], "no conversations in it"),
        ("unanswered", [], "no assistant token to train on. The first conversation reads: <user> a b"),
        ("unanswered", ["--preview"], "no assistant token to train on"),
        ("broken", ["--strict"], "line 21: not JSON"),
        ("nowhere", [], "no such file"),
        ("data", ["--draft-vocab", "17"], "draft_vocab is 17, but"),
        ("data", ["--loss", "luck"], "loss is luck; it must be one of published, distribution, top-k"),
        ("data", ["--from", "./nowhere"], "draft ./nowhere: no such folder"),
        ("data", ["--from", "./nowhere", "--start", "random"], "leave out --start or --from"),
        ("data", ["--accumulate", "0"], "accumulate is 0"),
    ],
)
def test_what_the_user_can_mend_gets_one_line(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    more: list[str],
    reason: str,
) -> None:
    assert train(monkeypatch, folder, tmp_path / "draft", *more, data=name) == 2
    complaint = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eyas:")]
    assert len(complaint) == 1 and reason in complaint[0]
    assert not (tmp_path / "draft").exists()


def test_broken_rows_are_left_out_with_a_word(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(monkeypatch, folder, tmp_path / "draft", "--dry-run", data="broken") == 0
    assert "left out 1 rows that cannot be used, such as line 21: not JSON" in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_the_same_command_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Trainer.step

    def interrupted(self: Trainer, *arguments: object) -> float:
        if self.steps_done == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        assert train(patch, folder, tmp_path / "draft") == 130
    assert "stopped after step 4; the same command continues" in capsys.readouterr().err
    assert train(monkeypatch, folder, tmp_path / "draft", "--resume") == 0
    assert "continuing after step 4" in capsys.readouterr().err
