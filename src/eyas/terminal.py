"""What the shell reads from and writes to the user: prompts in; pieces, progress and one-line notes out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from eyas.engine import Result, Stream
from eyas.errors import EyasError


class Shower:
    """Writes pieces to standard output as they come: drafted ones tinted, the target's own plain."""

    def __init__(self, color: bool, quiet: bool = False) -> None:
        self.quiet = quiet
        self.tint = color and not quiet and sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def pieces(self, stream: Stream) -> bool:
        """Show a whole stream; True when Ctrl-C cut it short."""
        interrupted = False
        try:
            for piece in stream:
                self._write(piece.text, piece.drafted)
        except KeyboardInterrupt:
            interrupted = True
        if not self.quiet:
            print(flush=True)
        return interrupted

    def _write(self, text: str, drafted: bool) -> None:
        if not self.quiet and text:
            sys.stdout.write(typer.style(text, fg="cyan") if self.tint and drafted else text)
            sys.stdout.flush()


def questions() -> Iterator[str]:
    """The user's non-empty lines, with a prompt sign in a terminal, until end of input."""
    while True:
        try:
            line = input("› " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeDecodeError:
            raise EyasError("standard input is not UTF-8; convert it first") from None
        if line:
            yield line


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file, or standard input.

    Raises:
        EyasError: two sources or none, an unreadable file, text that is not UTF-8, or an empty prompt.
    """
    if file is not None and prompt is not None:
        raise EyasError("a prompt and a prompt file were given; pass one of them")
    source = f"prompt file {file}" if file is not None else "standard input"
    if prompt is not None and prompt != "-":
        text = prompt
    else:
        if file is None and (sys.stdin is None or (prompt is None and sys.stdin.isatty())):
            raise EyasError("no prompt; pass it as an argument, with -f FILE, or on standard input")
        try:
            data = file.read_bytes() if file is not None else sys.stdin.buffer.read()
            text = data.decode("utf-8")
        except OSError as error:
            raise EyasError(f"{source} cannot be read ({error.strerror}); check the path") from error
        except UnicodeDecodeError as error:
            raise EyasError(f"{source} is not UTF-8 (byte {error.start}); convert it first") from error
        text = text.removesuffix("\n")
    if not text:
        raise EyasError("the prompt is empty; write something")
    return text


def read_bias(entries: list[str] | None) -> dict[int, float] | None:
    """``TOKEN_ID=VALUE`` entries as a mapping.

    Raises:
        EyasError: an entry of another form.
    """
    if not entries:
        return None
    bias: dict[int, float] = {}
    for entry in entries:
        token, _, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise EyasError(f"logit bias {entry} is not TOKEN_ID=VALUE, such as 198=-5") from None
    return bias


def read_numbers(name: str, text: str) -> tuple[float, ...]:
    """Numbers with commas between.

    Raises:
        EyasError: something else.
    """
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise EyasError(f"{name} {text} is no list of numbers; write it as 0,0.7,1") from None


@contextmanager
def progress(what: str) -> Iterator[None]:
    """A spinner on standard error while something takes long; silence where that is no terminal."""
    # this very stream: libraries' own bars are sent elsewhere meanwhile
    with Console(file=sys.stderr).status(f"{what} …"):
        yield


def summary(result: Result) -> str:
    """One line about how a request went."""
    stats, tau = result.stats, result.stats.tau
    steps = "" if tau is None else f" in {stats.steps} steps, τ {tau:.2f}"
    return f"{len(result.token_ids)} tokens{steps}, {stats.tokens_per_second:.1f} tokens/s ({result.finish_reason})"


def note(text: str) -> None:
    """One line for the user, on standard error."""
    print(f"eyas: {text}", file=sys.stderr, flush=True)
