"""Schedules to people: what was chosen and why, as a page and a file."""

from lengthwise.report.schedule._others import OTHER_HEADS, other_cells
from lengthwise.report.schedule._sure import SURE_HEADS, sure_cells
from lengthwise.report.schedule._watched import adapted_said, watched_said
from lengthwise.report.schedule._words import (
    DRIFT_HEADS,
    SIDE_HEADS,
    drift_cells,
    sentences,
    side_cells,
    tokens_said,
)
from lengthwise.report.schedule.html import write_schedule_html
from lengthwise.report.schedule.json_file import write_schedule_json, write_watched_json

__all__ = [
    "DRIFT_HEADS",
    "OTHER_HEADS",
    "SIDE_HEADS",
    "SURE_HEADS",
    "adapted_said",
    "drift_cells",
    "other_cells",
    "sentences",
    "side_cells",
    "sure_cells",
    "tokens_said",
    "watched_said",
    "write_schedule_html",
    "write_schedule_json",
    "write_watched_json",
]
