"""Reads what the benchmarks have measured, for claims about speed: no number is measured twice. Only this module knows the form
of their result files."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastweights.results.records import read_object

from ..record import Origin
from .conditions import Unmeasured
from .measurement import Column, Number

__all__ = ["SIZE", "Benchmark", "Reading", "divide"]

SIZE = ("batch", "length", "heads", "channels", "value_channels")


class Reading(NamedTuple):
    """A time that a benchmark has measured, in milliseconds, and the file and the run that it is from."""

    ms: float
    file: str
    origin: Origin


def divide(measure: str, above: Reading, below: Reading, column: Column, **fields: Any) -> Number:
    """The number that is one time over another, with the origin of the first. fields: of `Number`."""
    run = {"file": above.file}
    return Number(measure, above.ms / below.ms, column, run=run, origin=above.origin, **fields)


class Benchmark:
    """A result file of a benchmark.

    Args:
        folder: with the result files. name: of the file. command: which measures it.

    Raises:
        Unmeasured: there is no such file.
    """

    def __init__(self, folder: Path, name: str, command: str) -> None:
        self.name, path = name, folder / name
        if not path.exists():
            raise Unmeasured(
                f"needs {path}, which `{command}` measures on that GPU; --measurements names another folder"
            )
        self.content = read_object(path)

    def kernel_sizes(self, op: str) -> Iterator[dict[str, int]]:
        """The sizes at which kernels-*.json has an op's forward and backward, by the names of `SIZE`."""
        for key in self.content["rows"]:
            name, _, size = key.rpartition(" ")
            if name == op:
                yield dict(zip(SIZE, map(int, size.split(",")), strict=True))

    def kernel_ms(self, op: str, size: Mapping[str, int], stage: str, backend: str = "ours") -> Reading | None:
        """Device time of an op in kernels-*.json; None where not measured.

        Args:
            stage: "forward" or "forward_backward".
            backend: whose: "ours", or "tied" for a delta rule without a write key of its own.
        """
        row = self.content["rows"].get(f"{op} {','.join(str(size[name]) for name in SIZE)}", {})
        if stage not in row:
            return None
        return self._reading(row[stage]["graph"][backend][0], row)

    def preset_step_ms(self, preset: str, sketch: int | None = None) -> Reading | None:
        """A training step of a preset in training-steps-*.json, with this sketch of its memory; None where not measured."""
        return self._step_ms(preset if sketch is None else f"{preset} with sketch {sketch}")

    def layers_step_ms(self, mixer: str, beside: str | None = None) -> Reading | None:
        """A training step of 24 layers, compiled by blocks and replayed, in training-steps-*.json; None where not measured.

        beside: measured in turn with the layers of this mixer; with those of its own base if not given.
        """
        model, other = (f"24 layers of {name}, compiled by blocks, replayed" for name in (mixer, beside or mixer))
        return self._step_ms(model, other)

    def _step_ms(self, model: str, comparison: str | None = None) -> Reading | None:
        for name, part in self.content["comparisons"].items():
            if model in part["models"] and comparison in (None, name):
                return self._reading(statistics.median(part["models"][model]["step, ms"]), part)
        return None

    def layer_widths(self, mixer: str, base: str) -> Iterator[int]:
        """The widths at which decode-layers-*.json has a layer beside another one."""
        for key in self._layers(mixer, base):
            name, _, width = key.partition(" ")
            if name == "width":
                yield int(width)

    def layer_ms(self, mixer: str, beside: str, width: int, *, of_base: bool = False) -> Reading:
        """A decoding step of a layer, or of the one `beside` it, in decode-layers-*.json."""
        part = self._layers(mixer, beside)
        times = part[f"width {width}"]["layers"][beside if of_base else mixer]["ms"]
        return self._reading(statistics.median(times), part)

    def _layers(self, mixer: str, base: str) -> Mapping[str, Any]:
        (part,) = (part for name, part in self.content["pairs"].items() if name.startswith(f"{mixer} beside {base},"))
        return part

    def attention_lengths(self) -> Iterator[int]:
        """The lengths at which vla-*.json has a forward."""
        yield from map(int, self.content["rows"])

    def attention_ms(self, rule: str, length: int) -> Reading | None:
        """A forward of variational linear attention ("vla", "vla refreshed") or of a kernel of softmax attention in vla-*.json;
        None where not measured."""
        row = self.content["rows"][str(length)]
        return self._reading(row[rule]["median"]) if rule in row else None

    def loop_ms(self, rule: str) -> Reading:
        """A forward over 4,096 tokens by a loop over tokens ("loop") or by ours ("vla refreshed") in vla-*.json."""
        return self._reading(self.content["loop"][rule]["median"])

    def _reading(self, ms: float, part: Mapping[str, Any] = {}) -> Reading:
        """With the origin of a part of the file, which may be from another run than the rest."""
        when = {**self.content, **part.get("measured", {})}
        commit, _, changes = when["commit"].partition(" ")
        versions = {name: when[name] for name in ("torch", "triton", "fla", "fastweights") if when.get(name)}
        origin = Origin(
            device=self.content["device"], versions=versions, commit=commit, date=when["time"], changed=bool(changes)
        )
        return Reading(float(ms), self.name, origin)
