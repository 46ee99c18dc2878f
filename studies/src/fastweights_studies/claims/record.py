"""The result of a claim, and its JSON file: typed rows, with the verdict and what was declared beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from fastweights.checks import describe_value
from fastweights.kinds import checked
from fastweights.outputs import check_file, claimed
from fastweights.results.records import ResultsError, from_record, read_object
from fastweights.untrusted import read_json_object

from ..places import RESULTS
from ..record import Origin, Row, read_about, read_rows, write_rows
from .ledger import claim_names, find_claim
from .measurement import Measurement, Number
from .verdict import STATUSES, Status

__all__ = ["ClaimRecord", "claimed_records", "committed_records", "load_record", "load_records", "save_record"]

COMMITTED = RESULTS / "claims"


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimRecord:
    """What was measured for a claim, when, where and by which command.

    Attributes:
        claim: its name. declaration: what was written before the run (`Claim.declaration`).
        status, statements: the verdict.
        rows: the numbers.
        seeds, command: to run it again. device: the torch device that it ran on.
        seconds: time that the measurement took.
        origin: where and when it ran. A row that was measured earlier has an origin of its own.
    """

    claim: str
    declaration: dict[str, Any]
    status: Status
    statements: list[str]
    rows: list[Row]
    seeds: list[int]
    command: str
    device: str
    seconds: float
    origin: Origin

    @property
    def reason(self) -> str:
        return "; ".join(self.statements)

    @property
    def measurement(self) -> Measurement:
        return Measurement(tuple(map(Number.from_row, self.rows)))

    def sources(self) -> list[str]:
        """The files that rows are from which were measured earlier, each with the machine, the date and the commit."""
        found = []
        for row in self.rows:
            if "file" in row.run:
                torch, date, commit = row.origin.versions["torch"], row.origin.date[:10], row.origin.commit[:7]
                changed = " with uncommitted changes" * row.origin.changed
                found.append(f"{row.run['file']}: {row.origin.device}, torch {torch}, {date}, commit {commit}{changed}")
        return list(dict.fromkeys(found))


@checked
def save_record(folder: Path, record: ClaimRecord) -> Path:
    """Write the record to its file in `folder`, which is made if it does not exist, whole or not at all.

    Raises:
        ValueError: a link, or a file that is no record of the claim, is there.
    """
    path = record_path(folder, record.claim, record.device)
    check_file("output", path, partial(_is_record, record.claim), "result")
    folder.mkdir(parents=True, exist_ok=True)
    about = dataclasses.asdict(dataclasses.replace(record, rows=[]))
    del about["rows"]
    write_rows(path, record.rows, about)
    return path


def claimed_records(
    name: str, folder: Path, claims: Iterable[str], device: str, *, overwrite: bool
) -> AbstractContextManager[None]:
    """Holds the files that `save_record` writes for these claims to the folder that the argument `name` names; see `claimed`."""
    files = {record_path(folder, claim, device): partial(_is_record, claim) for claim in claims}
    return claimed(name, files, "result", overwrite=overwrite)


def record_path(folder: Path, claim: str, device: str) -> Path:
    """The file of a result that a device has measured."""
    return folder / f"{find_claim(claim).result_name(device)}.json"


def _is_record(claim: str, path: Path) -> bool:
    """Whether a file is a result of the claim, in this format or in the one before."""
    try:
        content = read_json_object(path)
    except ValueError:
        return False
    about = content.get("about", content)
    return isinstance(about, dict) and {"declaration", "status"} <= about.keys() and about.get("claim") == claim


@checked
def load_record(path: Path) -> ClaimRecord:
    """Raises:
    ResultsError: the file is damaged, or holds something else or a result in the format of before.
    """
    if "numbers" in read_object(path):
        raise ResultsError(f"result {path} has the format of before; measure the claim again, with --overwrite")
    about = read_about(path)
    if "status" in about and about["status"] not in STATUSES:
        got = describe_value(about["status"])
        raise ResultsError(f"result {path} has the unknown status {got}; run the claim again")
    origin = from_record(Origin, about.get("origin", {}), path)
    return from_record(ClaimRecord, {**about, "origin": origin, "rows": read_rows(path)}, path)


@checked
def load_records(folder: Path) -> dict[str, ClaimRecord]:
    """The records in a folder by name: that of the claim, with "-cuda" where a GPU has measured a larger size of it. None where
    there is no folder."""
    names = dict.fromkeys(find_claim(name).result_name(device) for name in claim_names() for device in ("cpu", "cuda"))
    return {name: load_record(folder / f"{name}.json") for name in names if (folder / f"{name}.json").exists()}


def committed_records() -> dict[str, ClaimRecord]:
    """The records that the studies come with, as of `load_records`: in a checkout those of studies/results, else those of the
    wheel."""
    return load_records(COMMITTED)
