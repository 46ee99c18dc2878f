"""Reads what the measuring scripts have found, for claims about speed: no number is measured twice. Only this module knows the
columns of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..measure.models import LAYERS, WIDTH
from ..record import Origin, Plain, Row, read_rows, select
from .conditions import Unmeasured
from .measurement import Column, Number

__all__ = ["Benchmark", "Reading", "divide"]


class Reading(NamedTuple):
    """A time that a script has measured, in milliseconds, and the file and the run that it is from."""

    ms: float
    file: str
    origin: Origin


def divide(measure: str, above: Reading, below: Reading, column: Column, **fields: Any) -> Number:
    """The number that is one time over another, with the origin of the first. fields: of `Number`."""
    run = {"file": above.file}
    return Number(measure, above.ms / below.ms, column, run=run, origin=above.origin, **fields)


class Benchmark:
    """A result file of a measuring script.

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
        self.rows = read_rows(path)

    def _read(self, task: str, measure: str, *, column: Mapping[str, Plain] = {}, **fields: Any) -> Reading | None:
        """The first row with these fields; None where not measured."""
        for row in select(self.rows, task=task, measure=measure, column=column, **fields):
            if row.value is not None:
                return self._reading(row)
        return None

    def _reading(self, row: Row) -> Reading:
        assert row.value is not None
        return Reading(row.value, self.name, row.origin)

    def kernel_sizes(self, op: str) -> Iterator[dict[str, int]]:
        """The sizes (B, T, H, K, V) at which kernels-*.json has an op's forward and backward."""
        column: dict[str, Plain] = {"op": op, "peer": None, "replayed": True}
        for row in select(self.rows, task="kernels", measure="forward_backward_ms", column=column):
            yield {name: int(row.column[name]) for name in "BTHKV"}  # type: ignore[arg-type]

    def kernel_ms(self, op: str, size: Mapping[str, int], stage: str, peer: str | None = None) -> Reading | None:
        """Device time of an op in kernels-*.json; None where not measured.

        Args:
            stage: "forward" or "forward_backward".
            peer: whose: None for ours, or "tied" for a delta rule without a write key of its own.
        """
        column = {"op": op, **size, "peer": peer, "replayed": True}
        return self._read("kernels", f"{stage}_ms", column=column)

    def preset_step_ms(self, preset: str, sketch: int | None = None) -> Reading | None:
        """A training step of a preset in training-steps-*.json, with this sketch of its memory; None where not measured."""
        options = {} if sketch is None else {"sketch": sketch}
        column: dict[str, Plain] = {"preset": preset, "compiled": None, "replayed": False}
        return self._read("training_step", "step_ms", column=column, options=options)

    def layers_step_ms(self, mixer: str, beside: str | None = None) -> Reading | None:
        """A training step of 24 layers, compiled by blocks and replayed, in training-steps-*.json; None where not measured.

        beside: the base of the layers of this mixer, measured in turn with them; the layers themselves if not given.
        """
        column: dict[str, Plain] = {
            "layers": LAYERS, "width": WIDTH, "compiled": "blocks", "replayed": True, "library": "fastweights",
        }  # fmt: skip
        steps = select(self.rows, task="training_step", measure="step_ms", column=column, options={})
        compared = {row.run["comparison"] for row in select(steps, mixer=beside or mixer) if row.run["side"] == "model"}
        own = [
            row for row in select(steps, mixer=mixer) if row.run["comparison"] in compared and "mlp" not in row.column
        ]
        return self._reading(own[0]) if own else None

    def layer_widths(self) -> list[int]:
        """The widths at which decode-layers-*.json has layers with states of their own."""
        rows = select(self.rows, task="decode_layer", measure="step_ms", column={"pool": False})
        return list(dict.fromkeys(int(row.column["width"]) for row in rows))  # type: ignore[arg-type]

    def layer_ms(self, mixer: str, width: int, **options: Plain) -> Reading | None:
        """A decoding step of a layer in decode-layers-*.json; None where not measured."""
        column: dict[str, Plain] = {"width": width, "pool": False}
        return self._read("decode_layer", "step_ms", mixer=mixer, options=options, column=column)

    def attention_lengths(self) -> list[int]:
        """The lengths at which vla-*.json has a forward."""
        rows = select(self.rows, task="vla", measure="forward_ms", column={"beside_loop": False})
        return list(dict.fromkeys(int(row.column["length"]) for row in rows))  # type: ignore[arg-type]

    def attention_ms(self, by: str, length: int) -> Reading | None:
        """A forward of variational linear attention ("vla", "vla_refreshed") or of a kernel of softmax attention in vla-*.json;
        None where not measured."""
        return self._read("vla", "forward_ms", column={"length": length, "by": by, "beside_loop": False})

    def loop_ms(self, by: str) -> Reading | None:
        """A forward over 4,096 tokens by a loop over tokens ("loop") or by ours ("vla_refreshed") in vla-*.json."""
        return self._read("vla", "forward_ms", column={"by": by, "beside_loop": True})
