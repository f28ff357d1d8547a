"""The target's features: the ones the head reads, the same alone, in a batch, kept in memory or on disk."""

from __future__ import annotations

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.conversations import Conversations
from eyas.errors import EyasError
from eyas.target import Target
from eyas.training.data import Sample, collate
from eyas.training.dataset import make_dataset
from eyas.training.features import FeatureSource, Knowledge, observe
from eyas.training.storage import DiskStore, feature_bytes, open_store
from tests.training.tiny import make_target, short_options


@pytest.fixture
def samples() -> list[Sample]:
    torch.manual_seed(0)
    return [Sample(torch.randint(16, (n,)), torch.ones(n, dtype=torch.bool)) for n in (5, 8, 6, 3)]


def test_features_are_those_the_head_reads_alone_and_in_a_batch(target: Target, samples: list[Sample]) -> None:
    knowledge = observe(target, collate(samples, [0, 1, 2, 3]), chunk=3)
    for row, sample in enumerate(samples):
        n = len(sample.ids)
        with torch.no_grad():
            alone = target.model(sample.ids[None]).logits[0]  # [n, V]
        torch.testing.assert_close(target.score(knowledge.features[row, :n]), alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(knowledge.log_mass[row, :n], alone.logsumexp(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("disk", [False, True])
def test_kept_features_equal_fresh_ones_whatever_the_order(
    target: Target, samples: list[Sample], tmp_path: Path, disk: bool
) -> None:
    """To the last bit among kept ones: a resumed run meets them in another order."""
    found = []
    for number, order in enumerate(([0, 2], [1, 3], [3, 0]), start=1):
        source = FeatureSource(target, samples, 16, DiskStore(tmp_path / str(number)) if disk else {})
        source(collate(samples, order))
        batch = collate(samples, [0, 1, 2, 3])
        found.append(source(batch))
        fresh = observe(target, batch)
        for row, sample in enumerate(samples):
            n = len(sample.ids)
            torch.testing.assert_close(fresh.features[row, :n], found[-1].features[row, :n], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(fresh.log_mass[row, :n], found[-1].log_mass[row, :n], rtol=1e-4, atol=1e-5)
    for other in found[1:]:
        assert torch.equal(other.features, found[0].features) and torch.equal(other.log_mass, found[0].log_mass)


def test_the_store_follows_the_size(target: Target, data: Conversations, tmp_path: Path) -> None:
    options = short_options(tmp_path / "out")
    samples = make_dataset(target, data, None, options).samples
    assert feature_bytes(target, samples) == sum(len(sample.ids) for sample in samples) * (32 * 4 + 4)
    assert open_store(target, samples, options)[0] == {}
    store, said = open_store(target, samples, replace(options, feature_memory=0))
    assert store is None and "computed every time" in said
    store, said = open_store(target, samples, replace(options, cache_features=tmp_path / "features"))
    assert isinstance(store, DiskStore) and "GiB when complete" in said and not store.folder.exists()
    other, _ = open_store(make_target(num_hidden_layers=1), samples, replace(options, cache_features=tmp_path / "features"))
    assert isinstance(other, DiskStore) and other.folder != store.folder, "another target's features are never read"


def test_features_that_do_not_fit_the_disk_are_refused(
    target: Target, data: Conversations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = short_options(tmp_path / "out", cache_features=tmp_path / "features")
    samples = make_dataset(target, data, None, options).samples
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, feature_bytes(target, samples) - 1))
    with pytest.raises(EyasError, match="its disk has"):
        open_store(target, samples, options)
    store = DiskStore(tmp_path / "file" / "features")
    (tmp_path / "file").touch()
    with pytest.raises(EyasError, match=r"features .*00000000\.safetensors: cannot be written"):
        store[0] = Knowledge(torch.zeros(3, 4), torch.zeros(3))
