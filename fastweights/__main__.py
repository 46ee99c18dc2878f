"""`python -m fastweights` is the command `fastweights`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
