"""Decides the committed claims again on the numbers that were measured, after a rule or a declaration has changed.

python -m fastweights_studies.claims.decide_again C28 C30
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from .ledger import find_claim
from .record import COMMITTED, ClaimRecord, committed_records, save_record

__all__ = ["decide_again"]


def decide_again(record: ClaimRecord) -> ClaimRecord:
    """The record with the declaration and the verdict of the claim as they are now. Nothing is measured."""
    claim = find_claim(record.claim)
    declaration = claim.declaration(record.device)
    if not record.rows:
        return replace(record, declaration=declaration)
    verdict = claim.verdict(record.measurement)
    return replace(record, declaration=declaration, status=verdict.status, statements=list(verdict.statements))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="all where none is given")
    asked = {find_claim(name).name for name in parser.parse_args().claims}
    for record in committed_records().values():
        again = decide_again(record)
        if (not asked or record.claim in asked) and again != record:
            print(f"{save_record(COMMITTED, again)}: {record.status} -> {again.status}")


if __name__ == "__main__":
    main()
