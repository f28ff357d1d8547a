"""The shell: arguments in, calls out. Text goes to standard output, everything else to standard error."""

from __future__ import annotations

import os
import sys
import warnings

import torch
import typer

from eyas.cli import benchmark, decoding, training
from eyas.cli.app import INTERRUPTED, app
from eyas.errors import EyasError, first_line
from eyas.terminal import note

__all__ = ["app", "benchmark", "decoding", "main", "training"]


def main() -> None:
    """Entry point: exit status 0; 2 with one line for what the user can mend; 130 after Ctrl-C."""
    warnings.showwarning = lambda message, *_: note(" ".join(str(message).split()))
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
    except EyasError as error:
        status = complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: end without a word
        status = 0
    except OSError as error:
        status = complain(f"the output cannot be written ({error.strerror or error}); free space or choose another place")
    except (torch.OutOfMemoryError, MemoryError) as error:
        status = complain(f"memory ran out ({first_line(error)}); take a shorter prompt, a smaller --dtype or another --device")
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own usage errors have it; their classes are private
            raise
        status = complain(error.format_message())
    sys.exit(status if isinstance(status, int) else 0)


def complain(message: str) -> int:
    """Say on one line what is wrong; the exit status that goes with it."""
    note(" ".join(message.split()))
    return 2
