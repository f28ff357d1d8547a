"""Where the target's features are kept between epochs: in memory while they fit, on disk if asked, else nowhere."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError, first_line
from eyas.files import existing_parent, replacing
from eyas.target import Target
from eyas.training.data import Sample
from eyas.training.features import Knowledge, Store
from eyas.training.options import TrainOptions

GIB = 2**30


def feature_bytes(target: Target, samples: Sequence[Sample]) -> int:
    """Bytes that the knowledge of all samples takes: a feature and one float32 a token."""
    return sum(len(sample.ids) for sample in samples) * (target.hidden_size * target.dtype.itemsize + 4)


def open_store(target: Target, samples: Sequence[Sample], options: TrainOptions) -> tuple[Store | None, str]:
    """The store that options and sizes call for, and a line that says which it is.

    Raises:
        EyasError: the folder for features cannot be written, or its disk has not enough room.
    """
    size = feature_bytes(target, samples)
    if options.cache_features is not None:
        store = DiskStore(options.cache_features / features_digest(target, samples, options.batch_tokens))
        missing = size - sum(file.stat().st_size for file in store.folder.glob("*.safetensors"))
        free = shutil.disk_usage(existing_parent(store.folder)).free
        if missing > free:
            raise EyasError(
                f"cache_features {options.cache_features}: {missing / GIB:.1f} GiB of features are missing there, but its disk "
                f"has {free / GIB:.1f} GiB left; choose another disk, or leave out --cache-features"
            )
        return store, f"the target's features are kept in {store.folder} ({size / GIB:.2f} GiB when complete)"
    if size <= options.feature_memory * GIB:
        return {}, f"the target's features are kept in memory ({size / GIB:.2f} GiB)"
    return None, (
        f"the target's features are computed every time: {size / GIB:.1f} GiB are more than the {options.feature_memory:g} "
        "that --feature-memory allows"
    )


def features_digest(target: Target, samples: Sequence[Sample], batch_tokens: int) -> str:
    """A name for all that features depend on: the data, the target and its dtype, and how they were batched."""
    digest = hashlib.sha256(f"{target.name} {target.config.to_json_string()} {target.dtype} {batch_tokens}".encode())
    digest.update(weights_digest(target).encode())
    digest.update(data_digest(samples).encode())
    return digest.hexdigest()[:16]


def weights_digest(target: Target) -> str:
    """A name for the target's weights, from a few numbers of each: a target trained further in place is another."""
    digest = hashlib.sha256()
    for weight in target.model.parameters():
        numbers = weight.detach().flatten()[:: max(1, weight.numel() // 16)][:16]
        digest.update(numbers.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def data_digest(samples: Sequence[Sample]) -> str:
    """A name for the samples' tokens and masks."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(len(sample.ids).to_bytes(8, "little") + sample.ids.numpy().tobytes() + sample.written.numpy().tobytes())
    return digest.hexdigest()[:16]


class DiskStore(MutableMapping[int, Knowledge]):
    """One safetensors file a sample."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _file(self, place: int) -> Path:
        return self.folder / f"{place:08d}.safetensors"

    def __contains__(self, place: object) -> bool:
        return isinstance(place, int) and self._file(place).exists()

    def __getitem__(self, place: int) -> Knowledge:
        file = self._file(place)
        try:
            found = load_file(file)
            return Knowledge(found["features"], found["log_mass"])
        except (OSError, KeyError, SafetensorError) as error:
            raise EyasError(f"features {file}: damaged ({first_line(error)}); remove it, it is computed again") from error

    def __setitem__(self, place: int, knowledge: Knowledge) -> None:
        with replacing(self._file(place), "features") as temporary:
            save_file({"features": knowledge.features, "log_mass": knowledge.log_mass}, temporary)

    def __delitem__(self, place: int) -> None:
        self._file(place).unlink()

    def __iter__(self) -> Iterator[int]:
        return (int(file.stem) for file in self.folder.glob("[0-9]*.safetensors"))

    def __len__(self) -> int:
        return sum(1 for _ in self)
