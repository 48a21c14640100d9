"""Plans and runs of applications to people: what runs where and when, and what it comes to."""

from lengthwise.report.apps._facts import AppFacts
from lengthwise.report.apps._sentences import sentences
from lengthwise.report.apps._words import (
    WHY,
    difference,
    gpus_had,
    idle_shares,
    named,
    shape,
    supposed,
    switched,
    took,
    took_about,
)
from lengthwise.report.apps.html import write_app_html

__all__ = [
    "WHY",
    "AppFacts",
    "difference",
    "gpus_had",
    "idle_shares",
    "named",
    "sentences",
    "shape",
    "supposed",
    "switched",
    "took",
    "took_about",
    "write_app_html",
]
