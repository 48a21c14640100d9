"""Where tasks and their answers are kept: one contract, several stores."""

from lengthwise.apps.ledger.contracts import (
    ENDED,
    Ending,
    Lease,
    Ledger,
    Output,
    Partial,
    State,
    TaskRow,
)
from lengthwise.apps.ledger.opening import FILE, open_ledger
from lengthwise.apps.ledger.tables import TableLedger

__all__ = [
    "ENDED",
    "FILE",
    "Ending",
    "Lease",
    "Ledger",
    "Output",
    "Partial",
    "State",
    "TableLedger",
    "TaskRow",
    "open_ledger",
]
