from .app import App, Call, Fan, From, Loop, Model, Report, Sampling, each, over, times
from .inputs import Rows, read_rows

__all__ = [
    "App",
    "Call",
    "Fan",
    "From",
    "Loop",
    "Model",
    "Report",
    "Rows",
    "Sampling",
    "each",
    "over",
    "read_rows",
    "times",
]
