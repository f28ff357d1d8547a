"""Curves, with and without the libraries that draw them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from eyas.conversations import Conversations
from eyas.target import Target
from eyas.training import train
from eyas.training.curves import draw, read_curves
from tests.training.tiny import quiet, short_options


def test_a_cut_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "curves.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_curves(tmp_path) == [{"step": 1, "loss": 2.0}]
    assert read_curves(tmp_path / "nowhere") == []


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 2, "tau": 1.5, "tree": 2.0}]
    draw(lines, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_fails_without_the_libraries(
    target: Target, data: Conversations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def absent(name: str, *rest: Any) -> Any:
        return None if name in ("matplotlib", "tensorboard") else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    console, options = quiet(), short_options(tmp_path / "out", epochs=1)
    train(target, data, None, options, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("matplotlib is not installed") == 1
    assert sorted(path.name for path in options.out.iterdir()) == ["config.json", "curves.jsonl", "model.safetensors"]


def test_trackers_get_the_curves(target: Target, data: Conversations, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options = short_options(tmp_path / "out", epochs=1)
    train(target, data, None, options, quiet())
    assert list((options.out / "logs").rglob("events.*"))
