"""Preallocated key/value rows: append a tree's nodes, keep one path, forget the rest.

Row b of the batch owns the first ``lengths[b]`` stored rows of every layer: its committed prefix. A forward pass appends its
``n`` new rows for the whole batch at one common offset, ``start`` = the longest committed prefix, which is a plain slice
write; what lies between a shorter prefix and ``start`` is rubbish that the mask hides. `RowCache.keep` then moves the
accepted nodes of each row down to the end of its own prefix.

    B = 2, lengths = [5, 3], a tree of 4 nodes, accepted paths [0, 2] and [0, 1, 3]:

    after the forward  row 0: p p p p p|a b c d         row 1: p p p . .|e f g h        start = 5
    after keep         row 0: p p p p p a c             row 1: p p p e f h              lengths = [7, 6], start = 7
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from eyas.transfer import upload

ALIGNMENT = 64  # capacities are multiples of this many rows


class RowLayer(CacheLayerMixin):
    """One layer's keys [B, heads, capacity, D] and values, written at the cache's common ``start``."""

    is_sliding = False  # sliding-window layers keep whole rows too: their window is a mask
    keys: Tensor
    values: Tensor

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the shapes of the first states seen."""
        self.keys, self.values = self._allocate(key_states), self._allocate(value_states)
        self.is_initialized = True

    def _allocate(self, states: Tensor) -> Tensor:
        batch, heads, _, size = states.shape
        return states.new_zeros(batch, heads, self.cache.capacity, size)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append rows [B, heads, n, D] at ``start``; return everything up to them, [B, heads, start + n, D]."""
        start, end = self.cache.start, self.cache.start + key_states.shape[2]
        self.cache.reserve(end)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.fit()
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def fit(self) -> None:
        """Follow the cache's capacity where it has grown."""
        if self.keys.shape[2] < self.cache.capacity:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)

    def _grown(self, stored: Tensor) -> Tensor:
        grown = self._allocate(stored)
        grown[:, :, : stored.shape[2]] = stored
        return grown

    def get_seq_length(self) -> int:
        """Where the next rows go."""
        return self.cache.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a forward of ``query_length`` tokens will see."""
        return self.cache.start + query_length, 0

    def get_max_length(self) -> int:
        """No maximum: rows are added as needed."""
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier transformers 5 releases


class RowCache(Cache):
    """A transformers cache whose committed prefix differs from row to row of the batch.

    Attributes:
        lengths: committed length of each row of the batch.
        start: where the next forward appends. Equals ``max(lengths)`` between steps; a drafter that appends level by level
            moves it on, and calls `rewind` when done.
        capacity: allocated rows; doubled when exceeded.
    """

    def __init__(self, layers: int, batch: int, capacity: int = 0) -> None:
        self.lengths = [0] * batch
        self.start = 0
        self.capacity = 0
        self.reserve(capacity)
        super().__init__(layers=[RowLayer(self) for _ in range(layers)])

    def reserve(self, rows: int) -> None:
        """Make the capacity at least ``rows``, doubling it when it must grow; layers follow at their next update."""
        if rows > self.capacity:
            self.capacity = -(-max(rows, 2 * self.capacity) // ALIGNMENT) * ALIGNMENT

    def keep(self, paths: list[list[int]]) -> None:
        """Commit some of the rows appended since the last prefix, and drop the others.

        Args:
            paths: for each row of the batch the appended nodes to keep, in order; may be of different lengths.
        """
        base = max(self.lengths)
        moves = [  # (from, to) of every kept row
            [(base + node, length + place) for place, node in enumerate(path)]
            for length, path in zip(self.lengths, paths, strict=True)
        ]
        if any(source != destination for row in moves for source, destination in row):
            width, device = max(map(len, moves)), self.layers[0].keys.device
            # a shorter row repeats its last move, an empty one copies row 0 onto itself: nothing changes
            padded = [row + [row[-1] if row else (0, 0)] * (width - len(row)) for row in moves]
            source, destination = upload(padded, device).unbind(-1)  # [B, m] each
            batch = torch.arange(len(paths), device=device)[:, None]
            for layer in self.layers:
                for stored in (layer.keys, layer.values):
                    stored[batch, :, destination] = stored[batch, :, source]
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]
        self.rewind()

    def rewind(self) -> None:
        """Forget what was appended since the last commit."""
        self.start = max(self.lengths, default=0)

    def truncate(self, lengths: list[int]) -> None:
        """Shorten the committed prefixes to at most these lengths."""
        self.lengths = [min(pair) for pair in zip(self.lengths, lengths, strict=True)]
        self.rewind()

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        self.rewind()
        for layer in self.layers:
            if layer.is_initialized:
                index = upload(rows, layer.keys.device)
                layer.keys, layer.values = layer.keys[index], layer.values[index]

    def take(self, rows: list[int], lengths: list[int]) -> RowCache:
        """A cache of its own with copies of these rows' first ``lengths`` committed tokens."""
        taken = RowCache(len(self.layers), len(rows))
        taken.lengths = list(lengths)
        taken.rewind()
        taken.reserve(taken.start)
        for layer, copy in zip(self.layers, taken.layers, strict=True):
            if layer.is_initialized:
                index = upload(rows, layer.keys.device)
                copy.keys = layer.keys[index, :, : taken.start]
                copy.values = layer.values[index, :, : taken.start]
                copy.is_initialized = True
        return taken

    def put(self, rows: list[int], other: RowCache) -> None:
        """Replace these rows of the batch by another cache's, in order."""
        for row, length in zip(rows, other.lengths, strict=True):
            self.lengths[row] = length
        self.rewind()
        self.reserve(self.start)
        for layer, source in zip(self.layers, other.layers, strict=True):
            layer.fit()
            index = upload(rows, layer.keys.device)
            layer.keys[index, :, : other.start] = source.keys[:, :, : other.start]
            layer.values[index, :, : other.start] = source.values[:, :, : other.start]

    def prefix_mask(self, device: torch.device) -> Tensor:
        """Which of the stored rows before `start` belong to each committed prefix: [B, start] bool.

        Rows appended since (``start`` moved on by a drafter) count as not committed.
        """
        lengths = upload(self.lengths, device)
        return torch.arange(self.start, device=device) < lengths[:, None]
