"""Entry point of the ``eyas`` command: Ctrl-C is orderly from the first import on."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; see `eyas.cli.main`."""
    try:
        from eyas.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
