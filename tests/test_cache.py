"""The row cache against lists of rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eyas.cache import ALIGNMENT, RowCache
from tests.helpers import properties

LAYERS, HEADS, SIZE = 2, 2, 3
CPU = torch.device("cpu")


def rows_of(stamps: list[list[int]], layer: int) -> Tensor:
    """Keys [B, heads, n, D] that name their row: the stamp, its layer, head and dimension. Values are their negatives."""
    base = torch.tensor(stamps, dtype=torch.float64)[:, None, :, None] * 100
    heads = torch.arange(HEADS)[None, :, None, None] * 10
    return base + layer * 50 + heads + torch.arange(SIZE)


@dataclass
class Model:
    """What a cache should hold: each row's stamps, and beside it the real one."""

    batch: int
    cache: RowCache = field(init=False)
    committed: list[list[int]] = field(init=False)
    stamp: int = 0

    def __post_init__(self) -> None:
        self.cache = RowCache(LAYERS, self.batch)
        self.committed = [[] for _ in range(self.batch)]

    def append(self, count: int) -> list[list[int]]:
        """Append ``count`` new rows for the whole batch; check what attention would see."""
        fresh = [[self.stamp + row * count + place for place in range(count)] for row in range(len(self.committed))]
        self.stamp += count * len(self.committed)
        start = self.cache.start
        for layer in range(LAYERS):
            states = rows_of(fresh, layer)
            keys, values = self.cache.update(states, -states, layer)
            assert keys.shape == (len(self.committed), HEADS, start + count, SIZE) == values.shape
            assert torch.equal(keys[:, :, start:], states) and torch.equal(values, -keys)
        self.check()
        return fresh

    def check(self) -> None:
        """Each committed prefix is stored, row for row, in every layer."""
        assert self.cache.lengths == [len(row) for row in self.committed]
        for number, layer in enumerate(self.cache.layers):
            for row, stamps in enumerate(self.committed):
                if stamps:
                    stored = layer.keys[row : row + 1, :, : len(stamps)]
                    assert torch.equal(stored, rows_of([stamps], number))
                    assert torch.equal(layer.values[row : row + 1, :, : len(stamps)], -stored)

    def keep(self, fresh: list[list[int]], paths: list[list[int]]) -> None:
        self.cache.keep(paths)
        for row, (stamps, path) in enumerate(zip(fresh, paths, strict=True)):
            self.committed[row] += [stamps[node] for node in path]
        self.check_rest()

    def check_rest(self) -> None:
        """Between steps."""
        self.check()
        lengths = self.cache.lengths
        assert self.cache.start == max(lengths) == self.cache.get_seq_length()
        mask = self.cache.prefix_mask(CPU)
        assert mask.tolist() == [[place < length for place in range(max(lengths))] for length in lengths]


@properties
@given(st.data())
def test_the_cache_holds_exactly_the_committed_rows(data: st.DataObject) -> None:
    """Whatever steps, truncations and row selections come: a wrong row is a wrong logit later."""
    model = Model(data.draw(st.integers(1, 4)))
    for _ in range(data.draw(st.integers(1, 8))):
        batch = len(model.committed)
        action = data.draw(st.sampled_from(["step", "step", "step", "levels", "truncate", "select"]))
        if action == "step":
            count = data.draw(st.integers(1, 40))
            fresh = model.append(count)
            # ascending nodes, as a path has; rows may keep different numbers of them, or none
            paths = [sorted(data.draw(st.sets(st.integers(0, count - 1), max_size=6))) for _ in range(batch)]
            model.keep(fresh, paths)
        elif action == "levels":  # a drafter appends level by level, and takes it all back
            begin = model.cache.start
            for _ in range(data.draw(st.integers(1, 3))):
                count = data.draw(st.integers(1, 5))
                model.append(count)
                model.cache.start += count
            mask = model.cache.prefix_mask(CPU)
            assert mask.shape == (batch, model.cache.start)
            assert not mask[:, begin:].any() and mask.sum(dim=1).tolist() == model.cache.lengths
            model.cache.rewind()
            model.check_rest()
        elif action == "truncate":
            lengths = [data.draw(st.integers(0, length + 2)) for length in model.cache.lengths]
            model.cache.truncate(lengths)
            model.committed = [row[:length] for row, length in zip(model.committed, lengths, strict=True)]
            model.check_rest()
        else:
            rows = data.draw(st.lists(st.sampled_from(range(batch)), min_size=1, unique=True))
            model.cache.select(rows)
            model.committed = [model.committed[row] for row in rows]
            model.check_rest()


def test_the_example_of_the_module() -> None:
    """The picture in the module's docstring."""
    model = Model(2)
    model.keep(model.append(5), [[0, 1, 2, 3, 4], [0, 1, 2]])
    assert (model.cache.lengths, model.cache.start) == ([5, 3], 5)
    model.keep(model.append(4), [[0, 2], [0, 1, 3]])
    assert (model.cache.lengths, model.cache.start) == ([7, 6], 7)


