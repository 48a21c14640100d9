"""Two runs against each other to people: a terminal table, a page and a file."""

from lengthwise.report.compare.html import write_compare_html
from lengthwise.report.compare.json_file import write_compare_json
from lengthwise.report.compare.table import compare_table

__all__ = ["compare_table", "write_compare_html", "write_compare_json"]
