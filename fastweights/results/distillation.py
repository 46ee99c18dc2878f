"""Measurements of a distillation: which layers are best kept as attention, and teacher and student side by side."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from ..files import write_json
from ..kinds import checked
from .evaluation import LengthPerplexity, NeedleRecall
from .records import ResultsError, from_record, read_object

__all__ = [
    "Distillation",
    "LayerGain",
    "LayerRanking",
    "ModelMeasures",
    "load_distillation",
    "load_ranking",
    "save_distillation",
    "save_ranking",
]

FORMAT = 1  # of both files
Made = TypeVar("Made")


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerGain:
    """A student in which one layer has its attention back.

    Attributes:
        layer: number of the layer, from 0.
        kl_with_it_kept: held-out KL(teacher || student) with the teacher's attention in this layer, in nats per token.
        gain: how much lower that is than without.
        rank: 1 for the layer with the largest gain among those that are measured.
    """

    layer: int
    kl_with_it_kept: float
    gain: float
    rank: int


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRanking:
    """How much each layer of a student with memories loses against attention.

    Attributes:
        base_kl: held-out KL(teacher || student) of the student as it is, in nats per token.
        rows, tokens: rows of held-out text, and predictions in them that were compared.
        settings: the budget, as plain values.
        fingerprint: a checksum of the models and the text.
        layers: measured layers, the best one first.
        missing: numbers of the layers that are not measured yet.
    """

    base_kl: float
    rows: int
    tokens: int
    settings: dict[str, Any]
    fingerprint: str
    layers: list[LayerGain]
    missing: list[int]

    def measured(self, layer: int, kl: float) -> LayerRanking:
        """With one layer more, and new ranks. Of layers with the same gain the lower number is first."""
        found = {one.layer: one.kl_with_it_kept for one in self.layers} | {layer: kl}
        order = sorted(found, key=lambda number: (found[number], number))
        layers = [
            LayerGain(layer=number, kl_with_it_kept=found[number], gain=self.base_kl - found[number], rank=rank)
            for rank, number in enumerate(order, 1)
        ]
        return dataclasses.replace(self, layers=layers, missing=[one for one in self.missing if one != layer])

    def best(self, count: int) -> tuple[int, ...]:
        """The numbers of the `count` layers to keep as attention, in ascending order.

        Raises:
            ValueError: layers are not measured yet, or there are fewer than `count`.
        """
        if self.missing:
            raise ValueError(
                f"all layers must be measured before one is chosen, got none of {self.missing} yet; rank them to the end"
            )
        if not 0 <= count <= len(self.layers):
            raise ValueError(f"count must be from 0 to the {len(self.layers)} layers with a memory, got {count}")
        return tuple(sorted(one.layer for one in self.layers[:count]))


def save_ranking(path: Path, ranking: LayerRanking) -> None:
    """Write a ranking, atomically."""
    write_json(path, {"format": FORMAT, **dataclasses.asdict(ranking)})


def load_ranking(path: Path) -> LayerRanking:
    """ResultsError: the file is damaged or of another version."""
    return _load(LayerRanking, path)


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelMeasures:
    """What was measured of a teacher or a student.

    Attributes:
        parameters: numbers that it holds.
        state_sizes: numbers in its cache per sequence, by the length of the context in tokens.
        perplexities: of held-out texts, by length.
        needles: one row for each task, length and depth.
    """

    parameters: int
    state_sizes: dict[str, int]
    perplexities: list[LengthPerplexity]
    needles: list[NeedleRecall]


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation:
    """The end of a distillation: teacher and student side by side.

    Attributes:
        held_out_kl: KL(teacher || student) on held-out text, in nats per token.
        held_out_tokens: predictions that this is the mean over.
        kl_tokens, kls: the held-out KL during training, by the tokens read.
        settings: of the measures, as plain values.
        versions, machine: of the libraries and the hardware.
    """

    held_out_kl: float
    held_out_tokens: int
    kl_tokens: list[int]
    kls: list[float]
    teacher: ModelMeasures
    student: ModelMeasures
    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]


def save_distillation(path: Path, result: Distillation) -> None:
    """Write a result, atomically."""
    write_json(path, {"format": FORMAT, **dataclasses.asdict(result)})


def load_distillation(path: Path) -> Distillation:
    """ResultsError: the file is damaged or of another version."""
    return _load(Distillation, path)


def _load(kind: type[Made], path: Path) -> Made:
    record = read_object(path)
    if record.pop("format", None) != FORMAT:
        raise ResultsError(f"result {path} is not of format {FORMAT}; delete that file to have it made again")
    return from_record(kind, record, path)
