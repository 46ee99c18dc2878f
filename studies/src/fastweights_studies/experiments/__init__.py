"""The papers' claims as named, seeded experiments that anyone can run again: `fastweights reproduce`.

They lie inside the package, so that the command works from an installed wheel. `claims` has one file per claim.
"""

from .claim import OWN, PAPERS, SOURCES, STATUSES, Claim, Conditions, Measurement, Status, Verdict
from .ledger import claim_names, claims_of, find_claim
from .record import ClaimRecord, committed_records, load_record, load_records, save_record
from .run import run_claim

__all__ = [
    "OWN",
    "PAPERS",
    "SOURCES",
    "STATUSES",
    "Claim",
    "ClaimRecord",
    "Conditions",
    "Measurement",
    "Status",
    "Verdict",
    "claim_names",
    "claims_of",
    "committed_records",
    "find_claim",
    "load_record",
    "load_records",
    "run_claim",
    "save_record",
]
