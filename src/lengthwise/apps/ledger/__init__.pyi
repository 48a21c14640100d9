from .contracts import ENDED, Ending, Lease, Ledger, Output, Partial, State, TaskRow
from .table_ledger import FILE, TableLedger, open_ledger

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
