"""Profiles of operators to people: a page, and files for machines."""

from lengthwise.report.profile._words import axes_text, share_text, time_text
from lengthwise.report.profile.html import write_profile_html
from lengthwise.report.profile.json_file import check_json, profile_json

__all__ = ["axes_text", "check_json", "profile_json", "share_text", "time_text", "write_profile_html"]
