"""The papers' claims as named, seeded experiments that anyone can run again: `fastweights reproduce`.

`papers` has one file per claim. Results of our own lie beside them, in `fastweights_studies.own`.
"""

from .claim import OWN, PAPERS, SOURCES, Claim
from .conditions import Conditions
from .ledger import claim_names, claims_of, find_claim
from .measurement import Measurement, Number
from .record import ClaimRecord, committed_records, load_record, load_records, save_record
from .run import run_claim
from .verdict import STATUSES, Status, Verdict
from .words import Quantity, Words

__all__ = [
    "OWN",
    "PAPERS",
    "SOURCES",
    "STATUSES",
    "Claim",
    "ClaimRecord",
    "Conditions",
    "Measurement",
    "Number",
    "Quantity",
    "Status",
    "Verdict",
    "Words",
    "claim_names",
    "claims_of",
    "committed_records",
    "find_claim",
    "load_record",
    "load_records",
    "run_claim",
    "save_record",
]
