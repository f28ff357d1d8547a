"""What the user can mend, said in one line."""

from __future__ import annotations


class EyasError(ValueError):
    """Bad input or an unsupported model: the message names the thing, the reason and the remedy.

    The command line prints it alone and exits with status 2.
    """


def first_line(error: BaseException) -> str:
    """The first non-empty line of an exception's message, for quoting it inside a one-line message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