def test_rows_move_though_source_and_destination_overlap() -> None:
    """A path's rows are read before they are written: copying one by one in place would lose some."""
    model = Model(3)
    model.keep(model.append(6), [[0, 1, 2, 3, 4, 5], [0], [0, 1, 2]])
    # row 1's destinations 1…5 run into its sources from 6 on; row 2's overlap them
    model.keep(model.append(8), [[1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7]])


def test_keeping_nothing_changes_nothing() -> None:
    """Empty paths, for some rows or all, with or without anything stored."""
    RowCache(LAYERS, 2).keep([[], []])
    model = Model(2)
    model.keep(model.append(3), [[], [0, 2]])
    model.keep(model.append(3), [[], []])
    model.keep(model.append(2), [[1], []])
    assert model.cache.lengths == [1, 2]


def test_keep_counts_from_the_prefix_though_a_drafter_moved_on() -> None:
    """Paths are nodes counted from where the first forward of the step appended."""
    model = Model(2)
    model.keep(model.append(4), [[0, 1, 2], [0]])
    first = model.append(2)
    model.cache.start += 2
    second = model.append(2)
    model.cache.start += 2
    model.keep([one + two for one, two in zip(first, second, strict=True)], [[1, 3], [0, 2, 3]])
    assert model.cache.start == 5


def test_capacity_doubles_and_keeps_the_contents() -> None:
    """Growth reallocates: rows must be carried over, in every layer, and reallocation stay rare."""
    model = Model(2)
    capacities = set()
    for _ in range(100):
        model.keep(model.append(5), [[0, 1, 2, 3, 4], [0, 2]])
        capacities.add(model.cache.capacity)
        assert all(layer.keys.shape[2] == layer.values.shape[2] == model.cache.capacity for layer in model.cache.layers)
    assert sorted(capacities) == [64, 128, 256, 512]


def test_reserved_room_is_not_outgrown_early() -> None:
    """A request that reserves its length up front never copies its cache."""
    cache = RowCache(LAYERS, 1, 100)
    assert cache.capacity == 128
    states = torch.ones(1, HEADS, 128, SIZE)
    cache.update(states, states, 0)
    pointer = cache.layers[0].keys.data_ptr()
    cache.keep([list(range(127))])
    cache.update(states[:, :, :1], states[:, :, :1], 0)
    assert cache.layers[0].keys.data_ptr() == pointer
    cache.reserve(129)
    assert cache.capacity == 256 and cache.capacity % ALIGNMENT == 0
    cache.reserve(10)
    assert cache.capacity == 256
    cache.reserve(1000)
    assert cache.capacity == 1024


def test_growing_in_the_middle_of_a_draft_keeps_what_was_appended() -> None:
    """A drafter's later level may outgrow the capacity while earlier levels are not committed yet."""
    cache = RowCache(1, 1)
    first, second = rows_of([list(range(60))], 0), rows_of([list(range(60, 70))], 0)
    cache.update(first, -first, 0)
    cache.start += 60
    keys, values = cache.update(second, -second, 0)
    assert torch.equal(keys, torch.cat([first, second], dim=2)) and torch.equal(values, -keys)


def test_truncate_never_lengthens() -> None:
    """Rows behind the prefix are rubbish; asking for more than there is must not commit them."""
    model = Model(2)
    model.keep(model.append(5), [[0, 1, 2, 3, 4], [0, 1]])
    model.cache.truncate([9, 1])
    assert model.cache.lengths == [5, 1]
    model.cache.truncate([0, 0])
    assert (model.cache.lengths, model.cache.start) == ([0, 0], 0)
    assert model.cache.prefix_mask(CPU).shape == (2, 0)


def test_lengths_must_fit_the_batch() -> None:
    """A path or length too few would silently commit another row's."""
    cache = RowCache(LAYERS, 2)
    with pytest.raises(ValueError):
        cache.truncate([1])
    states = torch.ones(2, HEADS, 3, SIZE)
    for layer in range(LAYERS):
        cache.update(states, states, layer)
    with pytest.raises(ValueError):
        cache.keep([[0]])


def test_transformers_reads_the_right_lengths() -> None:
    """Models ask the cache where the next tokens go and how long the mask is."""
    model = Model(2)
    model.keep(model.append(5), [[0, 1, 2, 3, 4], [0, 1]])
    assert model.cache.get_seq_length() == 5
    assert model.cache.get_mask_sizes(4, 0) == (9, 0)
    assert len(model.cache) == LAYERS


def test_dtype_of_the_states_is_kept() -> None:
    """Rows are stored as the model computes them."""
    cache = RowCache(1, 1)
    states = torch.ones(1, HEADS, 2, SIZE, dtype=torch.bfloat16)
    keys, values = cache.update(states, states, 0)
    assert keys.dtype == values.dtype == torch.bfloat16
