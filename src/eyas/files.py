"""Files that are complete or absent, and one line where they cannot be written."""

from __future__ import annotations

import errno
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from eyas.errors import EyasError, first_line


@contextmanager
def replacing(file: Path, what: str) -> Iterator[Path]:
    """Yield a temporary name beside ``file``, in a folder made if need be; it takes the file's place at the end.

    Args:
        what: what is written, for the message.

    Raises:
        EyasError: it cannot be written, for example because the disk is full; what was there before stays.
    """
    temporary = file.with_name(f".{file.name}-{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch's and safetensors' writers raise their own
        raise write_error(f"{what} {file}", error) from error


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def need_matplotlib() -> None:
    """Refuse to draw without matplotlib.

    Raises:
        EyasError: it is not installed.
    """
    if not can_draw():
        raise EyasError("pictures need matplotlib; run: pip install 'eyas[bench]'")


def check_picture(file: Path) -> None:
    """Refuse, before any work, a picture that could not be drawn or written.

    Raises:
        EyasError: it is not to be a PNG, cannot be written, or matplotlib is missing.
    """
    need_matplotlib()
    if file.suffix.lower() != ".png":
        raise EyasError(f"picture {file}: pictures are PNG files; name it {file.stem or 'costs'}.png")
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        with tempfile.TemporaryFile(dir=existing_parent(file.parent)):
            pass
    except OSError as error:
        raise EyasError(f"picture {file}: cannot be written ({error.strerror}); choose another place") from error


def user_path(name: str | Path) -> Path:
    """The path of a name that a user gave, ``~`` expanded where there is such a user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def existing_parent(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists: where it would be made."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def write_error(what: str, error: Exception) -> EyasError:
    """What to raise where a file could not be written."""
    reason = (isinstance(error, OSError) and error.strerror) or first_line(error)
    return EyasError(f"{what}: cannot be written ({reason}); what was there before is kept, free space or choose another place")
