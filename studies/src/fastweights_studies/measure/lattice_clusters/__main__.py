"""Lattice's decode objective on clusters of multiprocessors, checked and timed beside the library's kernels.

    python -m fastweights_studies.measure.lattice_clusters
    python -m fastweights_studies.measure.lattice_clusters --only mbarrier --work times --limit 60 --results runs/clusters

Needs a Hopper GPU. The forms are the library's kernels, and clusters with either way to exchange sums: mbarriers that count the
bytes that `st.async` sends, or plain stores and the hardware's cluster barrier. The work is

    times   4 sequences of 2,048 tokens, 8 heads of 128 and of 64 channels: the time of all kernels of a forward and of a
            backward, the time of both by events, and how far results are from those of the library's kernels
    errors  short sequences whose lengths are no multiples of 16: relative errors from float64

Both also compare the bits of two calls. Every form and size has a process of its own, which is killed at its limit, as the form
with mbarriers may hang. A process that measures times first passes 16 tokens and says so. Until then, kernels compile.

Writes studies/results/lattice-clusters-<device>.json, each row as soon as it is measured. `ended` is 0 where a process failed or
was killed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.own_process import ends_within
from fastweights_studies.measure.rows import name_file
from fastweights_studies.places import RESULTS

from .cases import FORMS, TASK, WORK, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FORMS, default=FORMS, help="forms")
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--parts", type=int, choices=(2, 4), default=4, help="programs of a cluster")
    parser.add_argument("--limit", type=float, default=90, help="seconds for a process, kernels that compile included")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    device = find_gpu()
    path, origin = name_file(asked.results, TASK, device), describe(device)
    for work in asked.work:
        for case in WORK[work]:
            for form in asked.only:
                print(f"{form}, {work}: {case}", flush=True)
                given = (work, case, form, asked.parts, asked.repeats, path, origin)
                if not ends_within(asked.limit, measure, *given):
                    print("  failed, or was killed at its limit", flush=True)


if __name__ == "__main__":
    main()
