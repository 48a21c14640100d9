from .contracts import FINISHED, Ending, Lease, Output, Partial, State, TaskRow
from .table_ledger import FILE, Ledger, open_ledger

__all__ = ["FILE", "FINISHED", "Ending", "Lease", "Ledger", "Output", "Partial", "State", "TaskRow", "open_ledger"]
