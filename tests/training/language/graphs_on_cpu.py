"""Trains a run file with steps that are replayed as on GPUs, over gloo: every process has the gradients of its own batch, which
are averaged after them."""

import contextlib
import sys

from fastweights.training.language import graphs, load_run, train_language, trainer
from tests.training.language.replayed import Replayed


class OnCpu(graphs.GraphedGradients):
    def __init__(self, parameters, work, **options):
        super().__init__(parameters, work, **options)
        graphs.captured = lambda work, device: ((graph := Replayed(work, parameters)), graph.loss)


if __name__ == "__main__":
    graphs.refusing_waits = contextlib.nullcontext
    trainer.GraphedGradients, trainer.what_to_graph = OnCpu, lambda run: True
    train_language(load_run(sys.argv[1]))
