"""Costs for people to read: tables and lines of made-up ones, and the whole of `eyas inspect --costs` on a tiny target."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from eyas import cli
from eyas.budget import NARROW, ONE_LEVEL, SIZES, WIDE, StepCosts
from eyas.checkpoint import save_head
from eyas.costs import Survey, contexts, describe, draw, linear_terms
from eyas.remembered import FILE
from tests import families
from tests.drafts import engine, head_config, random_head
from tests.test_decode import make_tokenizer

PNG = b"\x89PNG\r\n\x1a\n"


def made_up(*tokens: int) -> Survey:
    """T(n) is 10 ms, 0.5 a node, and 2 for every thousand tokens of context; a level 1 ms, 0.1 more for each node beyond 4."""
    drafting = {ONE_LEVEL: 0.002, NARROW: 0.002 + 3 * 0.001, WIDE: 0.002 + 5 * 0.0016}
    times = {n: {size: 0.01 + 0.0005 * size + 2e-6 * n for size in SIZES} for n in tokens}
    return Survey("tiny", "float32", "an abacus", 2, {n: StepCosts(times[n], drafting, 0.0005) for n in tokens})


def test_lines_through_the_times_are_named() -> None:
    assert linear_terms(made_up(64, 512, 2048)) == [
        "T(n) ≈ 10.1 ms + 0.5 ms a node, at a context of 64 (off by 0 % at most)",
        "T(1) ≈ 10.5 ms + 2 ms per 1000 tokens of context",
        "T(61) ≈ 40.5 ms + 2 ms per 1000 tokens of context",
    ]


def test_tables() -> None:
    found = [line.split() for line in describe(made_up(64, 512, 2048))]
    for row in (
        ["61", "40.6", "3.82"],  # T(n) and T(n)/T(1) at the shortest context
        ["the", "first", "level", "2.50", "24", "%"],
        ["a", "further", "level", "of", "4", "1.00", "9", "%"],
        ["a", "further", "level", "of", "10", "1.60", "15", "%"],
        ["nodes", "n", "64", "512", "2048"],
        ["13", "16.6", "17.5", "20.6"],
    ):
        assert row in found


def test_one_context_has_no_table_by_context() -> None:
    text = "\n".join(describe(made_up(48)))
    assert "a node, at a context of 48" in text and "1000 tokens" not in text and "by tokens of context" not in text


def test_contexts_stay_below_half_the_targets_limit() -> None:
    assert contexts(8192) == [64, 512, 2048]
    assert contexts(1024) == [64, 512]
    assert contexts(2048) == [64, 512, 1024]
    assert contexts(96) == [48]


def test_the_picture_shows_all_contexts_and_all_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two panels, a line for each entry of the legend, units at every axis."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    seen = []
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *rest, **more: (seen.append(self), save(self, *rest, **more)))
    draw(made_up(64, 512, 2048), tmp_path / "costs.png")
    assert (tmp_path / "costs.png").read_bytes().startswith(PNG)
    left, right = seen[0].axes
    assert [line.get_label() for line in left.get_lines()] == ["context 64", "context 512", "context 2048"]
    assert [line.get_label() for line in right.get_lines()] == ["n = 1", "n = 13", "n = 61"]
    for axes, across in ((left, "nodes"), (right, "tokens")):
        assert across in axes.get_xlabel() and "ms" in axes.get_ylabel()
        assert len({line.get_color() for line in axes.get_lines()} | {line.get_marker() for line in axes.get_lines()}) == 6
    assert right.get_lines()[0].get_xdata().tolist() == [64, 512, 2048]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name the tiny target and a draft for it, as folders."""
    folder = tmp_path_factory.mktemp("costs")
    families.model("llama").save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    save_head(random_head(head_config(engine("llama").target)), folder / "draft")
    return [str(folder / "draft"), "--target", str(folder / "target")]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The command's exit status."""
    monkeypatch.setattr(sys, "argv", ["eyas", "inspect", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_in_the_shell(
    place: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What inspect says without, then the costs; a picture; and what a start needs is remembered."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    assert run(monkeypatch, *place) == 0
    before = capsys.readouterr().out
    assert not (tmp_path / "cache").exists()
    picture = tmp_path / "costs.png"
    assert run(monkeypatch, *place, "--costs", "--picture", picture, "--device", "cpu", "--dtype", "float32") == 0
    out, err = capsys.readouterr()
    assert out.startswith(before) and "fits" in before
    rows = [line.split() for line in out.removeprefix(before).splitlines()]
    assert [int(row[0]) for row in rows if len(row) == 3 and row[0].isdigit()] == list(SIZES)
    assert "the first level" in out and "a further level of 10" in out and "ms a node, at a context of 48" in out
    assert picture.read_bytes().startswith(PNG) and str(picture) in err
    (entry,) = json.loads((tmp_path / "cache" / FILE).read_text()).values()
    assert run(monkeypatch, *place, "--costs", "--device", "cpu") == 0
    (again,) = json.loads((tmp_path / "cache" / FILE).read_text()).values()
    assert again["at"] > entry["at"], "measured anew every time"


def test_what_cannot_be_is_told_before_anything_is_measured(
    place: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, nothing on standard output, no model loaded."""
    monkeypatch.setattr("eyas.cli.decoding.load_target", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    for wrong, word in ((tmp_path / "file" / "costs.png", "cannot be written"), (tmp_path / "folder.png", "Is a directory")):
        assert run(monkeypatch, *place, "--costs", "--picture", wrong) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and word in err and str(wrong) in err
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest))
    assert run(monkeypatch, *place, "--costs", "--picture", tmp_path / "costs.png") == 2
    assert capsys.readouterr().err == "eyas: pictures need matplotlib; run: pip install 'eyas[bench]'\n"
