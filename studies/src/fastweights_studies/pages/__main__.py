"""Writes every page and figure that is made from results.

python -m fastweights_studies.pages                 all of them
python -m fastweights_studies.pages performance choosing    those of some modules
"""

from __future__ import annotations

import argparse
import runpy

# Modules that write pages, in an order in which none reads a page that another writes later.
MODULES = (
    "presets",
    "performance",
    "recall_figure",
    "serving_figure",
    "page_parts",
    "claims",
    "leaderboard",
    "own_results",
    "block",
    "choosing",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)}; all if not given")
    asked = parser.parse_args().modules or MODULES
    if unknown := sorted(set(asked) - set(MODULES)):
        parser.error(f"MODULE must be of {', '.join(MODULES)}, got {', '.join(unknown)}")
    for module in asked:
        runpy.run_module(f"fastweights_studies.pages.{module}", run_name="__main__")


if __name__ == "__main__":
    main()
