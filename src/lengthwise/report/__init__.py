"""Numbers to people: terminal table, self-contained page, timeline, machine-readable file."""

from lengthwise.report._numbers import percent, rounded
from lengthwise.report.binding import Binding, bound_by, waited_in_all, what_binds
from lengthwise.report.compare import compare_table, write_compare_html, write_compare_json
from lengthwise.report.html import write_html
from lengthwise.report.json_file import write_json
from lengthwise.report.lab import lab_table, write_lab_html, write_lab_json
from lengthwise.report.result import Result
from lengthwise.report.search import (
    limit_text,
    metric_text,
    search_table,
    write_search_html,
    write_search_json,
)
from lengthwise.report.table import table
from lengthwise.report.timeline import write_timeline

__all__ = [
    "Binding",
    "Result",
    "bound_by",
    "compare_table",
    "lab_table",
    "limit_text",
    "metric_text",
    "percent",
    "rounded",
    "search_table",
    "table",
    "waited_in_all",
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
