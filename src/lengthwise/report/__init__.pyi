from .binding import Binding, bound_by, mean_queued_s, what_binds
from .compare import compare_table, write_compare_html, write_compare_json
from .formatting import model_text, percent, rounded
from .json_file import write_json
from .lab import lab_table, write_lab_html, write_lab_json
from .result import Result
from .result_page import write_html
from .search import write_search_html, write_search_json
from .search_text import limit_text, metric_text, search_table
from .summary_table import table
from .timeline import write_timeline

__all__ = [
    "Binding",
    "Result",
    "bound_by",
    "compare_table",
    "lab_table",
    "limit_text",
    "mean_queued_s",
    "metric_text",
    "model_text",
    "percent",
    "rounded",
    "search_table",
    "table",
    "what_binds",
    "write_compare_html",
    "write_compare_json",
    "write_html",
    "write_json",
    "write_lab_html",
    "write_lab_json",
    "write_search_html",
    "write_search_json",
    "write_timeline",
]
