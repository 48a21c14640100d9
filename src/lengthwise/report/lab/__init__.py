"""Laboratories to people: is length-aware scheduling worth it, as a terminal table, a page and a file."""

from lengthwise.report.lab.html import write_lab_html
from lengthwise.report.lab.json_file import write_lab_json
from lengthwise.report.lab.table import lab_table

__all__ = ["lab_table", "write_lab_html", "write_lab_json"]
