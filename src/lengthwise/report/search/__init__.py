"""Plans to people: which deployment to buy, as a terminal table, a page and a file."""

from lengthwise.report.search._words import limit_text, metric_text
from lengthwise.report.search.html import write_search_html
from lengthwise.report.search.json_file import write_search_json
from lengthwise.report.search.table import search_table

__all__ = ["limit_text", "metric_text", "search_table", "write_search_html", "write_search_json"]
