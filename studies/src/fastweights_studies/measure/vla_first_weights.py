"""Recall of 8 pairs by variational linear attention in the setting of claim C26, by the standard deviation of its
first weights.

    python -m fastweights_studies.measure.vla_first_weights

Writes studies/results/vla-first-weights.json; 10 minutes of two cores.

The paper prints none; claims C22 to C26 take .02, and C27 both. Runs that have ended stay in the folder of --runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fastweights.training import RecallExperiment, run_recall_parts
from fastweights_studies.claims.trained import VLA_SETTINGS
from fastweights_studies.measure.environment import describe
from fastweights_studies.measure.recall import setting_column
from fastweights_studies.measure.rows import make_rows, replace_rows
from fastweights_studies.places import RESULTS

TASK = "first_weights"
RESULT = RESULTS / "vla-first-weights.json"
STANDARD_DEVIATIONS = (0.02, 0.05)
SEED, PAIRS, LENGTH = 42, 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/vla_first_weights"))
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    experiments = {
        f"{size}": RecallExperiment(**{
            **VLA_SETTINGS, "initializer_range": size, "mixers": ("vla",), "pairs": (PAIRS,), "length": LENGTH, "seeds": (SEED,),
            "device": asked.device,
        })
        for size in STANDARD_DEVIATIONS
    }  # fmt: skip
    found = run_recall_parts(experiments, {name: asked.runs / name for name in experiments})
    origin, rows = describe(), []
    for name, (result,) in found.items():
        values = {"accuracy": result.accuracy, "chance": result.chance_level}
        run = experiments[name].runs()[0]
        rate = {"learning_rate": run.learning_rate}
        rows += make_rows(TASK, origin, values, mixer="vla", column=setting_column(run), run=rate, seed=SEED)
        print(f"first weights {name}: {result.accuracy:.3f} (guessing {result.chance_level:.3f})")
    replace_rows(RESULT, rows)


if __name__ == "__main__":
    main()
