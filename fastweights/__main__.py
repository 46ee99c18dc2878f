"""`python -m fastweights` is the command `fastweights`."""

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command; Ctrl-C ends it with one line even while it is being imported."""
    try:
        from .cli import main as run

        return run()
    except KeyboardInterrupt:
        print("fastweights: error: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
