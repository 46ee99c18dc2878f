"""The models whose training steps are compared, what their rows say of them, and the rows read again."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fastweights.models import PRESETS, FastWeightsConfig, preset
from fastweights_studies.record import Origin, Row

from .rows import Value, make_rows

__all__ = ["FLA", "LAYERS", "WIDTH", "Model", "Step", "make_step_rows", "measured_in_one_comparison", "read_steps"]

TASK = "training_step"
LAYERS, WIDTH = 24, 1024  # of the default configuration
FLA = "fla"  # flash-linear-attention, as `library`
# How a title says that a model is compiled.
COMPILED = {"whole": "compiled", "blocks": "compiled by blocks"}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of a training step: a preset, or the default configuration with a mixer.

    Attributes:
        preset: its name; None for 24 layers of width 1024 with `mixer` and `options`.
        options: of the mixer. Of a preset, what its layers of Gated KalmaNet are given instead: `iterations`, `sketch`, or
            `memory`, the mixer in their place.
        library: "fla" for the model of flash-linear-attention with this mixer.
        mlp: the width of its MLP in place of the default one; of the default configuration.
        compiled: "whole" or "blocks" where torch.compile compiles it. replayed: whether forward and backward are a CUDA graph.
    """

    preset: str | None = None
    mixer: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    mlp: int | None = None
    library: str = "fastweights"
    compiled: str | None = None
    replayed: bool = False

    def __post_init__(self) -> None:
        if self.mlp is not None and (self.preset is not None or self.library == FLA):
            raise ValueError(f"mlp must be None for a preset and the models of {FLA}, which have a width of their own")

    @property
    def title(self) -> str:
        """As pages and commands name it, such as "24 layers of gdn, compiled by blocks, replayed"."""
        ways = [COMPILED[self.compiled]] if self.compiled else []
        return ", ".join([self._title_of_layers(), *ways, *["replayed"] * self.replayed])

    def _title_of_layers(self) -> str:
        if self.preset is not None:
            changes = [f"{value} iterations" if name == "iterations" else f"{name} {value}" if name == "sketch" else value
                       for name, value in self.options.items()]  # fmt: skip
            return f"{self.preset} with {' and '.join(changes)}" if changes else self.preset
        if self.library == FLA:
            return f"{LAYERS} layers of flash-linear-attention's {self.mixer}"
        gated = ""
        if "output_gate" in self.options:
            gated = "gated " if self.options["output_gate"] else "ungated "
        objective = f"-{self.options['objective']}" if "objective" in self.options else ""
        mlp = f" with an MLP of width {self.mlp:,}" if self.mlp else ""
        return f"{LAYERS} layers of {gated}{self.mixer}{objective}{mlp}"

    @property
    def name(self) -> str:
        """A name without spaces, which no other model has."""
        options = [f"{name}={value}" for name, value in self.options.items()]
        ways = [self.compiled] if self.compiled else []
        mlp = [f"mlp={self.mlp}"] if self.mlp else []
        own = [self.preset or f"{LAYERS}-{self.mixer}", *mlp, *([FLA] if self.library == FLA else []), *options]
        return ":".join([*own, *ways, *["replayed"] * self.replayed])

    @property
    def way(self) -> tuple[str | None, bool]:
        """How it is run."""
        return self.compiled, self.replayed

    def run(self, *, compiled: str | None, replayed: bool) -> Model:
        """This model, run in another way."""
        return dataclasses.replace(self, compiled=compiled, replayed=replayed)

    def configuration(self) -> FastWeightsConfig:
        """Ours of this size."""
        if self.preset is None:
            assert self.mixer is not None
            mixer = {"name": self.mixer, **self.options} if self.options else self.mixer
            return FastWeightsConfig(mixer=mixer, intermediate_size=self.mlp)
        config = preset(self.preset)
        return (
            preset(self.preset, mixer=[self._changed(*layer) for layer in config.mixers()]) if self.options else config
        )

    def _changed(self, mixer: str, options: Mapping[str, Any]) -> dict[str, Any]:
        if mixer != "gka":
            return {"name": mixer, **options}
        if "memory" in self.options:
            return {"name": self.options["memory"], "output_gate": "silu", "conv_init": options["conv_init"]}
        return {"name": mixer, **options, **self.options}

    def mixers(self) -> frozenset[str]:
        """The mixers of its layers; none of a preset that is no longer there."""
        if self.preset is None:
            return frozenset({str(self.mixer)})
        return mixers_of(self.preset, tuple(self.options.items()))

    def column(self, batch: int, length: int) -> dict[str, Any]:
        """What a row says of it beside mixer and options."""
        size: dict[str, Any] = {"preset": self.preset} if self.preset else {"layers": LAYERS, "width": WIDTH}
        if self.mlp:
            size["mlp"] = self.mlp
        ways = {"compiled": self.compiled, "replayed": self.replayed, "library": self.library}
        return {**size, "batch": batch, "length": length, **ways}


@cache
def mixers_of(name: str, options: tuple[tuple[str, Any], ...]) -> frozenset[str]:
    """The mixers of a preset, or of one with other options; pages ask for those of the same few again and again."""
    if name not in PRESETS:
        return frozenset()
    return frozenset(mixer for mixer, _ in Model(preset=name, options=dict(options)).configuration().mixers())


@dataclass(frozen=True, kw_only=True)
class Step:
    """What was measured of a model in a comparison."""

    model: Model
    batch: int
    length: int
    origin: Origin
    values: Mapping[str, float]


def make_step_rows(
    comparison: Model, model: Model, batch: int, length: int, origin: Origin, values: Mapping[str, Value]
) -> list[Row]:
    """The rows of a model in a comparison, which has the name of the model that is compared with its base."""
    side = "model" if model == comparison else "base"
    return make_rows(
        TASK,
        origin,
        values,
        mixer=model.mixer,
        options=dict(model.options),
        column=model.column(batch, length),
        run={"comparison": comparison.name, "side": side},
    )


def measured_in_one_comparison(row: Row) -> Hashable:
    return row.task, row.origin.device, row.run["comparison"], row.column["batch"], row.column["length"]


def read_model(row: Row) -> Model:
    column = row.column
    return Model(
        preset=column.get("preset"),  # type: ignore[arg-type]
        mixer=row.mixer,
        options=row.options,
        mlp=column.get("mlp"),  # type: ignore[arg-type]
        library=str(column["library"]),
        compiled=column["compiled"],  # type: ignore[arg-type]
        replayed=bool(column["replayed"]),
    )


def read_steps(rows: Iterable[Row]) -> list[tuple[Step, Step]]:
    """The comparisons in order: the base, and the model beside it, which may be the base itself."""
    found: dict[Hashable, dict[str, list[Row]]] = {}
    for row in rows:
        if row.task == TASK:
            sides = found.setdefault(measured_in_one_comparison(row), {})
            sides.setdefault(str(row.run["side"]), []).append(row)
    pairs = []
    for sides in found.values():
        steps = {
            side: Step(
                model=read_model(measured[0]),
                batch=int(measured[0].column["batch"]),  # type: ignore[arg-type]
                length=int(measured[0].column["length"]),  # type: ignore[arg-type]
                origin=measured[0].origin,
                values={row.measure: row.value for row in measured if row.value is not None},
            )
            for side, measured in sides.items()
        }
        pairs.append((steps.get("base", steps.get("model")), steps.get("model", steps.get("base"))))
    return pairs  # type: ignore[return-value]  # every comparison has a side
