from .contracts import FINISHED, Ending, Lease, Ledger, Output, Partial, State, TaskRow
from .table_ledger import FILE, TableLedger, open_ledger

__all__ = [
    "FILE",
    "FINISHED",
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
