"""The result of a claim, and its JSON file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from fastweights.checks import describe_value
from fastweights.files import write_json
from fastweights.kinds import checked
from fastweights.outputs import check_file, claim_files, has_keys
from fastweights.results.records import ResultsError, from_record, read_object

from ..places import RESULTS
from .claim import STATUSES, Measurement, Status
from .ledger import claim_names, find_claim

__all__ = ["ClaimRecord", "claimed_records", "committed_records", "load_record", "load_records", "save_record"]

COMMITTED = RESULTS / "claims"


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimRecord:
    """What was measured for a claim, when, where and by which command.

    Attributes:
        claim: its name. declaration: what was written before the run (`Claim.declaration`).
        status, reason: the verdict.
        numbers: by name, one value per seed; None where a number was not finite.
        seeds, command: to run it again.
        origin, undertrained: of `Measurement`.
        seconds: time that the measurement took. time: when it ended, UTC.
        versions, machine: the libraries and the hardware.
    """

    claim: str
    declaration: dict[str, Any]
    status: Status
    reason: str
    numbers: dict[str, list[float | None]]
    seeds: list[int]
    command: str
    origin: str
    undertrained: list[str]
    seconds: float
    time: str
    versions: dict[str, str]
    machine: dict[str, Any]

    @property
    def measurement(self) -> Measurement:
        values = {name: [math.nan if x is None else x for x in row] for name, row in self.numbers.items()}
        return Measurement(values, self.origin, tuple(self.undertrained))


@checked
def save_record(folder: Path, record: ClaimRecord) -> Path:
    """Write the record to its file in `folder`, which is made if it does not exist, whole or not at all.

    Raises:
        ValueError: a link, or a file that is no record of the claim, is there.
    """
    path = record_path(folder, record.claim, record.machine["device"])
    check_file("output", path, partial(_is_record, record.claim), "result")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, dataclasses.asdict(record))
    return path


def claimed_records(
    name: str, folder: Path, claims: Iterable[str], device: str, *, overwrite: bool
) -> AbstractContextManager[None]:
    """Holds the files that `save_record` writes for these claims to the folder that the argument `name` names; see `claimed`."""
    files = {record_path(folder, claim, device): partial(_is_record, claim) for claim in claims}
    return claim_files(name, files, "result", overwrite=overwrite)


def record_path(folder: Path, claim: str, device: str) -> Path:
    """The file of a result that a device has measured."""
    return folder / f"{find_claim(claim).result_name(device)}.json"


def _is_record(claim: str, path: Path) -> bool:
    return has_keys(path, "declaration", "status", "numbers", claim=claim)


@checked
def load_record(path: Path) -> ClaimRecord:
    """Raises:
    ResultsError: the file is damaged or holds something else.
    """
    content = read_object(path)
    if "status" in content and content["status"] not in STATUSES:
        got = describe_value(content["status"])
        raise ResultsError(f"result {path} has the unknown status {got}; run the claim again")
    return from_record(ClaimRecord, content, path)


@checked
def load_records(folder: Path) -> dict[str, ClaimRecord]:
    """The records in a folder by name: that of the claim, with "-cuda" where a GPU has measured a larger size of it. None where
    there is no folder."""
    names = dict.fromkeys(find_claim(name).result_name(device) for name in claim_names() for device in ("cpu", "cuda"))
    return {name: load_record(folder / f"{name}.json") for name in names if (folder / f"{name}.json").exists()}


def committed_records() -> dict[str, ClaimRecord]:
    """The records that the library comes with, as of `load_records`: in a checkout those of studies/results, else those of the
    wheel."""
    return load_records(COMMITTED)
