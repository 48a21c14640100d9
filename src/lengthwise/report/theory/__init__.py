"""Theory to people: what bins, and what an order of service, are worth; a page with theory over simulation."""

from lengthwise.report.theory._answers import answers, cuts_text
from lengthwise.report.theory.html import write_theory_html
from lengthwise.report.theory.json_file import theory_facts

__all__ = ["answers", "cuts_text", "theory_facts", "write_theory_html"]
