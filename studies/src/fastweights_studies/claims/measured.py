"""Reads what the benchmarks have measured, for claims about speed: no number is measured twice. Only this module knows the form
of their result files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastweights.results.records import read_object

from ..record import Origin, Plain
from .conditions import Unmeasured
from .measurement import Column, Number

__all__ = ["Benchmark", "Reading", "divide"]

SIZE = "BTHKV"  # sequences, tokens, heads, key and value channels


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
        """The sizes (B, T, H, K, V) at which kernels-*.json has an op's forward and backward."""
        for key in self.content["rows"]:
            name, _, size = key.rpartition(" ")
            if name == op:
                yield dict(zip(SIZE, map(int, size.split(","))))

    def kernel_ms(self, op: str, size: Mapping[str, int], stage: str, peer: str | None = None) -> Reading | None:
        """Device time of an op in kernels-*.json; None where not measured.

        Args:
            stage: "forward" or "forward_backward".
            peer: whose: None for ours, or "tied" for a delta rule without a write key of its own.
        """
        row = self.content["rows"].get(f"{op} {','.join(map(str, size.values()))}", {})
        return self._reading(row[stage]["graph"][peer or "ours"][0], row) if stage in row else None

    def preset_step_ms(self, preset: str, sketch: int | None = None) -> Reading | None:
        """A training step of a preset in training-steps-*.json, with this sketch of its memory; None where not measured."""
        return self._step_ms(preset if sketch is None else f"{preset} with sketch {sketch}")

    def layers_step_ms(self, mixer: str, beside: str | None = None) -> Reading | None:
        """A training step of 24 layers, compiled by blocks and replayed, in training-steps-*.json; None where not measured.

        beside: the base of the layers of this mixer, measured in turn with them; the layers themselves if not given.
        """
        model, other = (f"24 layers of {name}, compiled by blocks, replayed" for name in (mixer, beside or mixer))
        return self._step_ms(model, other)

    def _step_ms(self, model: str, comparison: str | None = None) -> Reading | None:
        for name, part in self.content["comparisons"].items():
            if model in part["models"] and comparison in (None, name):
                return self._reading(statistics.median(part["models"][model]["step, ms"]), part)
        return None

    def layer_widths(self) -> list[int]:
        """The widths at which decode-layers-*.json has layers with states of their own."""
        widths = [key.partition(" ") for part in self._layers() for key in part]
        return list(dict.fromkeys(int(width) for name, _, width in widths if name == "width"))

    def layer_ms(self, mixer: str, width: int, **options: Plain) -> Reading | None:
        """A decoding step of a layer in decode-layers-*.json; None where not measured."""
        label = ",".join(f"{name}={json.dumps(value)}" for name, value in options.items())
        for part in self._layers():
            times = part.get(f"width {width}", {}).get("layers", {}).get(f"{mixer}:{label}" if label else mixer)
            if times is not None:
                return self._reading(statistics.median(times["ms"]), part)
        return None

    def _layers(self) -> list[Mapping[str, Any]]:
        return [part for name, part in self.content["pairs"].items() if "in a pool" not in name]

    def attention_lengths(self) -> list[int]:
        """The lengths at which vla-*.json has a forward."""
        return list(map(int, self.content["rows"]))

    def attention_ms(self, by: str, length: int) -> Reading | None:
        """A forward of variational linear attention ("vla", "vla_refreshed") or of a kernel of softmax attention in vla-*.json;
        None where not measured."""
        return self._forward_ms(self.content["rows"][str(length)], by)

    def loop_ms(self, by: str) -> Reading | None:
        """A forward over 4,096 tokens by a loop over tokens ("loop") or by ours ("vla_refreshed") in vla-*.json."""
        return self._forward_ms(self.content["loop"], by)

    def _forward_ms(self, times: Mapping[str, Any], by: str) -> Reading | None:
        name = "vla refreshed" if by == "vla_refreshed" else by
        return self._reading(times[name]["median"]) if name in times else None

    def _reading(self, ms: float, part: Mapping[str, Any] = {}) -> Reading:
        """With the origin of a part of the file, which may be from another run than the rest."""
        when = {**self.content, **part.get("measured", {})}
        commit, _, changes = when["commit"].partition(" ")
        versions = {name: when[name] for name in ("torch", "triton", "fla", "fastweights") if when.get(name)}
        origin = Origin(
            device=self.content["device"], versions=versions, commit=commit, date=when["time"], changed=bool(changes)
        )
        return Reading(float(ms), self.name, origin)
