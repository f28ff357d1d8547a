"""Remembered costs: what was written is read; what is old, damaged or of other conditions is measured again; nothing fails."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eyas import remembered
from eyas.budget import NARROW, ONE_LEVEL, WIDE, StepCosts
from eyas.drafters.eagle import EagleDraft
from eyas.engine import Engine
from eyas.remembered import DAY, FILE, as_dict, cache_file, conditions, from_dict, step_costs
from tests.drafts import engine, random_draft

START = 1_000_000.0


class World:
    """A clock, a cache folder, and measurements that are counted: the n-th says that plain decoding takes n seconds."""

    def __init__(self, folder: Path) -> None:
        self.file, self.now, self.measured = folder / FILE, START, 0

    def measure(self, draft: EagleDraft) -> StepCosts:
        self.measured += 1
        return StepCosts({1: float(self.measured), 2: 9.0, 61: 30.5}, {ONE_LEVEL: 0.25, NARROW: 1.5, WIDE: 2.75}, 0.125)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path / "cache")
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remembered, "measure_costs", made.measure)
    monkeypatch.setattr(remembered, "time", SimpleNamespace(time=lambda: made.now))
    return made


@pytest.fixture
def draft() -> EagleDraft:
    found = engine("llama").draft
    assert found is not None
    return found


def test_what_was_measured_is_read_back(world: World, draft: EagleDraft) -> None:
    first = step_costs(draft)
    assert (step_costs(draft), world.measured) == (first, 1)
    assert [file.name for file in world.file.parent.iterdir()] == [FILE], "no temporary file is left"
    chosen = Engine(draft.target, draft)
    assert chosen.adaptive.costs == first and world.measured == 1, "an engine goes by them"


def test_json_keeps_every_digit() -> None:
    costs = StepCosts({1: 0.1, 2: 1 / 3, 61: 2 / 3}, {ONE_LEVEL: 0.7, NARROW: 1e-6 / 3, WIDE: 1e5 / 7}, 0.3)
    assert from_dict(json.loads(json.dumps(as_dict(costs)))) == costs


def test_after_a_day_or_from_the_future_they_are_measured_again(world: World, draft: EagleDraft) -> None:
    step_costs(draft)
    for now, measured in ((START + DAY - 1, 1), (START + DAY, 2), (START + 1.5 * DAY, 2), (START, 3)):
        world.now = now
        step_costs(draft)
        assert world.measured == measured


def test_fresh_ones_take_the_place_of_the_old(world: World, draft: EagleDraft) -> None:
    step_costs(draft)
    assert step_costs(draft, fresh=True).verify[1] == 2.0
    assert step_costs(draft).verify[1] == 2.0 and world.measured == 2


def test_other_conditions_have_costs_of_their_own(world: World, draft: EagleDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another draft, vocabulary, target, thread count, machine or torch; the old ones stay, and the stale are dropped."""
    step_costs(draft)
    world.now += DAY / 2
    target = draft.target
    wider = random_draft(target, intermediate_size=44)
    fewer = random_draft(target, token_map=torch.arange(20))
    other = engine("qwen3").draft
    assert other is not None
    for each in (wider, fewer, other):
        step_costs(each)
    keys = {conditions(each) for each in (draft, wider, fewer, other)}
    assert world.measured == len(keys) == 4 and set(json.loads(world.file.read_text())) == keys
    for name, value in (("torch.get_num_threads", 77), ("eyas.remembered.processor", "abacus")):
        with monkeypatch.context() as patch:
            patch.setattr(name, lambda value=value: value)
            keys.add(conditions(draft))
    monkeypatch.setattr(torch, "__version__", "9.9")
    keys.add(conditions(draft))
    assert len(keys) == 7
    world.now += DAY / 2
    step_costs(draft)
    assert len(json.loads(world.file.read_text())) == 4, "of the first there is a new one, under another torch"


DAMAGED = {
    "nothing": b"", "cut off": b'{"a": {"at"', "no text": b"\xff\xfe", "a list": b"[]", "a number": b"3",
    "deep": b"[" * 100_000, "no times": b'{"a": 3}',
}  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_as_none(content: bytes, world: World, draft: EagleDraft) -> None:
    world.file.parent.mkdir()
    world.file.write_bytes(content)
    assert step_costs(draft).verify[1] == 1.0
    assert step_costs(draft).verify[1] == 1.0 and world.measured == 1, "and is mended"


GOOD = as_dict(StepCosts({1: 1.0, 2: 2.0}, {ONE_LEVEL: 1.0, NARROW: 1.0, WIDE: 1.0}, 1.0))
WRONG = {
    "none": None, "empty": {}, "no plain decoding": {**GOOD, "verify": {"2": 1.0, "3": 1.0}},
    "one size": {**GOOD, "verify": {"1": 1.0}}, "disorder": {**GOOD, "verify": {"2": 1.0, "1": 1.0}},
    "negative": {**GOOD, "commit": -1.0}, "infinite": {**GOOD, "verify": {"1": 1.0, "2": float("inf")}},
    "words": {**GOOD, "commit": "soon"}, "no trees": {**GOOD, "draft": {}}, "no size": {**GOOD, "draft": {"60/6": 1.0}},
    "impossible": {**GOOD, "draft": {**GOOD["draft"], "0/0/0": 1.0}}, "lists": {**GOOD, "verify": [1.0, 2.0]},
}  # fmt: skip


@pytest.mark.parametrize("costs", WRONG.values(), ids=WRONG)
def test_damaged_costs_are_as_none(costs: object, world: World, draft: EagleDraft) -> None:
    step_costs(draft)
    world.file.write_text(json.dumps({conditions(draft): {"at": START, "costs": costs}}))
    assert step_costs(draft).verify[1] == 2.0
    assert step_costs(draft).verify[1] == 2.0


def test_a_folder_that_cannot_be_written_is_ignored(world: World, draft: EagleDraft, capfd: pytest.CaptureFixture[str]) -> None:
    world.file.parent.write_text("a file where the folder should be")
    assert [step_costs(draft).verify[1] for _ in range(2)] == [1.0, 2.0]
    assert capfd.readouterr() == ("", "")
    assert world.file.parent.read_text().startswith("a file")


def test_where_they_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, draft: EagleDraft, world: World) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_file() == world.file
    monkeypatch.delenv("EYAS_CACHE")
    assert cache_file() == tmp_path / "xdg" / "eyas" / FILE
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # invalid by the specification
    assert cache_file() == tmp_path / "home" / ".cache" / "eyas" / FILE

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_file() is None
    assert [step_costs(draft).verify[1] for _ in range(2)] == [1.0, 2.0]
